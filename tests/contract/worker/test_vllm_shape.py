"""What is booked for a sequence beside its own tokens, against what vLLM's scheduler takes for it.

The scheduler runs without a model, in blocks of one token: what is held is then the number of tokens that have a slot.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock.tiny_model import make_tiny_model
from services.worker.core.sizing import Sizes, need_blocks
from tests.support.vllm_drafts import DRAFTERS, most_held, speculative_config

pytestmark = pytest.mark.vllm

WINDOW = 2048
PROMPTS = (1, 7, 40)
OUTPUTS = (1, 2, 3, 17, 50)


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
    sizes = Sizes(4096, 4096, 1, WINDOW, lookahead_tokens(config))
    spare = []
    for prompt in PROMPTS:
        for output in OUTPUTS:
            held = most_held(config, prompt, output, accepts, random.Random(prompt * output))
            spare.append(need_blocks(sizes, prompt, output, 1) - held)
    assert min(spare) >= 0
    # What a step ahead may hold at the very end counts once for all; else the peak is met to the token.
    assert min(spare) <= int(ahead)
