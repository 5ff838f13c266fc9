"""Log probabilities come out of vLLM in pieces, whoever wants to hear of the run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.request.v1 import request_pb2 as pb
from services.worker.engine import EngineRequest, EngineStep, PromptSpec
from services.worker.outputs import RunOutput
from tests.contract.worker.conftest import UnderTest
from tests.support.results import result_of

pytestmark = [
    pytest.mark.vllm, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(120),
    pytest.mark.parametrize("made", ["vllm"], indirect=True, scope="package"),
]  # fmt: skip

PROMPT = "The gate feeds the wheel, and the wheel turns the stone. " * 4


def asked(made: UnderTest, name: str, max_tokens: int, **fields: object) -> EngineRequest:
    ids = made.renderer.render(PromptSpec(text=PROMPT)).token_ids
    sampling = pb.SamplingParams(**{"seed": 7, "ignore_eos": True, **fields})  # type: ignore[arg-type]
    return EngineRequest(name, ids, max_tokens, sampling, tell_at_tokens=0)


@pytest.mark.parametrize(("n", "most"), [(1, 12), (3, 4), (8, 1)])
async def test_a_run_that_nobody_watches_is_handed_over_so_many_at_a_time(made: UnderTest, n: int, most: int) -> None:
    from vllm.v1.engine.output_processor import RequestOutputCollector

    lengths: list[int] = []
    put = RequestOutputCollector.put

    def noted(collector: Any, output: Any) -> None:
        lengths.extend(len(choice.token_ids) for choice in output.outputs)
        put(collector, output)

    output = RunOutput()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestOutputCollector, "put", noted)
        async for step in made.engine.generate(asked(made, f"long-{n}", 60, n=n, logprobs=20)):
            output.take(step)
    assert max(lengths) == most
    assert sum(lengths) == n * 60
    for choice in result_of(output).choices:
        assert [entry.token_id for entry in choice.logprobs] == list(choice.token_ids)
        assert {len(entry.top) for entry in choice.logprobs} == {20}


@pytest.mark.parametrize("n", [1, 2])
async def test_those_of_a_prompt_come_once_and_leave_the_event_loop_its_turns(made: UnderTest, n: int) -> None:
    request = asked(made, f"prompt-{n}", 3, n=n, prompt_logprobs=20)
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    ticking = asyncio.get_running_loop().create_task(tick())
    pieces: list[tuple[EngineStep, int]] = []
    output = RunOutput()
    async for step in made.engine.generate(request):
        output.take(step)
        if step.prompt_logprobs:
            pieces.append((step, turns))
    ticking.cancel()
    sizes = [len(piece.prompt_logprobs) for piece, _ in pieces]
    assert len(pieces) > 2
    assert sizes[:-1] == [12] * (len(sizes) - 1)
    at = [turn for _, turn in pieces]
    assert at == sorted(set(at)), "others had a turn between them"
    scored = result_of(output).prompt_logprobs
    assert [entry.token_id for entry in scored] == list(request.prompt_ids)
    assert [len(entry.top) for entry in scored] == [0, *[20] * (len(scored) - 1)]
