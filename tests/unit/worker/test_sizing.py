"""What a tokenized request needs, and what can never run."""

from __future__ import annotations

import pytest

from services.worker.core.messages import Ending, EndingKind
from services.worker.core.sizing import Need, Sizes, covered_tokens, need_blocks, size

SIZES = Sizes(capacity_blocks=20, blocks_total=20, block_size=16, max_model_len=256)


@pytest.mark.parametrize(
    ("prompt", "output", "n", "lookahead", "blocks"),
    [
        (1, 1, 1, 0, 1),  # nothing but one prompt token is ever written
        (16, 1, 1, 0, 1),
        (16, 2, 1, 0, 2),
        (10, 7, 1, 0, 1),
        (10, 8, 1, 0, 2),
        (10, 7, 1, 1, 2),
        (10, 8, 3, 0, 6),
        (250, 100, 1, 0, 16),  # cut at the window
    ],
)
def test_the_peak_is_one_token_below_the_length(prompt: int, output: int, n: int, lookahead: int, blocks: int) -> None:
    assert need_blocks(SIZES._replace(lookahead_tokens=lookahead), prompt, output, n) == blocks


def test_no_more_is_needed_than_a_completion_can_hold_whatever_is_ahead_of_it() -> None:
    drafting = SIZES._replace(lookahead_tokens=5, most_blocks=16)
    assert need_blocks(drafting, 200, 100, 2) == 32
    assert need_blocks(drafting._replace(most_blocks=0), 200, 100, 2) == 34
    assert size(drafting._replace(capacity_blocks=16), 100, 0, 1) == Need(16, 156)
    sliding = SIZES._replace(most_blocks=4)
    assert [need_blocks(sliding, prompt, 10, 1) for prompt in (10, 40, 54, 55, 200)] == [2, 4, 4, 4, 4]


def test_what_is_held_at_the_most_covers_the_rest_of_the_window() -> None:
    drafting = SIZES._replace(lookahead_tokens=5, most_blocks=16)
    assert covered_tokens(drafting, 200, 30, 2) == 36  # 15 blocks each
    assert covered_tokens(drafting, 200, 32, 2) == 56
    assert covered_tokens(SIZES._replace(most_blocks=4), 200, 4, 1) == 56


def test_no_number_asked_for_means_up_to_the_window_or_the_models_own() -> None:
    assert size(SIZES, 100, 0, 1) == Need(16, 156)
    assert size(SIZES._replace(default_max_tokens=20), 100, 0, 1) == Need(8, 20)
    assert size(SIZES._replace(default_max_tokens=20), 100, 30, 1) == Need(9, 30)
    assert size(SIZES._replace(ceiling_max_tokens=25), 100, 30, 1) == Need(8, 25)


def test_the_output_is_cut_at_the_window() -> None:
    assert size(SIZES, 250, 100, 1) == Need(16, 6)


@pytest.mark.parametrize("prompt", [256, 257, 10_000])
def test_a_prompt_that_leaves_no_room_is_rejected_with_both_numbers(prompt: int) -> None:
    ending = size(SIZES, prompt, 1, 1)
    assert isinstance(ending, Ending)
    assert (ending.kind, ending.code, ending.param) == (EndingKind.REJECTED, "context_length_exceeded", "prompt")
    assert str(prompt) in ending.message
    assert "256" in ending.message


def test_a_prompt_that_leaves_room_for_one_token_runs() -> None:
    assert size(SIZES, SIZES.max_model_len - 1, 100, 1) == Need(16, 1)


@pytest.mark.parametrize(("prompt", "output", "n"), [(1, 16, 20), (80, 81, 2)])
def test_what_fills_the_pool_to_its_last_block_runs_and_a_token_more_is_rejected(
    prompt: int, output: int, n: int
) -> None:
    assert size(SIZES, prompt, output, n) == Need(SIZES.capacity_blocks, output)
    larger = size(SIZES, prompt, output + 1, n)
    assert isinstance(larger, Ending)
    assert larger.code == "pool_too_small"


def test_what_the_pool_can_never_hold_is_rejected_with_both_numbers() -> None:
    ending = size(SIZES, 100, 50, 3)
    assert isinstance(ending, Ending)
    assert ending.code == "pool_too_small"
    assert "30 blocks" in ending.message
    assert "20" in ending.message
