"""What vLLM would start with, and the worker does not serve."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from services.worker.vllm.checks import NotServedError, asked_reasoning_parser, check_arguments, check_started


def arguments(
    runner: str = "generate",
    skips: bool = False,
    parser: str = "",
    kind: str = "qwen3",
    asked: str = "auto",
    encoder: bool = False,
    device: str = "cpu",
    queued: int | None = None,
    **parallel: int,
) -> Any:
    """Return vLLM's configuration; `parser` is the model's own, and `asked` the runner that was asked for."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="org/name",
            runner=asked,
            runner_type=runner,
            skip_tokenizer_init=skips,
            is_encoder_decoder=encoder,
            hf_config=SimpleNamespace(model_type=kind),
        ),
        parallel_config=SimpleNamespace(**{"data_parallel_size": 1, "pipeline_parallel_size": 1} | parallel),
        device_config=SimpleNamespace(device_type=device),
        scheduler_config=SimpleNamespace(max_num_queued_reqs=None, max_num_queued_tokens=queued),
        structured_outputs_config=SimpleNamespace(reasoning_parser=parser),
    )


def started(concurrency: float | None, blocks: int = 513, window: int = 2048, hybrid: bool = False) -> Any:
    """Return vLLM's configuration with blocks of 32 tokens, of which `concurrency` whole windows are said to fit."""
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=window, is_hybrid=hybrid),
        cache_config=SimpleNamespace(kv_cache_max_concurrency=concurrency, num_gpu_blocks=blocks, block_size=32),
    )


def test_what_generates_with_its_tokenizer_is_served() -> None:
    check_arguments(arguments(), "")
    check_arguments(arguments(), "deepseek_r1")
    check_arguments(arguments(parser="openai_gptoss", kind="gpt_oss"), "")
    check_arguments(arguments(device="cuda", pipeline_parallel_size=2), "")
    for wrong, parser, said in (
        (arguments(runner="pooling"), "", "--runner pooling: this model's is that, and only"),
        (arguments(runner="pooling", asked="pooling"), "", "--runner pooling: only"),
        (arguments(encoder=True), "", "--model: org/name has an encoder"),
        (arguments(data_parallel_size=2), "", "--data-parallel-size 2: each of its engines has a cache of its own"),
        (arguments(device="cuda", data_parallel_size=2), "", "--data-parallel-size 2"),
        (arguments(pipeline_parallel_size=2), "", "--pipeline-parallel-size"),
        (arguments(skips=True), "", "--skip-tokenizer-init"),
        (arguments(queued=0), "", "--max-num-queued-tokens turns away what was accepted; in its place: a channel's"),
        (arguments(), "openai_gptoss", "--reasoning-parser"),
        (arguments(), "kimi_k3", "--reasoning-parser"),
        (arguments(kind="gpt_oss"), "qwen3", "--reasoning-parser"),
    ):
        with pytest.raises(NotServedError, match=said):
            check_arguments(wrong, parser)


@pytest.mark.parametrize(
    ("parser", "outputs", "asked"),
    [
        ("", SimpleNamespace(reasoning_parser=""), ""),
        ("deepseek_r1", SimpleNamespace(reasoning_parser=""), "deepseek_r1"),
        ("", SimpleNamespace(reasoning_parser="deepseek_r1"), "deepseek_r1"),
        ("", {"reasoning_parser": "deepseek_r1"}, "deepseek_r1"),
        ("", {"backend": "auto"}, ""),
    ],
)
def test_a_reasoning_parser_is_asked_for_in_two_places(parser: str, outputs: Any, asked: str) -> None:
    found = SimpleNamespace(reasoning_parser=parser, reasoning_parser_plugin=None, structured_outputs_config=outputs)
    assert asked_reasoning_parser(found) == asked


@pytest.mark.parametrize(
    ("plugin", "outputs"),
    [("/x.py", {}), (None, {"reasoning_parser_plugin": "/x.py"}),
     (None, SimpleNamespace(reasoning_parser="qwen3", reasoning_parser_plugin="/x.py"))],
)  # fmt: skip
def test_a_plugin_is_refused(plugin: str | None, outputs: Any) -> None:
    found = SimpleNamespace(reasoning_parser="qwen3", reasoning_parser_plugin=plugin, structured_outputs_config=outputs)
    with pytest.raises(NotServedError, match="--reasoning-parser-plugin"):
        asked_reasoning_parser(found)


@pytest.mark.parametrize(
    "config",
    [started(8.0156), started(None), started(9.0), started(2.644, hybrid=True)],
)
def test_a_window_that_takes_what_is_booked_is_served(config: Any) -> None:
    """More of them may fit than are counted: windows that slide, or a cache that is parted among devices.

    What layers with a state take beside layers with attention is booked.
    """
    check_started(config, 2048)


def test_a_window_that_takes_more_blocks_than_are_booked_is_not() -> None:
    with pytest.raises(NotServedError, match=r"a window of 2048 tokens takes 19. blocks, and 64 are booked"):
        check_started(started(2.644), 2048)


@pytest.mark.parametrize("blocks", range(1, 80))
def test_a_window_whose_layers_all_slide_is_served_however_short(blocks: int) -> None:
    """vLLM counts one block more for it than is booked."""
    check_started(started(512 / (blocks + 1), window=32 * blocks), 32 * blocks)


@pytest.mark.parametrize("blocks", range(3, 80))
def test_a_second_kind_of_cache_is_noticed_from_three_blocks_on(blocks: int) -> None:
    with pytest.raises(NotServedError, match=f"and {blocks} are booked"):
        check_started(started(512 / (1.5 * blocks), window=32 * blocks), 32 * blocks)


def test_a_window_that_was_fitted_is_named() -> None:
    with pytest.raises(NotServedError, match="--max-model-len auto: 640 tokens fit here"):
        check_started(started(1.0, 21, window=640), 2048)
