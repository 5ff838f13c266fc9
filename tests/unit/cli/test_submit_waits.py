"""`penstock submit` that waits for an answer nobody can give says so."""

from __future__ import annotations

import asyncio

import pytest

from penstock.cli import requests
from penstock.fields import RequestFields
from penstock.scheduler.v1 import scheduler_pb2 as pb
from tests.support.fake_queue import FakeQueue, serving
from tests.support.fake_scheduler import FakeScheduler, serving_scheduler

TINY = pb.WorkerStatus(model="tiny", model_aliases=["small"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("workers", "model", "said"),
    [
        ([TINY], "zork", "waiting: no connected worker serves the model 'zork' (served: small, tiny)\n"),
        ([], "zork", "waiting: no worker is connected\n"),
        ([], "", "waiting: no worker is connected\n"),
    ],
)
async def test_it_says_once_that_nobody_can_answer(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    workers: list[pb.WorkerStatus],
    model: str,
    said: str,
    stream: bool,
) -> None:
    monkeypatch.setattr(requests, "WHY_AFTER_S", 0.01)
    queue, scheduler = FakeQueue(), FakeScheduler(pb.StatusResponse(workers=workers))
    queue.paused = True
    async with serving(queue) as address, serving_scheduler(scheduler) as at:
        fields = RequestFields(prompt="p", model=model)
        submitting = asyncio.create_task(requests._submit(address, at, fields, not stream, stream, False))
        heard = ""
        async with asyncio.timeout(20):
            while not heard:
                await asyncio.sleep(0.01)
                heard = capsys.readouterr().err
        await queue.finish_all()
        await submitting
    told = capsys.readouterr()
    assert (heard + told.err, told.out) == (said, "P\n")


@pytest.mark.parametrize("model", ["tiny", "small", ""])
async def test_what_somebody_serves_is_waited_for_in_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    monkeypatch.setattr(requests, "WHY_AFTER_S", 0.0)
    asked = asyncio.Event()

    class Scheduler(FakeScheduler):
        """Tells that it was asked."""

        async def Status(self, request: pb.StatusRequest, context: object) -> pb.StatusResponse:
            asked.set()
            return await super().Status(request, context)

    queue, scheduler = FakeQueue(), Scheduler(pb.StatusResponse(workers=[TINY]))
    queue.paused = True
    async with serving(queue) as address, serving_scheduler(scheduler) as at:
        fields = RequestFields(prompt="p", model=model)
        submitting = asyncio.create_task(requests._submit(address, at, fields, True, False, False))
        await asyncio.wait_for(asked.wait(), 20)
        await queue.finish_all()
        await submitting
    assert capsys.readouterr() == ("P\n", "")
