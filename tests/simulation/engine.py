"""An engine that only counts blocks and tokens: runs take their time, grow, fail, and are preempted now and then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.worker.core import messages as m
from tests.simulation.coverage import Coverage
from tests.simulation.plan import Options
from tests.simulation.world import MS, World, demand

POISON_EVERY = 67
"""A prompt of two tokens less than a multiple of this ends the engine that runs it, at every attempt."""


@dataclass
class Run:
    """One attempt in the engine: how many tokens a completion will have, from when, in how long."""

    blocks: int
    tokens: int
    started_ns: int
    duration_ns: int


class SimEngine:
    """Belongs to one life of a worker; `tell` takes what the engine says to the session."""

    def __init__(
        self, world: World, options: Options, coverage: Coverage, tell: Callable[[m.Message], None], grows: bool
    ) -> None:
        """Be idle. If `grows`, reservations follow the output, and the engine may run out of blocks."""
        self._world = world
        self._capacity_blocks = options.capacity_blocks
        self._longest_run_ns = options.longest_run_ms * MS
        self._coverage = coverage
        self._tell = tell
        self._grows = grows
        self.failing_share = options.failing_share
        self.preempting_share = options.preempting_share
        self.trusts = True
        """Whether the credits it runs on are true ones; not after its worker has lied about them."""
        self.runs: dict[str, Run] = {}
        self._preemptions = 0

    def start(self, effect: m.StartEngine) -> None:
        """Run an attempt."""
        tokens = self._world.rng.randint(1, effect.max_tokens) if self._grows else effect.max_tokens
        run = Run(effect.held_blocks, tokens, self._world.now_ns(), self._world.draw_ns(self._longest_run_ns))
        self.runs[effect.run_id] = run
        self._report()
        self.tell_at(effect.run_id, effect.tell_at_tokens)
        self._world.after(run.duration_ns, self._finish, effect.run_id)

    def abort(self, run_id: str) -> None:
        """Stop an attempt; its blocks are free at once."""
        self.runs.pop(run_id, None)

    def tell_at(self, run_id: str, tokens: int) -> None:
        """Tell of the run's progress when it has generated so many tokens, if it gets that far."""
        run = self.runs.get(run_id)
        if run is not None and 0 < tokens < run.tokens:
            self._world.at(run.started_ns + run.duration_ns * tokens // run.tokens, self._progress, run_id, tokens)

    def _progress(self, run_id: str, tokens: int) -> None:
        run = self.runs.get(run_id)
        if run is not None:
            run.blocks += 1
            self._report()
            self._tell(m.EngineProgress(run_id, tokens))

    def _finish(self, run_id: str) -> None:
        run = self.runs.pop(run_id, None)
        if run is None:
            return
        self._report()
        if self._world.chance(self.failing_share):
            self._coverage.at("engine failure", "running")
            self._tell(m.EngineFailed(run_id, False, "engine_error", "the engine gave up"))
        else:
            self._tell(m.EngineFinished(run_id, run.tokens, 0))

    def _report(self) -> None:
        """Say how full the engine is; one that needs more blocks than it has preempts."""
        used = sum(run.blocks for run in self.runs.values())
        demand(
            self._grows or not self.trusts or used <= self._capacity_blocks, "an engine was given more than it holds"
        )
        preempts = used > self._capacity_blocks or self._world.chance(self.preempting_share)
        if preempts:
            self._preemptions += 1
            self._coverage.at("preemption", "running")
        free = max(self._capacity_blocks - used, 0)
        usage = 1 - free / self._capacity_blocks
        self._tell(m.EngineReported(free, len(self.runs), int(preempts), self._preemptions, 0, usage))
