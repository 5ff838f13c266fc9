"""One workload through the engine model and through vLLM's own scheduler, compared step by step."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import NamedTuple

from services.worker.simulated.batch import Batch, Rules
from services.worker.simulated.blocks import prompt_keys
from services.worker.simulated.sequence import Sequence


class Arrival(NamedTuple):
    """One completion: what it asks, how long its answer gets, the steps before which it comes and is aborted, its
    priority, and when it came by the clock of whoever asked, in seconds. That is the number of the arrival unless said;
    the completions of one request share it, and a clock may be set back."""

    prompt_ids: List[int]
    output_tokens: int
    at_step: int = 0
    abort_at_step: int | None = None
    priority: int = 0
    arrived_s: float | None = None


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival, and the engine's size and rules."""

    arrivals: List[Arrival]
    blocks: int
    block_size: int = 32
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    rules: Rules = field(default_factory=Rules)


class Step(NamedTuple):
    """What one step did and left: everything that the rules decide."""

    tokens: int
    admitted: list[str]
    preempted: list[str]
    """In order of name: vLLM keeps a set."""
    running: list[tuple[str, int]]
    """With the tokens whose KV entries exist, in the order they run."""
    waiting: list[str]
    blocks_free: int


def name_of(number: int) -> str:
    """Return the name of the arrival with that number."""
    return f"r{number}"


class Timetable:
    """Which requests come and which are aborted before each step."""

    def __init__(self, arrivals: List[Arrival]) -> None:
        """Start before step 0."""
        self.arrivals = arrivals
        self._added: set[int] = set()
        self._aborted: set[int] = set()

    @property
    def more(self) -> bool:
        """Whether requests are still to come."""
        return len(self._added) < len(self.arrivals)

    def due(self, step: int, idle: bool) -> tuple[list[int], list[int]]:
        """Return the numbers to add and to abort before `step`; an idle engine gets the next request at once."""
        coming = [n for n in range(len(self.arrivals)) if n not in self._added]
        added = [n for n in coming if self.arrivals[n].at_step <= step]
        if idle and not added:
            added = coming[:1]
        self._added.update(added)
        aborted = [n for n in self._added - self._aborted if self._aborts(n, step)]
        self._aborted.update(aborted)
        return added, sorted(aborted)

    def _aborts(self, number: int, step: int) -> bool:
        abort_at_step = self.arrivals[number].abort_at_step
        return abort_at_step is not None and abort_at_step <= step


def through_model(workload: Workload) -> list[Step]:
    """Run a workload through the engine model."""
    batch = Batch(
        workload.blocks, workload.block_size, workload.max_num_seqs, workload.max_num_batched_tokens, workload.rules
    )
    table = Timetable(workload.arrivals)
    steps: list[Step] = []
    while batch.busy or table.more:
        added, aborted = table.due(len(steps), not batch.busy)
        for number in added:
            arrival = workload.arrivals[number]
            keys = prompt_keys(arrival.prompt_ids, workload.block_size)
            prompt_tokens, output_tokens = len(arrival.prompt_ids), arrival.output_tokens
            batch.add(Sequence(name_of(number), prompt_tokens, output_tokens, keys, arrival.priority))
        batch.remove({name_of(number) for number in aborted})
        result = batch.step()
        steps.append(
            Step(
                result.computed_tokens,
                [sequence.key for sequence in result.admitted],
                sorted(sequence.key for sequence in result.preempted),
                [(sequence.key, sequence.computed) for sequence in batch.running],
                [sequence.key for sequence in batch.waiting],
                batch.blocks_free,
            )
        )
    return steps


def first_difference(model: List[Step], vllm: List[Step]) -> str:
    """Say where two runs part, or return an empty string."""
    for number, (ours, theirs) in enumerate(zip(model, vllm, strict=False)):
        for name, mine, its in zip(Step._fields, ours, theirs, strict=True):
            if mine != its:
                return f"step {number}: {name}: model {mine}, vLLM {its}"
    if len(model) != len(vllm):
        return f"model took {len(model)} steps, vLLM {len(vllm)}"
    return ""
