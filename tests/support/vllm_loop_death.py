"""Runs real vLLM in this process, has its output loop fail, and exits with 0 if that refuses none of the runs.

A program of its own, for its engine is of no use to anybody afterwards.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from penstock.request.v1 import request_pb2 as pb
from services.worker.engine import EngineDeadError, EngineRequest
from tests.contract.worker.conftest import vllm_engine


def _fails(*_: object) -> None:
    raise ValueError("of one output")


async def _endings(model: Path) -> list[str]:
    """Return how each of two runs ended, and then the engine."""
    engine: Any = vllm_engine(model)[0]
    deaths: asyncio.Queue[str] = asyncio.Queue()
    engine.start(lambda _: None, deaths.put_nowait, lambda _: None)
    sampling = pb.SamplingParams(ignore_eos=True)
    runs = [engine.generate(EngineRequest(f"run-{i}", [40, 41, 42], 400, sampling)) for i in range(2)]
    for run in runs:
        assert not (await anext(run)).finished
    next(iter(engine._llm.output_processor.request_states.values())).detokenizer.update = _fails
    endings = []
    for run in runs:
        try:
            _ = [step async for step in run]
        except EngineDeadError:
            endings.append("dead")
        except Exception as error:
            endings.append(repr(error))
    endings.append(await deaths.get())
    await engine.close()
    return endings


if __name__ == "__main__":
    print(asyncio.run(_endings(Path(sys.argv[1]))))
