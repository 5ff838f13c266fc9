"""A simulated engine in virtual time: the production batch and profile, stepped by the clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from benchmarks.admission.clock import SECOND_NS, Clock
from benchmarks.admission.meter import Life, Meter
from benchmarks.admission.workloads import Item, Shape
from services.worker.core.messages import EngineReported
from services.worker.simulated.batch import Batch, Rules
from services.worker.simulated.sequence import Sequence


class Step(NamedTuple):
    """What an engine says at the end of a step: the requests that got a token, those that ended, and its own view."""

    sampled: list[Sequence]
    ended: list[Sequence]
    report: EngineReported


class Engine:
    """One engine. It steps whenever it has work; whoever listens hears of a step when its time has passed."""

    def __init__(
        self,
        clock: Clock,
        meter: Meter,
        shape: Shape,
        index: int = 0,
        watermark: float = 0.0,
        scheduling_policy: str = "fcfs",
    ) -> None:
        """Stand idle; `index` names the engine in the meter's samples, the last two are vLLM's options."""
        self.shape = shape
        self.by_priority = scheduling_policy == "priority"
        rules = Rules(
            watermark=watermark, enable_prefix_caching=shape.prefix_caching, scheduling_policy=scheduling_policy
        )
        self.batch = Batch(shape.blocks, shape.block_size, shape.max_num_seqs, shape.max_num_batched_tokens, rules)
        self.listen: Callable[[Step], None] = lambda _step: None
        self._clock = clock
        self._meter = meter
        self._index = index
        self._speed = shape.speed
        self._lives: dict[str, Life] = {}
        self._stepping = False
        self._since_ns = 0
        self._ended_ns = 0
        self._left_blocks = 0
        self._held_blocks = 0
        self._backlog = True
        self._prefill_ns = 0
        self._prefill_tokens = 0

    def add(self, key: str, item: Item, index: int, priority: int = 0) -> None:
        """Put a request into the engine's waiting line."""
        life = self._lives[key] = self._meter.lives[index]
        life.entered_ns = self._clock.now_ns
        self.batch.add(Sequence(key, item.prompt_tokens, item.output_tokens, item.keys, priority))
        if not self._stepping:
            self._stepping = True
            # Everything that arrives at this moment is in line before the step begins.
            self._clock.after(0, self._begin)

    @property
    def requests(self) -> int:
        """Requests inside, running or waiting."""
        return len(self.batch.running) + len(self.batch.waiting)

    def _begin(self) -> None:
        batch, meter = self.batch, self._meter
        self.account()
        result = batch.step()
        meter.waiting += len(result.preempted) - len(result.admitted)
        meter.computed_tokens += result.computed_tokens
        meter.preemptions += len(result.preempted)
        meter.recomputed_tokens += result.recomputed_tokens
        duration_ns = max(int(self._speed.step_s(result) * SECOND_NS), 1)
        self._prefill_ns += duration_ns * result.prefills
        self._prefill_tokens += result.prefill_tokens
        report = EngineReported(
            batch.blocks_free,
            len(batch.running),
            len(batch.waiting),
            batch.preemptions,
            duration_ns,
            1 - batch.blocks_free / batch.blocks_total,
            self._prefill_ns,
            self._prefill_tokens,
            batch.blocks_shared,
        )
        leaving = sum(self._blocks_of(sequence) for sequence in result.ended)
        self._held_blocks = min(batch.blocks_total - batch.blocks_free + leaving, batch.blocks_total)
        self._backlog = meter.waiting > 0
        meter.samples.append((self._clock.now_ns, self._index, self._held_blocks / batch.blocks_total, self._backlog))
        step = Step(result.sampled, result.ended, report)
        self._clock.after(duration_ns, lambda: self._end(step))

    def _blocks_of(self, sequence: Sequence) -> int:
        """Return the blocks a sequence held when it ended: the KV of its last token is never written."""
        return -(-(sequence.prompt_tokens + sequence.generated - 1) // self.shape.block_size)

    def _end(self, step: Step) -> None:
        now_ns, meter = self._clock.now_ns, self._meter
        self.account()
        meter.left(self._left_blocks, self.batch.blocks_total, now_ns - self._ended_ns, self._backlog)
        for sequence in step.sampled:
            meter.token(self._lives[sequence.key], now_ns)
        for sequence in step.ended:
            meter.done(self._lives.pop(sequence.key), now_ns)
        self._held_blocks = self._left_blocks = self.batch.blocks_total - self.batch.blocks_free
        self._ended_ns = now_ns
        self.listen(step)
        self._stepping = self.batch.busy
        if self._stepping:
            self._clock.after(0, self._begin)

    def account(self) -> None:
        """Add the time since the last step to the meter."""
        now_ns = self._clock.now_ns
        self._meter.held(self._held_blocks, self.batch.blocks_total, now_ns - self._since_ns, self._backlog)
        self._since_ns = now_ns
