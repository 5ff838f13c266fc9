"""What vLLM would start with, and the worker does not serve."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from services.worker.vllm_checks import NotServedError, check_arguments, check_started


def arguments(runner: str = "generate", skips: bool = False, parser: str = "") -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(runner_type=runner, skip_tokenizer_init=skips),
        structured_outputs_config=SimpleNamespace(reasoning_parser=parser),
    )


def started(concurrency: float | None, blocks: int = 513, cores: int = 1, window: int = 2048) -> Any:
    """Return vLLM's configuration with blocks of 32 tokens, of which `concurrency` whole windows are said to fit."""
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=window),
        cache_config=SimpleNamespace(kv_cache_max_concurrency=concurrency, num_gpu_blocks=blocks, block_size=32),
        parallel_config=SimpleNamespace(data_parallel_size=cores),
    )


def test_what_generates_with_its_tokenizer_is_served() -> None:
    check_arguments(arguments())
    for wrong, said in (
        (arguments(runner="pooling"), "--runner pooling"),
        (arguments(skips=True), "--skip-tokenizer-init"),
        (arguments(parser="deepseek_r1"), "--reasoning-parser"),
    ):
        with pytest.raises(NotServedError, match=said):
            check_arguments(wrong)


@pytest.mark.parametrize("config", [started(8.0156), started(8.0156, 1026, cores=2), started(None), started(9.0)])
def test_a_window_that_takes_what_is_booked_is_served(config: Any) -> None:
    """More of them may fit than are counted: windows that slide, or a cache that is parted among devices."""
    check_started(config, 2048)


@pytest.mark.parametrize("config", [started(2.644), started(2.644, 1026, cores=2)])
def test_a_window_that_takes_more_blocks_than_are_booked_is_not(config: Any) -> None:
    with pytest.raises(NotServedError, match=r"a window of 2048 tokens takes 19. blocks, and 64 are booked"):
        check_started(config, 2048)


def test_a_window_that_was_fitted_is_named() -> None:
    with pytest.raises(NotServedError, match="--max-model-len auto: 640 tokens fit here"):
        check_started(started(1.0, 21, window=640), 2048)
