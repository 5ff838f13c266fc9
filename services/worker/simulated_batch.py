"""Continuous batching, block by block, as vLLM's V1 scheduler does it; no clock and no model.

A step gives every running sequence its next tokens (a chunk of the prompt or
one decoded token), takes the blocks those tokens need, and admits waiting
sequences whose whole prompt fits. When blocks run out, the sequence admitted
last gives all of its blocks back, goes to the head of the waiting line and is
computed again from its first token.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True)
class Sequence:
    """One completion in the engine; `output_tokens` is the length it will end at."""

    key: str
    prompt_tokens: int
    output_tokens: int
    generated: int = 0
    computed: int = 0
    blocks: int = 0
    preemptions: int = 0


class StepResult(NamedTuple):
    """What one step did: sequences that got a token, those that ended, and the tokens computed."""

    sampled: list[Sequence]
    ended: list[Sequence]
    computed_tokens: int


class Batch:
    """Sequences of one engine and its pool of blocks: `free + sum(blocks) == total`, always."""

    def __init__(self, blocks_total: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Start empty."""
        self.blocks_total = blocks_total
        self.blocks_free = blocks_total
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.preemptions = 0
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens

    def add(self, sequence: Sequence) -> None:
        """Put a sequence at the end of the waiting line."""
        self.waiting.append(sequence)

    def remove(self, keys: set[str]) -> None:
        """Abort sequences and free their blocks."""
        for sequence in [s for s in self.running if s.key in keys]:
            self.running.remove(sequence)
            self._free(sequence)
        self.waiting = deque(s for s in self.waiting if s.key not in keys)

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self.running or self.waiting)

    def step(self) -> StepResult:
        """Run one step."""
        scheduled: dict[str, int] = {}
        budget = self._max_num_batched_tokens
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            chunk = min(self._remaining(sequence), budget)
            while not self._take(sequence, chunk):
                preempted = True
                victim = self.running.pop()
                budget += scheduled.pop(victim.key, 0)
                self._preempt(victim)
                if victim is sequence:
                    break
            else:
                scheduled[sequence.key] = chunk
                budget -= chunk
                index += 1
        if not preempted:
            self._admit(budget, scheduled)
        return self._compute(scheduled)

    def _admit(self, budget: int, scheduled: dict[str, int]) -> None:
        """Start waiting sequences, in order, while the next one's whole prompt fits."""
        while self.waiting and budget > 0 and len(self.running) < self._max_num_seqs:
            sequence = self.waiting[0]
            if self._blocks_for(self._length(sequence)) > self.blocks_free:
                return
            chunk = min(self._remaining(sequence), budget)
            self._take(sequence, chunk)
            self.running.append(self.waiting.popleft())
            scheduled[sequence.key] = chunk
            budget -= chunk

    def _compute(self, scheduled: dict[str, int]) -> StepResult:
        sampled: list[Sequence] = []
        ended: list[Sequence] = []
        for sequence in self.running:
            sequence.computed += scheduled.get(sequence.key, 0)
            if sequence.key in scheduled and sequence.computed == self._length(sequence):
                sequence.generated += 1
                sampled.append(sequence)
                if sequence.generated >= sequence.output_tokens:
                    ended.append(sequence)
        for sequence in ended:
            self.running.remove(sequence)
            self._free(sequence)
        return StepResult(sampled, ended, sum(scheduled.values()))

    def _length(self, sequence: Sequence) -> int:
        return sequence.prompt_tokens + sequence.generated

    def _remaining(self, sequence: Sequence) -> int:
        return self._length(sequence) - sequence.computed

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _take(self, sequence: Sequence, chunk: int) -> bool:
        """Take the blocks for `chunk` more tokens; False, and nothing taken, if too few are free."""
        wanted = self._blocks_for(sequence.computed + chunk) - sequence.blocks
        if wanted > self.blocks_free:
            return False
        self.blocks_free -= wanted
        sequence.blocks += wanted
        return True

    def _free(self, sequence: Sequence) -> None:
        self.blocks_free += sequence.blocks
        sequence.blocks = 0
        sequence.computed = 0

    def _preempt(self, sequence: Sequence) -> None:
        self._free(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)
