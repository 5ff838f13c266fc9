"""The scheduler's machine against one block-exact engine, step by step: no clock, no processes, no chance.

ACKs of a step reach the scheduler before the next one; a grant reaches the engine after `lag_steps`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import NamedTuple

from services.scheduler.core import messages as m
from services.scheduler.core.admission.policy import Policy
from services.scheduler.core.machine import Machine
from services.scheduler.core.sharing.share import Share
from services.worker.core.messages import Ending
from services.worker.core.sizing import Sizes, covered_tokens, need_blocks, size
from services.worker.engine import ENGINE_SCHEDULING, ENGINE_WATERMARK
from services.worker.simulated.batch import Batch, Rules
from services.worker.simulated.sequence import Sequence
from tests.support.scheduling import SECOND_NS, announced

BYTES_PER_TOKEN = 5
SEQUENCES = 256
TOKEN_BUDGET = 2048


class Lengths(NamedTuple):
    """Prompt and output of one request, in tokens."""

    prompt: int
    output: int


class Outcome(NamedTuple):
    """What a run took: engine steps, preemptions, and the mean usage while requests waited."""

    steps: int
    preemptions: int
    usage: float


def pushed(lengths: List[Lengths], sizes: Sizes) -> Outcome:
    """Push everything into the engine at once."""
    batch = Batch(sizes.blocks_total, sizes.block_size, SEQUENCES, TOKEN_BUDGET)
    for number, length in enumerate(lengths):
        batch.add(Sequence(f"r{number}", length.prompt, length.output))
    steps, usages = 0, []
    while batch.busy:
        batch.step()
        steps += 1
        if batch.waiting:
            usages.append(1 - batch.blocks_free / batch.blocks_total)
    return Outcome(steps, batch.preemptions, sum(usages) / max(len(usages), 1))


@dataclass
class Running:
    """One request in the engine, and the output length at which its reservation grows (0: never)."""

    sequence: Sequence
    limit: int
    ahead: int
    tell_at: int


class Granted:
    """The same requests, admitted by a policy."""

    def __init__(self, policy: Policy, lengths: List[Lengths], sizes: Sizes, max_tokens: int, lag_steps: int) -> None:
        """Announce everything; nothing has run."""
        self.machine = Machine(policy, {"batch": Share()}, 0, 0)
        # As the worker starts vLLM.
        rules = Rules(watermark=ENGINE_WATERMARK, scheduling_policy=ENGINE_SCHEDULING)
        self.batch = Batch(sizes.blocks_total, sizes.block_size, SEQUENCES, TOKEN_BUDGET, rules)
        self.sizes, self.lengths, self.max_tokens, self.lag_steps = sizes, lengths, max_tokens, lag_steps
        self.running: dict[str, Running] = {}
        self.on_the_way: deque[tuple[int, m.Grant]] = deque()
        self.steps = self.seq = self.granted = 0
        self.usages: list[float] = []
        shape = m.EngineShape(sizes.capacity_blocks, sizes.block_size, sizes.max_model_len, SEQUENCES, 0, True, 1)
        self.tell(m.Tick(), m.WorkerOpened(1, "w1", "i1", ("m",), shape), m.QueueOpened(("batch",)))
        for number, length in enumerate(lengths):
            request = announced(f"r{number}", "batch", 0, number, max_tokens=max_tokens, model="m")
            self.tell(request.replace(prompt_bytes=length.prompt * BYTES_PER_TOKEN))

    def tell(self, *messages: m.Input) -> None:
        """Feed one wake-up and keep its grants."""
        now_ns = SECOND_NS * 10
        for message in messages:
            self.machine.step(message, now_ns)
        for effect in self.machine.arbitrate(now_ns):
            if isinstance(effect, m.Grant):
                self.on_the_way.append((self.steps + self.lag_steps, effect))
                self.granted += 1

    def run(self) -> Outcome:
        """Run everything to its end."""
        while self.batch.busy or self.on_the_way or self.granted < len(self.lengths):
            while self.on_the_way and self.on_the_way[0][0] <= self.steps:
                self.start(self.on_the_way.popleft()[1])
            self.step()
        return Outcome(self.steps, self.batch.preemptions, sum(self.usages) / max(len(self.usages), 1))

    def start(self, grant: m.Grant) -> None:
        """A grant has come through: the prompt is tokenized and goes to the engine."""
        length = self.lengths[int(grant.request_id[1:])]
        need = size(self.sizes, length.prompt, self.max_tokens, 1)
        assert not isinstance(need, Ending)
        sequence = Sequence(grant.request_id, length.prompt, min(length.output, need.max_tokens))
        run = self.running[grant.request_id] = Running(
            sequence, need.max_tokens, grant.reserve_output_tokens or need.max_tokens, 0
        )
        self.batch.add(sequence)
        self.tell(m.Gone(grant.request_id, m.GoneReason.CLAIMED), self.reserve(run))

    def reserve(self, run: Running) -> m.TokenizerAck:
        """Settle, or grow with the output, as the worker's session does."""
        sequence = run.sequence
        wanted = min(sequence.generated + run.ahead, run.limit)
        held = need_blocks(self.sizes, sequence.prompt_tokens, wanted, 1)
        covered = covered_tokens(self.sizes, sequence.prompt_tokens, held, 1)
        run.tell_at = covered + 1 - run.ahead if covered < run.limit else 0
        self.seq += 1
        prompt = sequence.prompt_tokens
        return m.TokenizerAck(1, 1, sequence.key, self.seq, held, prompt, sequence.generated, run.limit)

    def step(self) -> None:
        """One engine step, and what the worker says of it."""
        result = self.batch.step()
        self.steps += 1
        acks: list[m.Input] = []
        for sequence in result.ended:
            del self.running[sequence.key]
            self.seq += 1
            cause = m.ReleaseCause.COMPLETED
            acks.append(m.CompletionAck(1, 1, sequence.key, self.seq, cause, sequence.output_tokens))
        for sequence in result.sampled:
            run = self.running.get(sequence.key)
            if run is not None and 0 < run.tell_at <= sequence.generated:
                acks.append(self.reserve(run))
        usage = 1 - self.batch.blocks_free / self.batch.blocks_total
        if self.granted < len(self.lengths):
            self.usages.append(usage)
        counts = len(self.batch.running), len(self.batch.waiting), self.batch.preemptions
        self.tell(*acks, m.EngineReport(1, 1, self.batch.blocks_free, *counts, 0, usage))
        for worker in self.machine.fleet:
            assert worker.ledger.audit() == []
