"""A model that has layers with a state beside layers with attention: what it holds is what is booked."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
import pytest_asyncio

from penstock.request.v1 import request_pb2 as pb
from penstock.tiny_model import make_tiny_model
from services.worker.core.messages import EngineReported
from services.worker.core.sizing import Sizes, need_blocks
from services.worker.engine import Engine, EngineRequest

pytestmark = [
    pytest.mark.vllm, pytest.mark.long, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180),
]  # fmt: skip

BLOCKS, BLOCK_SIZE, WINDOW = 64, 32, 512
STATES = 3
"""Layers with a state for each with attention: as many block tables, of one block for a sequence."""

LFM2 = {
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 1 + STATES, "num_attention_heads": 4, "num_key_value_heads": 2, "conv_bias": False,
    "conv_L_cache": 3, "conv_dim": 128, "block_dim": 128, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True, "norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": 2048,
    "max_position_embeddings": 2048, "layer_types": ["conv", "conv", "full_attention", "conv"], "bos_token_id": 0,
    "eos_token_id": 1, "torch_dtype": "float32",
}  # fmt: skip


class Hybrid(NamedTuple):
    """An engine with every report it has made, and whether a sequence always holds as much as its states may take."""

    engine: Engine
    reports: list[EngineReported]
    tight: bool


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["none", "align"])
async def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Hybrid]:
    model = make_tiny_model(tmp_path_factory.mktemp("model") / "lfm2")
    model.joinpath("config.json").write_text(json.dumps(LFM2))
    engine = started(model, request.param)
    reports: list[EngineReported] = []
    deaths: list[str] = []
    engine.start(reports.append, deaths.append, lambda _: None)
    yield Hybrid(engine, reports, request.param == "none")
    assert not deaths
    await asyncio.wait_for(engine.close(), 20)


def started(model: Path, mode: str) -> Engine:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from services.worker.vllm.engine import prepare

    arguments = [
        # How states are kept: the newest alone, or one at the end of a block as well, for other prompts to go on from.
        "--enable-prefix-caching" if mode == "align" else "--no-enable-prefix-caching",
        "--load-format", "dummy", "--dtype", "float32", "--enforce-eager", "--max-model-len", str(WINDOW),
        "--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(BLOCKS + 1),
    ]  # fmt: skip
    with patch.dict(os.environ, TORCHDYNAMO_DISABLE="1"):
        return prepare(str(model), ("lfm2",), arguments).build(metrics_read=False, forks=False)


async def test_a_sequence_holds_the_blocks_of_its_tokens_and_of_its_states(hybrid: Hybrid) -> None:
    shape, reports = hybrid.engine.shape, hybrid.reports
    assert (shape.blocks_total, shape.block_size) == (BLOCKS, BLOCK_SIZE)
    assert shape.most_blocks == (WINDOW + shape.lookahead_tokens) // BLOCK_SIZE
    sizes = Sizes(BLOCKS, BLOCKS, BLOCK_SIZE, WINDOW, shape.lookahead_tokens, most_blocks=shape.most_blocks)
    spare = []
    for prompt in (1, 31, 200):
        for tokens in (2, 33, 70):
            before = len(reports)
            params = pb.SamplingParams(ignore_eos=True, temperature=0.0)
            ids = list(range(2, prompt + 2))
            async for _ in hybrid.engine.generate(EngineRequest(f"run-{prompt}-{tokens}", ids, tokens, params)):
                pass
            most = max(BLOCKS - report.blocks_free for report in reports[before:])
            assert most >= 1 + STATES
            # A report shows what is held after the step; the last token's step ends with nothing held.
            spare.append(need_blocks(sizes, prompt, tokens - 1, 1) - most)
            assert reports[-1].blocks_free == BLOCKS
    assert min(spare) >= 0
    assert max(spare) == 0 or not hybrid.tight
