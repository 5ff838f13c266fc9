"""A run whose result can no longer be stored is ended there and then, not once it has generated the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from penstock.request.v1 import request_pb2 as pb
from penstock.scheduler.v1 import scheduler_pb2 as s
from services.worker import run as run_module
from services.worker.engine import ChoiceStep, EngineRequest, EngineStep, TokenProbability
from tests.support.fake_peers import until
from tests.unit.worker.test_runner import Bench, Engine, NeverAborts

MOST = 4_000

SCORED = [TokenProbability(9, "nine", -1.0, 1, (TokenProbability(9, "nine", -1.0, 1),) * 20)]
"""Takes more than 400 bytes."""


class Scores(Engine):
    """Says a prompt, and then scored tokens for ever; or it scores the prompt so, before it says a token."""

    def __init__(self, the_prompt: bool) -> None:
        super().__init__()
        self._the_prompt = the_prompt
        self.took: list[str] = []
        self.aborted: list[tuple[str, int]] = []
        self.released = 0

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineStep]:
        if "".join(map(chr, request.prompt_ids)) != "endless":
            async for step in super().generate(request):
                yield step
            return
        while True:
            self.took.append(request.run_id)
            if self._the_prompt:
                yield EngineStep([], False, prompt_logprobs=SCORED)
            else:
                yield EngineStep([ChoiceStep(0, (9,), "nine", SCORED)], False)
            await asyncio.sleep(0)

    async def abort(self, run_id: str) -> None:
        await asyncio.sleep(0)
        self.aborted.append((run_id, self.released))


class Scheduler:
    """Tells the engine how many releases it has heard of."""

    def __init__(self, engine: Scores) -> None:
        self._engine = engine

    def open(self, message: s.WorkerToScheduler) -> None: ...

    def send(self, message: s.WorkerToScheduler | bytes) -> None:
        said = s.WorkerToScheduler.FromString(message) if isinstance(message, bytes) else message
        self._engine.released += said.HasField("completion_ack")


@pytest.mark.parametrize("the_prompt", [False, True])
@pytest.mark.parametrize("watched", [False, True])
async def test_a_run_whose_result_cannot_be_stored_ends_at_that_step(
    the_prompt: bool, watched: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_module, "MAX_REQUEST_BYTES", MOST)
    engine = Scores(the_prompt)
    bench = Bench(engine=engine)
    bench.runner.connect(Scheduler(engine), bench.queue)
    loop = asyncio.get_running_loop().create_task(bench.runner.run())
    ended = await bench.complete("r1", "endless", watched)
    assert (ended.result.outcome, ended.result.error.code) == (pb.OUTCOME_REJECTED, "result_too_large")
    assert ended.result.error.param == ("echo" if the_prompt else "sampling.max_tokens"), "no field asked for them"
    assert f"at most {MOST} can be stored" in ended.result.error.message
    tokens = ended.result.usage.completion_tokens
    assert 9 <= len(engine.took) <= 14, "a turn or two of the loop after the tenth"
    assert tokens == (0 if the_prompt else len(engine.took))
    assert engine.aborted == [("r1.1", 0)], "its blocks come home once it is aborted, which it is once"
    assert bench.session.held_blocks == 0
    assert sum("the result is too large" in record.getMessage() for record in caplog.records) == 1
    assert (await bench.complete("r2", "well", watched)).result.outcome == pb.OUTCOME_COMPLETED
    loop.cancel()


class NeverAbortsScores(NeverAborts):
    """Cannot be left in the middle of a run that can no longer be stored."""

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineStep]:
        yield EngineStep([ChoiceStep(0, (9,), "nine", SCORED * 10)], False)
        await asyncio.Event().wait()


async def test_an_engine_that_cannot_abort_such_a_run_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "MAX_REQUEST_BYTES", MOST)
    bench = Bench(engine=NeverAbortsScores(False))
    loop = asyncio.get_running_loop().create_task(bench.runner.run())
    await bench.deliver("r1", "endless")
    completion = await until(lambda: bench.queue.completion("r1"), "its end", 10)
    assert completion.failure.code == "engine_dead"
    assert bench.runner.dead_reason == "the engine cannot abort a run: RuntimeError: a defect"
    loop.cancel()
