"""The engines under contract, one of each for the whole suite."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import pytest
import pytest_asyncio

from services.worker.core.messages import EngineReported
from services.worker.engine import (
    ENGINE_SCHEDULING,
    CheckingRenderer,
    Engine,
    PromptSpec,
    Rendered,
    Renderer,
    StepTokens,
)
from services.worker.simulated.batch import Rules
from services.worker.simulated.engine import ByteRenderer, SimulatedEngine
from services.worker.simulated.settings import SimulatedSettings
from services.worker.tokenizer import answer_to
from tests.support.fleet import penstock

BLOCKS = 64
MOST_PREFILLED = 256
"""Tokens of a prompt that vLLM computes in one step beside another request: longer ones take several."""
VLLM_ARGUMENTS = [
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--block-size", "32",
    "--num-gpu-blocks-override", str(BLOCKS + 1), "--max-num-seqs", "16",
    "--long-prefill-token-threshold", str(MOST_PREFILLED),
]  # fmt: skip


class UnderTest(NamedTuple):
    """An engine with its renderer, every report it has made, and what each step generated."""

    engine: Engine
    renderer: CheckingRenderer
    reports: list[EngineReported]
    tokens: list[StepTokens]


@pytest_asyncio.fixture(
    scope="package", loop_scope="package", params=["simulated", pytest.param("vllm", marks=pytest.mark.vllm)]
)
async def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[UnderTest]:
    reports: list[EngineReported] = []
    tokens: list[StepTokens] = []
    engine: Engine
    renderer: CheckingRenderer
    if request.param == "simulated":
        rules = Rules(scheduling_policy=ENGINE_SCHEDULING)
        settings = SimulatedSettings(
            "tiny", num_blocks=BLOCKS, block_size=32, max_model_len=512, max_num_seqs=16, rules=rules
        )
        engine = SimulatedEngine(settings)
        renderer = ByteRenderer(512)
    else:
        engine, renderer = vllm_engine(tmp_path_factory.mktemp("model") / "tiny")
    deaths: list[str] = []
    engine.start(reports.append, deaths.append, tokens.append)
    yield UnderTest(engine, renderer, reports, tokens)
    assert not deaths
    await asyncio.wait_for(engine.close(), 20)


class Agreeing:
    """The renderer of a tokenizer process, which must say what that on the worker's own thread says."""

    def __init__(self, in_process: CheckingRenderer, on_thread: Renderer) -> None:
        self._in_process, self._on_thread = in_process, on_thread

    def render(self, spec: PromptSpec) -> Rendered:
        assert answer_to(self._on_thread, "", spec) == answer_to(self._in_process, "", spec)
        return self._in_process.render(spec)

    def check_form(self, spec: PromptSpec, rendered: Rendered) -> None:
        self._in_process.check_form(spec, rendered)


def vllm_engine(model: Path) -> tuple[Engine, CheckingRenderer]:
    assert penstock("tiny-model", str(model)).returncode == 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from services.worker.vllm.engine import prepare

    prepared = prepare(str(model), ("tiny", "alias"), VLLM_ARGUMENTS)
    # The core is no fork, so it cannot be told as in `stay_eager`.
    with patch.dict(os.environ, TORCHDYNAMO_DISABLE="1"):
        engine = prepared.build(metrics_read=False, forks=False)
    on_thread = prepared.make_renderer_of(engine)
    assert on_thread is not None
    return engine, Agreeing(prepared.make_renderer(), on_thread)


def renderers(model: Path, *arguments: str, trusts: bool = False) -> list[Renderer]:
    """Return those of a worker with these arguments: the process's, and the thread's unless templates are trusted."""
    from services.worker.vllm.engine import VllmEngine, prepare

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_HUB_OFFLINE", "1")
        every = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", *arguments]
        prepared = prepare(str(model), ("tiny",), every, trusts_templates=trusts)
        made: Any = prepared.make_renderer()
        on_thread = prepared.make_renderer_of(cast(VllmEngine, SimpleNamespace(vllm_renderer=made._renderer._renderer)))
    assert (on_thread is None) is trusts
    return [made] if on_thread is None else [made, on_thread]
