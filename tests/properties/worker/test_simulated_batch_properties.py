"""Blocks are conserved, every sequence ends, and sequences whose peaks fit together are never preempted."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from services.worker.core.sizing import Sizes, need_blocks
from services.worker.simulated.batch import Batch, Rules
from services.worker.simulated.sequence import Sequence

BLOCK_SIZE = 16
BLOCKS = 40

lengths = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 100)), min_size=1, max_size=25)


def batch(blocks: int = BLOCKS, seqs: int = 8, tokens: int = 64) -> Batch:
    return Batch(blocks, BLOCK_SIZE, seqs, tokens)


def conserved(made: Batch) -> bool:
    held = sum(sequence.blocks for sequence in (*made.running, *made.waiting))
    return made.blocks_free + held == made.blocks_total and made.blocks_free >= 0


@given(lengths, st.sets(st.integers(0, 24), max_size=5), st.integers(1, 60))
def test_blocks_are_conserved_and_every_sequence_ends(
    wanted: list[tuple[int, int]], aborted: set[int], abort_at: int
) -> None:
    made = batch()
    sequences = [Sequence(str(i), prompt, output) for i, (prompt, output) in enumerate(wanted)]
    for sequence in sequences:
        made.add(sequence)
    steps = 0
    while made.busy:
        result = made.step()
        steps += 1
        assert conserved(made)
        assert result.computed_tokens <= 64
        assert len(made.running) <= 8
        assert steps < 20_000, "the batch makes no progress"
        if steps == abort_at:
            made.remove({str(i) for i in aborted})
            assert conserved(made)
    assert made.blocks_free == made.blocks_total
    for i, sequence in enumerate(sequences):
        assert sequence.generated == sequence.output_tokens or i in aborted


shared_lengths = st.lists(
    st.tuples(st.integers(1, 200), st.integers(1, 60), st.integers(0, 12), st.integers(0, 2)), min_size=1, max_size=25
)


@given(shared_lengths, st.sets(st.integers(0, 24), max_size=5), st.integers(1, 60))
def test_what_is_shared_is_what_all_hold_less_what_is_taken(
    wanted: list[tuple[int, int, int, int]], aborted: set[int], abort_at: int
) -> None:
    made = batch()
    for i, (prompt, output, common, family) in enumerate(wanted):
        keys = [family * 1000 + at for at in range(min(common, prompt // BLOCK_SIZE))]
        made.add(Sequence(str(i), prompt, output, keys))
    steps = 0
    while made.busy:
        made.step()
        steps += 1
        held = sum(sequence.blocks for sequence in made.running)
        assert made.blocks_shared == held - (made.blocks_total - made.blocks_free)
        if steps == abort_at:
            made.remove({str(i) for i in aborted})
    assert made.blocks_shared == 0


@given(lengths)
def test_no_preemption_when_the_sum_of_the_peaks_fits(wanted: list[tuple[int, int]]) -> None:
    sizes = Sizes(10_000, 10_000, BLOCK_SIZE, 10_000)
    peaks = sum(need_blocks(sizes, prompt, output, 1) for prompt, output in wanted)
    made = batch(blocks=peaks, seqs=len(wanted))
    most = {str(i): 0 for i in range(len(wanted))}
    for i, (prompt, output) in enumerate(wanted):
        made.add(Sequence(str(i), prompt, output))
    while made.busy:
        made.step()
        for sequence in made.running:
            most[sequence.key] = max(most[sequence.key], sequence.blocks)
    assert made.preemptions == 0
    for i, (prompt, output) in enumerate(wanted):
        assert most[str(i)] <= need_blocks(sizes, prompt, output, 1)


@given(st.integers(0, 2**32), st.integers(2, 25), st.sampled_from(("fcfs", "priority")), st.sampled_from((0, 5)))
def test_what_is_computed_is_what_is_needed_and_what_is_recomputed(
    seed: int, count: int, policy: str, longest_chunk: int
) -> None:
    rng = random.Random(seed)
    # Without a prefix cache, and with prompts admitted as they fit: they are preempted in the middle.
    made = Batch(BLOCKS // 2, BLOCK_SIZE, 8, 64, Rules(0.0, longest_chunk, False, False, policy))
    coming = [Sequence(str(i), rng.randint(1, 200), rng.randint(1, 100), (), rng.randint(-1, 1)) for i in range(count)]
    # The KV of a last token is never written.
    needed = sum(sequence.prompt_tokens + sequence.output_tokens - 1 for sequence in coming)
    computed = recomputed = 0
    while coming or made.busy:
        if coming and (rng.random() < 0.3 or not made.busy):
            made.add(coming.pop())
        result = made.step()
        computed += result.computed_tokens
        recomputed += result.recomputed_tokens
    assert computed == needed + recomputed


def test_the_sequence_admitted_last_is_preempted_and_computed_again() -> None:
    made = batch(blocks=4)
    old, young = Sequence("old", 16, 30), Sequence("young", 16, 30)
    made.add(old)
    made.add(young)
    ended: list[str] = []
    while made.busy:
        ended += [sequence.key for sequence in made.step().ended]
        assert conserved(made)
    assert ended == ["old", "young"]
    assert (old.preemptions, young.preemptions) == (0, 1)
