"""What becomes of the runs of real vLLM when its front-end fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.request.v1 import request_pb2 as pb
from services.worker.engine import EngineDeadError, EngineRequest
from tests.contract.worker.conftest import vllm_engine

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio, pytest.mark.timeout(120)]


async def test_what_ends_vllms_output_loop_refuses_nobody(tmp_path: Path) -> None:
    engine: Any = vllm_engine(tmp_path / "tiny")[0]
    deaths: asyncio.Queue[str] = asyncio.Queue()
    engine.start(lambda _: None, deaths.put_nowait, lambda _: None)
    sampling = pb.SamplingParams(ignore_eos=True)
    runs = [engine.generate(EngineRequest(f"run-{i}", [40, 41, 42], 400, sampling)) for i in range(2)]
    for run in runs:
        assert not (await anext(run)).finished

    def fails(*_: object) -> None:
        raise ValueError("of one output")

    next(iter(engine._llm.output_processor.request_states.values())).detokenizer.update = fails
    for run in runs:
        with pytest.raises(EngineDeadError):
            _ = [step async for step in run]
    assert "dead" in await deaths.get()
    await engine.close()
