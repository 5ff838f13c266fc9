"""What vLLM's records say of blocks that runs hold together, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from services.worker.vllm.sharing import Sharing, holds_by_tokens


def run(prompt: int, generated: int, at: float) -> Any:
    return SimpleNamespace(prompt_len=prompt, stats=SimpleNamespace(num_generation_tokens=generated, last_token_ts=at))


def sharing(*runs: Any, caching: bool = True, **of_model: Any) -> Sharing:
    text = SimpleNamespace(layer_types=of_model.pop("layer_types", None))
    fields = {"is_hybrid": False, "hf_text_config": text, "get_sliding_window": lambda: of_model.get("slides")}
    config = SimpleNamespace(
        model_config=SimpleNamespace(**fields),
        cache_config=SimpleNamespace(block_size=16, enable_prefix_caching=caching),
    )
    return Sharing(config, SimpleNamespace(request_states=dict(enumerate(runs))))


def step(cached: int = 0, preempted: int = 0) -> Any:
    return SimpleNamespace(prompt_token_stats=SimpleNamespace(cached_tokens=cached), num_preempted_reqs=preempted)


def test_what_all_hold_less_what_is_taken_is_shared_once_a_prompt_was_found() -> None:
    found = sharing(run(32, 1, 7.0), run(32, 17, 7.0), run(40, 1, 7.0))
    assert found.blocks(5, step()) == 0, "nobody has found anything yet"
    assert found.blocks(5, step(cached=32)) == 2 + 3 + 3 - 5
    assert found.blocks(5, step()) == 3, "they still run"
    assert found.blocks(9, step()) == 0, "some blocks are of prompts that are being computed"


def test_who_had_no_token_in_the_latest_step_is_left_out() -> None:
    assert sharing(run(32, 1, 7.0), run(32, 1, 6.0), run(32, 0, 0.0)).blocks(1, step(cached=32)) == 1
    assert sharing(run(32, 0, 0.0)).blocks(0, step(cached=32)) == 0


def test_nothing_is_shared_in_a_step_that_preempts() -> None:
    # Of a step that was scheduled while another ran, who is preempted for it has a token of the other.
    found = sharing(run(32, 1, 7.0), run(32, 1, 7.0))
    assert found.blocks(2, step(cached=32, preempted=1)) == 0
    assert found.blocks(2, step()) == 2


def test_an_engine_without_a_prefix_cache_or_with_other_records_shares_nothing() -> None:
    runs = run(32, 1, 7.0), run(32, 1, 7.0)
    assert sharing(*runs, caching=False).blocks(2, step(cached=32)) == 0
    assert sharing(*runs, slides=96).blocks(2, step(cached=32)) == 0
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            is_hybrid=False, hf_text_config=SimpleNamespace(), get_sliding_window=lambda: None
        ),
        cache_config=SimpleNamespace(block_size=16, enable_prefix_caching=True),
    )
    assert Sharing(config, None).blocks(2, step(cached=32)) == 0


@pytest.mark.parametrize(
    ("hybrid", "slides", "layer_types", "by_tokens"),
    [
        (False, None, None, True),
        (True, None, None, False),
        (False, 4096, None, False),
        (False, 4096, ["sliding_attention"], False),
        (False, 4096, ["sliding_attention", "full_attention"], True),
    ],
)
def test_what_a_request_holds_follows_from_its_tokens_unless_all_layers_slide_or_some_keep_a_state(
    hybrid: bool, slides: int | None, layer_types: list[str] | None, by_tokens: bool
) -> None:
    text = SimpleNamespace() if layer_types is None else SimpleNamespace(layer_types=layer_types)
    model = SimpleNamespace(is_hybrid=hybrid, hf_text_config=text, get_sliding_window=lambda: slides)
    assert holds_by_tokens(model) is by_tokens
