"""What a simulated run is measured by: the cache over time, and every request's own times."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from benchmarks.admission.clock import SECOND_NS


@dataclass(slots=True)
class Life:
    """The times of one request, in ns; negative until they have come."""

    arrived_ns: int = -1
    entered_ns: int = -1
    first_ns: int = -1
    last_ns: int = -1
    done_ns: int = -1
    tokens: int = 0


@dataclass(slots=True)
class Meter:
    """One run's figures.

    The cache over time is what requests hold while a step runs, those that end with the step included: vLLM's own
    statistic is taken after they have left and reads lower by a step's departures.
    """

    lives: list[Life]
    gaps_ns: array[int] = field(default_factory=lambda: array("q"))
    waiting: int = 0
    finished: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    elapsed_ns: int = 0
    held_block_ns: int = 0
    block_ns: int = 0
    backlog_held_block_ns: int = 0
    backlog_block_ns: int = 0
    left_block_ns: int = 0
    left_of_block_ns: int = 0
    samples: list[tuple[int, int, float, bool]] = field(default_factory=list)

    def arrived(self, index: int, now_ns: int) -> None:
        """Note that a request exists."""
        self.lives[index].arrived_ns = now_ns
        self.waiting += 1

    def token(self, life: Life, now_ns: int) -> None:
        """Note one output token."""
        if life.tokens:
            self.gaps_ns.append(now_ns - life.last_ns)
        else:
            life.first_ns = now_ns
        life.last_ns = now_ns
        life.tokens += 1

    def done(self, life: Life, now_ns: int) -> None:
        """Note a request's end."""
        life.done_ns = now_ns
        self.finished += 1

    def held(self, held_blocks: int, blocks: int, passed_ns: int, backlog: bool) -> None:
        """Add a stretch of time in which an engine held so many of its blocks."""
        self.held_block_ns += held_blocks * passed_ns
        self.block_ns += blocks * passed_ns
        if backlog:
            self.backlog_held_block_ns += held_blocks * passed_ns
            self.backlog_block_ns += blocks * passed_ns

    def left(self, left_blocks: int, blocks: int, passed_ns: int, backlog: bool) -> None:
        """Add the time from one step's end to the next, with what the first left held: vLLM's own statistic."""
        if backlog:
            self.left_block_ns += left_blocks * passed_ns
            self.left_of_block_ns += blocks * passed_ns

    @property
    def usage_after_steps(self) -> float:
        """Mean share of the blocks that steps leave held while a backlog exists: as vLLM reports it."""
        return self.left_block_ns / max(self.left_of_block_ns, 1)

    @property
    def usage(self) -> float:
        """Mean share of the blocks held, over the whole run."""
        return self.held_block_ns / max(self.block_ns, 1)

    @property
    def backlog_usage(self) -> float:
        """Mean share of the blocks held while a request that could run waits anywhere."""
        return self.backlog_held_block_ns / max(self.backlog_block_ns, 1)

    @property
    def elapsed_s(self) -> float:
        """Seconds from the first arrival to the last end, or as long as the client says."""
        first, last = min(life.arrived_ns for life in self.lives), max(life.done_ns for life in self.lives)
        return (self.elapsed_ns or last - first) / SECOND_NS
