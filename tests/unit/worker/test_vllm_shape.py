"""What is read out of vLLM's configuration for the ledger's rule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from services.worker.vllm.shape import lookahead_tokens, most_blocks, state_blocks

WINDOW_TOKENS = 4000
WINDOW_BLOCKS = 8


def speculating(drafted: int, written: int, ahead: bool) -> Any:
    return SimpleNamespace(
        num_speculative_tokens=drafted,
        num_lookahead_tokens=written,
        scheduler_config=SimpleNamespace(async_scheduling=ahead),
    )


@pytest.mark.parametrize(
    ("drafted", "written", "ahead", "tokens"),
    [(0, 0, False, 0), (0, 0, True, 1), (4, 0, False, 4), (4, 4, False, 8), (4, 5, False, 9), (4, 0, True, 9),
     (4, 4, True, 13)],
)  # fmt: skip
def test_drafts_and_what_their_maker_writes_are_ahead_of_the_output(
    drafted: int, written: int, ahead: bool, tokens: int
) -> None:
    assert lookahead_tokens(speculating(drafted, written, ahead)) == tokens


def started(hybrid: bool, windows: float | None, drafted: int = 0) -> Any:
    """Return the configuration of an engine of 1,000 blocks, into which so many `windows` fit."""
    config = speculating(drafted, 0, False)
    config.model_config = SimpleNamespace(is_hybrid=hybrid, max_model_len=WINDOW_TOKENS)
    config.cache_config = SimpleNamespace(num_gpu_blocks=1000, kv_cache_max_concurrency=windows, block_size=544)
    return config


@pytest.mark.parametrize("states", [0, 1, 3, 9])
def test_what_a_window_takes_beyond_its_tokens_is_state(states: int) -> None:
    assert state_blocks(started(True, 1000 / (8 + states))) == states


def test_layers_with_attention_alone_have_no_state() -> None:
    assert state_blocks(started(False, None)) == 0
    assert state_blocks(started(False, 1000 / 9)) == 0


@pytest.mark.parametrize("drafted", [0, 4])
def test_no_sequence_holds_more_than_a_window_and_its_states(drafted: int) -> None:
    assert most_blocks(started(True, 1000 / (WINDOW_BLOCKS + 3), drafted)) == WINDOW_BLOCKS + 3
    assert most_blocks(started(False, 1000 / WINDOW_BLOCKS, drafted)) == WINDOW_BLOCKS
    assert most_blocks(started(False, 1000 / (WINDOW_BLOCKS + 1), drafted)) == WINDOW_BLOCKS
    assert most_blocks(started(False, None, drafted)) == WINDOW_BLOCKS


def test_where_all_layers_slide_a_sequence_holds_what_vllm_takes_a_window_to_need_and_what_is_ahead() -> None:
    assert most_blocks(started(False, 1000 / 3)) == 3
    assert most_blocks(started(False, 1000 / 3, 4)) == 4
    assert most_blocks(started(False, 1000 / 3, 545)) == 5
    assert most_blocks(started(False, 1000 / 3, 5440)) == WINDOW_BLOCKS
