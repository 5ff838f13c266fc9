"""Continuous batching, block by block, as vLLM 0.32's V1 scheduler does it; no clock and no model.

A step first gives every running sequence, in order, its next tokens (one
decoded token or a chunk of what is not computed yet) and the blocks they need.
When blocks run out, the sequence admitted last gives its blocks back, goes to
the head of the waiting line and is computed again later; by priority, that of
the highest number that came last, and it goes to its place in the line. If nobody was
preempted, waiting sequences are admitted in order while tokens, sequences and
blocks allow. Rules and their order are those of `Scheduler.schedule` and
`KVCacheManager.allocate_slots` (no speculation, no
connectors, full attention); docs/engine-model.md names the differences.

A step in which everybody decodes costs a few dictionary operations however
many sequences run: outputs and contexts follow from the step counter, and the
sequences that need a block or end are found by the step at which they do.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from services.worker.simulated.blocks import BlockPool, Key
from services.worker.simulated.sequence import Clock, Sequence, StepResult


class Rules(NamedTuple):
    """The scheduler's settings, with vLLM's names and defaults."""

    watermark: float = 0.0
    """Share of the blocks that stays free when a waiting sequence is admitted beside running ones."""
    long_prefill_token_threshold: int = 0
    """Most prompt tokens of one sequence in a step while there are others; 0: no limit."""
    scheduler_reserve_full_isl: bool = True
    """Admit only if the whole prompt fits, not only its first chunk."""
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    """`fcfs`, first come, first served, or `priority`: those of a lower number first, then first come, first served,
    and those below 0 pass the watermark (`vllm/scheduling`)."""


class Chunk(NamedTuple):
    """Tokens of a prompt that a step computes, and how many of them had been computed before a preemption."""

    start: int
    tokens: int
    recomputed: int


@dataclass(slots=True)
class _Work:
    """What the step being made has done so far."""

    budget: int
    threshold: int
    prefills: dict[Sequence, Chunk] = field(default_factory=dict)
    idle: list[Sequence] = field(default_factory=list)
    """Decoding sequences for which no tokens were left, and their computed tokens."""
    idle_context: int = 0
    cached_tokens: int = 0
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Batch:
    """Sequences of one engine and its pool of blocks."""

    def __init__(
        self,
        blocks_total: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        rules: Rules = Rules(),  # noqa: B008 - immutable
    ) -> None:
        """Start empty. `blocks_total` leaves vLLM's null block out."""
        self.blocks_total = blocks_total
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.preemptions = 0
        self._pool = BlockPool(blocks_total)
        self._rules = rules
        self._by_priority = rules.scheduling_policy == "priority"
        # vLLM takes the share of all blocks, the null block among them.
        self._watermark_blocks = int(rules.watermark * (blocks_total + 1))
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._clock = Clock()
        self._serial = 0
        self._partial: list[Sequence] = []
        """Running sequences whose known tokens are not all computed, in the order they run."""
        self._context = 0
        """Computed tokens of all decoding sequences."""
        self._due: list[dict[Sequence, None]] = [{} for _ in range(block_size)]
        """Decoding sequences by the step, modulo the block size, that needs a new block."""
        self._ends: dict[int, dict[Sequence, None]] = {}
        """Decoding sequences by the step after which they have ended."""

    @property
    def blocks_free(self) -> int:
        """Blocks nobody holds; cached ones among them."""
        return self._pool.free

    @property
    def blocks_shared(self) -> int:
        """How many more blocks there would have to be if nobody shared any."""
        return self._pool.shared

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence into the waiting line."""
        self._serial += 1
        sequence.serial = self._serial
        if self._by_priority:
            self._line_up(sequence)
        else:
            self.waiting.append(sequence)

    def _line_up(self, sequence: Sequence) -> None:
        """Put a sequence into its place in the waiting line by priority."""
        self.waiting.insert(bisect(self.waiting, _rank(sequence), key=_rank), sequence)

    def remove(self, keys: set[str]) -> None:
        """Abort sequences and free their blocks."""
        for sequence in [s for s in self.running if s.key in keys]:
            self.running.remove(sequence)
            self._leave(sequence)
        self.waiting = deque(s for s in self.waiting if s.key not in keys)

    def step(self) -> StepResult:
        """Run one step."""
        crowded = len(self.running) + len(self.waiting) > 1
        work = _Work(self._max_num_batched_tokens, self._rules.long_prefill_token_threshold if crowded else 0)
        if self._decodes_fit():
            self._decode_all(work)
        else:
            self._walk(work)
        if not work.preempted and self.waiting:
            self._admit(work)
        return self._compute(work)

    # ---- running sequences ----

    def _decodes_fit(self) -> bool:
        """Whether all decodes come before all prefills and have the tokens and blocks they need."""
        partial = len(self._partial)
        if partial and self.running[-partial] is not self._partial[0]:
            return False
        if len(self.running) - partial > self._max_num_batched_tokens:
            return False
        return len(self._due[self._clock.steps % self._block_size]) <= self._pool.free

    def _decode_all(self, work: _Work) -> None:
        """Schedule every decode at once: their order does not matter as nobody goes short."""
        due = self._due[self._clock.steps % self._block_size]
        self._pool.take(len(due))
        for sequence in due:
            sequence.blocks += 1
        work.budget -= len(self.running) - len(self._partial)
        if self._partial:
            self._run_from(len(self.running) - len(self._partial), work)

    def _walk(self, work: _Work) -> None:
        """Schedule running sequences one by one."""
        reached = self._run_from(0, work)
        for sequence in self.running[reached:]:
            if sequence.decoding:
                self._skip(sequence, work)

    def _run_from(self, index: int, work: _Work) -> int:
        """Schedule running sequences from `index` on; return the index of the first that got nothing."""
        while index < len(self.running) and work.budget > 0:
            sequence = self.running[index]
            chunk = self._chunk(sequence.length - sequence.computed, work)
            wanted = self._blocks_for(sequence.computed + chunk) - sequence.blocks
            if wanted > self._pool.free:
                index -= self._make_room(sequence, index, wanted, work)
                if not sequence.blocks:
                    return index
            if wanted:
                self._pool.take(wanted)
                sequence.blocks += wanted
            if sequence.decoding:
                work.budget -= 1
            else:
                self._prefill(sequence, chunk, work)
            index += 1
        return index

    def _make_room(self, sequence: Sequence, index: int, wanted: int, work: _Work) -> int:
        """Preempt until `wanted` blocks are free for the sequence at `index`, or it has lost its own.

        Return how many before it have gone.
        """
        gone = 0
        while wanted > self._pool.free:
            last = self._last_to_run()
            victim = self.running.pop(last)
            scheduled = last < index - gone
            gone += scheduled
            self._preempt(victim, self._unschedule(victim, work) if scheduled else 0, work)
            if victim is sequence:
                break
        return gone

    def _last_to_run(self) -> int:
        """Return the index of the running sequence that is preempted next."""
        if not self._by_priority:
            return len(self.running) - 1
        return max(range(len(self.running)), key=lambda index: _rank(self.running[index]))

    def _unschedule(self, sequence: Sequence, work: _Work) -> int:
        """Let others have the tokens that a sequence was given in this step; return those of a prompt among them."""
        chunk = work.prefills.pop(sequence, None)
        if chunk is None:
            work.budget += 1
            return 0
        work.budget += chunk.tokens
        sequence.recomputed_tokens -= chunk.recomputed
        return chunk.tokens

    def _preempt(self, sequence: Sequence, uncomputed: int, work: _Work) -> None:
        """Take a sequence's blocks, of whose prompt so many tokens count as computed that nobody will compute."""
        # One that was not yet back where an earlier preemption found it has lost what it had then.
        sequence.lost = max(sequence.lost, sequence.computed - uncomputed)
        self._leave(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        if self._by_priority:
            self._line_up(sequence)
        else:
            self.waiting.appendleft(sequence)
        work.preempted.append(sequence)

    def _skip(self, sequence: Sequence, work: _Work) -> None:
        """Leave a decoding sequence out of this step."""
        work.idle.append(sequence)
        work.idle_context += sequence.computed
        self._unplan(sequence)
        sequence.skip_step()
        self._plan(sequence)

    # ---- waiting sequences ----

    def _admit(self, work: _Work) -> None:
        """Start waiting sequences, in order, until one does not fit."""
        while self.waiting and work.budget > 0 and len(self.running) < self._max_num_seqs:
            sequence = self.waiting[0]
            chunk = self._start(sequence, work)
            if chunk == 0:
                return
            self.running.append(self.waiting.popleft())
            self._partial.append(sequence)
            work.admitted.append(sequence)
            self._prefill(sequence, chunk, work)

    def _start(self, sequence: Sequence, work: _Work) -> int:
        """Give a waiting sequence what the cache has of it and blocks for a first chunk; 0 if they are too few."""
        passes = self._by_priority and sequence.priority < 0
        watermark = self._watermark_blocks if self.running and not passes else 0
        if self._pool.free <= watermark:
            # At least the block of the last known token is a new one.
            return 0
        length = sequence.length
        # The last known token is always computed: its logits give the next one.
        found = self._pool.find(islice(self._keys(sequence), (length - 1) // self._block_size))
        cached = len(found) * self._block_size
        chunk = self._chunk(length - cached, work)
        fits = length if self._rules.scheduler_reserve_full_isl else cached + chunk
        idle = sum(block.holders == 0 for block in found)
        if self._blocks_for(fits) - len(found) + idle + watermark > self._pool.free:
            return 0
        self._pool.claim(found)
        sequence.shared = found
        sequence.blocks = self._blocks_for(cached + chunk)
        self._pool.take(sequence.blocks - len(found))
        sequence.begin_prefill(cached)
        work.cached_tokens += cached
        return chunk

    def _keys(self, sequence: Sequence) -> Iterator[Key]:
        """Yield the keys of a sequence's blocks, without end; none with caching off or nothing to be found."""
        if not self._rules.enable_prefix_caching:
            return
        yield from sequence.prefix_keys
        # Blocks with keys of its own can only be found by the sequence that was here before.
        if sequence.preemptions:
            index = len(sequence.prefix_keys)
            while True:
                yield (sequence.serial, index)
                index += 1

    # ---- both ----

    def _chunk(self, remaining: int, work: _Work) -> int:
        if 0 < work.threshold < remaining:
            remaining = work.threshold
        return min(remaining, work.budget)

    def _prefill(self, sequence: Sequence, chunk: int, work: _Work) -> None:
        """Account for `chunk` tokens of a sequence whose blocks are there."""
        start = sequence.computed
        end = start + chunk
        sequence.prefill(chunk)
        work.budget -= chunk
        recomputed = max(0, min(end, sequence.lost) - start)
        work.prefills[sequence] = Chunk(start, chunk, recomputed)
        sequence.recomputed_tokens += recomputed
        if self._rules.enable_prefix_caching:
            # Found by others from this very step on.
            for index in range(len(sequence.shared), min(end // self._block_size, len(sequence.prefix_keys))):
                sequence.shared.append(self._pool.publish(sequence.prefix_keys[index]))

    def _compute(self, work: _Work) -> StepResult:
        """Let the scheduled tokens have been computed."""
        decoding = len(self.running) - len(self._partial)
        self._clock.steps += 1
        self._context += decoding
        decode_context = self._context - work.idle_context
        chunks = work.prefills.values()
        first = self._end_prefills(work)
        sampled = self._sampled(work)
        ended = self._take_ended()
        return StepResult(
            decoding - len(work.idle),
            sum(chunk.tokens for chunk in chunks),
            len(chunks),
            decode_context + sum(chunk.start + chunk.tokens for chunk in chunks),
            # Token i attends to i + 1 tokens: the sum over those of the chunk.
            decode_context
            + sum(chunk.tokens * chunk.start + chunk.tokens * (chunk.tokens + 1) // 2 for chunk in chunks),
            sum(chunk.recomputed for chunk in chunks),
            work.cached_tokens,
            work.admitted,
            work.preempted,
            first,
            sampled,
            ended,
        )

    def _end_prefills(self, work: _Work) -> list[Sequence]:
        """Let sequences whose known tokens are all computed decode from now on; return those new to it."""
        first: list[Sequence] = []
        for sequence in work.prefills:
            if sequence.computed < sequence.length:
                continue
            if sequence.generated == 0:
                first.append(sequence)
            self._partial.remove(sequence)
            sequence.begin_decode(self._clock)
            self._plan(sequence)
        return first

    def _sampled(self, work: _Work) -> list[Sequence]:
        if not self._partial and not work.idle:
            return self.running.copy()
        idle = {id(sequence) for sequence in work.idle}
        return [s for s in self.running if s.decoding and id(s) not in idle]

    def _take_ended(self) -> list[Sequence]:
        """Remove the sequences that have their whole output."""
        ended = list(self._ends.get(self._clock.steps, ()))
        if len(ended) > 1:
            # Blocks are freed in the order the sequences run: it decides which cached blocks are lost first.
            members = set(ended)
            ended = [s for s in self.running if s in members]
            self.running = [s for s in self.running if s not in members]
        elif ended:
            self.running.remove(ended[0])
        for sequence in ended:
            self._leave(sequence)
        return ended

    def _plan(self, sequence: Sequence) -> None:
        """Note when a decoding sequence needs a block and when it ends."""
        self._context += sequence.computed
        self._due[sequence.due_phase(self._block_size)][sequence] = None
        self._ends.setdefault(sequence.end_step(), {})[sequence] = None

    def _unplan(self, sequence: Sequence) -> None:
        self._context -= sequence.computed
        del self._due[sequence.due_phase(self._block_size)][sequence]
        end_step = sequence.end_step()
        ending = self._ends[end_step]
        del ending[sequence]
        if not ending:
            del self._ends[end_step]

    def _leave(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence that no longer runs."""
        if sequence.decoding:
            self._unplan(sequence)
        else:
            self._partial.remove(sequence)
        own: list[Key] = []
        if self._rules.enable_prefix_caching:
            # Blocks with generated tokens get their keys only here: nobody else could have found them.
            full = sequence.computed // self._block_size
            own = [(sequence.serial, index) for index in range(len(sequence.shared), full)]
        self._pool.release(sequence.shared, own, sequence.blocks - len(sequence.shared) - len(own))
        sequence.shared = []
        sequence.blocks = 0
        sequence.stop()

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)


def _rank(sequence: Sequence) -> tuple[int, int]:
    """Return the sequence's place in a line by priority: vLLM's (priority, arrival time)."""
    return sequence.priority, sequence.serial
