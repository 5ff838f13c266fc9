"""The simulated engine between two of its steps."""

from __future__ import annotations

import asyncio

from penstock.request.v1 import request_pb2 as pb
from services.worker.engine import EngineRequest, EngineStep
from services.worker.simulated.engine import SimulatedEngine
from services.worker.simulated.settings import SimulatedSettings


class Hands:
    """Lets a step's time pass only when told."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go = asyncio.Event()

    async def sleep(self, _seconds: float) -> None:
        self.begun.set()
        await self.go.wait()


def request(run_id: str, tokens: int = 40) -> EngineRequest:
    return EngineRequest(run_id, list(range(tokens)), 4, pb.SamplingParams(ignore_eos=True))


async def steps_of(engine: SimulatedEngine, wanted: EngineRequest) -> list[EngineStep]:
    return [step async for step in engine.generate(wanted)]


async def test_a_run_aborted_while_its_step_takes_its_time_leaves_the_others_alone() -> None:
    hands = Hands()
    engine = SimulatedEngine(SimulatedSettings(), hands.sleep)
    engine.start(lambda _: None, lambda _: None, lambda _: None)
    runs = [asyncio.create_task(steps_of(engine, request(name))) for name in ("a", "b")]
    await hands.begun.wait()
    await engine.abort("a")
    hands.go.set()
    aborted, finished = await asyncio.wait_for(asyncio.gather(*runs), 10)
    assert [choice.finish_reason for choice in aborted[-1].choices] == ["abort"]
    assert len(finished) == 4
    assert engine.batch.blocks_free == engine.batch.blocks_total
    await engine.close()


async def test_a_repeated_prompt_is_found_in_the_cache() -> None:
    engine = SimulatedEngine(SimulatedSettings(block_size=16))
    engine.start(lambda _: None, lambda _: None, lambda _: None)
    first = await asyncio.wait_for(steps_of(engine, request("a")), 10)
    again = await asyncio.wait_for(steps_of(engine, request("b")), 10)
    assert (first[-1].cached_tokens, again[-1].cached_tokens) == (0, 32)
    await engine.close()
