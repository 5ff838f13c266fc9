"""What is booked for a completion covers what an engine holds for it, and is no more than one can ever hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.worker.core.sizing import Sizes, covered_tokens, need_blocks, output_tokens

BLOCK_TOKENS = 16


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


@given(
    window=st.integers(2, 400),
    drafted=st.integers(0, 40),
    states=st.integers(0, 3),
    completions=st.integers(1, 3),
    data=st.data(),
)
def test_what_is_booked_is_what_an_engine_holds_up_to_a_window_and_its_states(
    window: int, drafted: int, states: int, completions: int, data: st.DataObject
) -> None:
    most = blocks_of(window) + states
    # As an engine of vLLM describes itself: a state is booked as a block more of tokens ahead.
    sizes = Sizes(1000, 1000, BLOCK_TOKENS, window, drafted + states * BLOCK_TOKENS, most_blocks=most)
    prompt = data.draw(st.integers(1, window - 1), "prompt")
    output = output_tokens(window - prompt, data.draw(st.integers(0, 500), "max_tokens"), None, None)
    booked = need_blocks(sizes, prompt, output, completions)
    assert booked <= completions * most
    assert covered_tokens(sizes, prompt, booked, completions) >= output
    before = 0
    for generated in range(1, output + 1):
        held = max(blocks_of(min(prompt + generated - 1 + drafted, window)), 1) + states
        ahead = need_blocks(sizes, prompt, generated, completions)
        assert ahead == completions * held, "what follows the output is exact"
        assert before <= ahead <= booked
        before = ahead
