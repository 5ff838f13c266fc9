"""What is booked for a sequence beside its own tokens, against what vLLM's scheduler takes for it.

The scheduler runs without a model, in blocks of one token: what is held is then the number of tokens that have a slot.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock.tiny_model import make_tiny_model
from services.worker.core.sizing import Sizes, need_blocks
from tests.support.vllm_drafts import BLOCKS, DRAFTERS, most_held, speculative_config, workload

pytestmark = pytest.mark.vllm

WINDOW = 2048
PROMPTS = (1, 7, 40, WINDOW - 20)
OUTPUTS = (1, 2, 3, 17, 50)
SLIDING, STEP = 64, 256
"""Tokens that the layers of a model look at, and of a step."""


@pytest.fixture(scope="module", params=[*DRAFTERS, ""])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        return speculative_config(str(model), request.param)


@pytest.mark.parametrize("ahead", [False, True], ids=["one step after the other", "a step ahead"])
@pytest.mark.parametrize("accepts", [0.0, 0.5, 1.0])
def test_no_sequence_holds_more_than_its_peak_as_booked(config: Any, ahead: bool, accepts: float) -> None:
    from services.worker.vllm.shape import lookahead_tokens

    config.scheduler_config.async_scheduling = ahead
    sizes = Sizes(BLOCKS, BLOCKS, 1, WINDOW, lookahead_tokens(config), most_blocks=WINDOW)
    spare = []
    for prompt in PROMPTS:
        for output in OUTPUTS:
            held = most_held(config, prompt, output, accepts, random.Random(prompt * output))
            spare.append(need_blocks(sizes, prompt, output, 1) - held)
    assert min(spare) >= 0
    # What a step ahead may hold at the very end counts once for all; else the peak is met to the token.
    assert min(spare) <= int(ahead)


@pytest.mark.parametrize("ahead", [False, True], ids=["one step after the other", "a step ahead"])
def test_where_all_layers_slide_no_sequence_holds_more_than_is_booked_nor_is_it_booked_whole(
    config: Any, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    from services.worker.vllm.shape import lookahead_tokens, most_blocks
    from tests.support.vllm_scheduler import kv_cache

    config.scheduler_config.async_scheduling = ahead
    sequences = ((10, 30), (10, 900), (600, 50), (WINDOW - 20, 50))
    held = [most_held(config, *sequence, 0.5, random.Random(1), STEP, SLIDING) for sequence in sequences]
    # What vLLM's core says when it has started, in blocks of one token as those of the scheduler.
    windows = get_max_concurrency_for_kv_cache_config(config, kv_cache(workload(STEP), SLIDING))
    monkeypatch.setattr(config.cache_config, "kv_cache_max_concurrency", windows)
    monkeypatch.setattr(config.cache_config, "block_size", 1)
    most = most_blocks(config)
    sizes = Sizes(BLOCKS, BLOCKS, 1, WINDOW, lookahead_tokens(config), most_blocks=most)
    booked = [need_blocks(sizes, *sequence, 1) for sequence in sequences]
    assert most < WINDOW / 2
    assert max(booked) == most
    assert all(few <= enough for few, enough in zip(held, booked, strict=True))
