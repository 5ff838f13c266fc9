"""`penstock submit` that waits for an answer nobody can give says so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.cli import requests, vain
from penstock.fields import RequestFields
from penstock.queue.v1 import queue_pb2
from penstock.scheduler.v1 import scheduler_pb2 as pb
from tests.support.fake_queue import FakeQueue, serving
from tests.support.fake_scheduler import FakeScheduler, serving_scheduler

TINY = pb.WorkerStatus(model="tiny", model_aliases=["small"])
DRAINED = pb.WorkerStatus(model="tiny", model_aliases=["small"], draining=True)
OTHER = pb.WorkerStatus(model="other")

UNDRAIN = "none takes more, until `penstock drain WORKER --undo` has one take requests again"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at once, and again and again."""
    monkeypatch.setattr(vain, "WHY_AFTER_S", 0.0)
    monkeypatch.setattr(vain, "LOOK_EVERY_S", 0.001)


async def submit(queue: FakeQueue, scheduler: FakeScheduler, model: str, looks: int, stream: bool = False) -> None:
    """Submit a request, which has its answer after so many looks at the scheduler."""
    queue.paused = True
    async with serving(queue) as address, serving_scheduler(scheduler) as at:
        fields = RequestFields(prompt="p", model=model)
        submitting = asyncio.create_task(requests._submit(address, at, fields, not stream, stream, False))
        async with asyncio.timeout(20):
            while scheduler.asked < looks:
                await asyncio.sleep(0.001)
        await queue.finish_all()
        await submitting


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("workers", "model", "said"),
    [
        ([TINY], "zork", "waiting: no connected worker serves the model 'zork' (served: small, tiny)\n"),
        ([], "zork", "waiting: no worker is connected\n"),
        ([], "", "waiting: no worker is connected\n"),
        ([DRAINED], "", f"waiting: all workers are drained or ending: {UNDRAIN}\n"),
        ([DRAINED, OTHER], "small", f"waiting: all workers of the model 'small' are drained or ending: {UNDRAIN}\n"),
    ],
)
async def test_it_says_once_that_nobody_can_answer(
    capsys: pytest.CaptureFixture[str], workers: list[pb.WorkerStatus], model: str, said: str, stream: bool
) -> None:
    await submit(FakeQueue(), FakeScheduler(pb.StatusResponse(workers=workers)), model, 4, stream)
    assert capsys.readouterr() == ("P\n", said)


@pytest.mark.parametrize(
    ("workers", "model"),
    [([TINY], "tiny"), ([TINY], "small"), ([TINY], ""), ([TINY, DRAINED], "tiny"), ([DRAINED, OTHER], "")],
)
async def test_what_somebody_serves_is_waited_for_in_silence(
    capsys: pytest.CaptureFixture[str], workers: list[pb.WorkerStatus], model: str
) -> None:
    await submit(FakeQueue(), FakeScheduler(pb.StatusResponse(workers=workers)), model, 3)
    assert capsys.readouterr() == ("P\n", "")


async def test_what_begins_again_is_said_again(capsys: pytest.CaptureFixture[str]) -> None:
    fleets = [[TINY], [DRAINED], [DRAINED], [TINY], [DRAINED]]
    await submit(FakeQueue(), FakeScheduler(*(pb.StatusResponse(workers=workers) for workers in fleets)), "tiny", 7)
    said = f"waiting: all workers of the model 'tiny' are drained or ending: {UNDRAIN}\n"
    assert capsys.readouterr() == ("P\n", said * 2)


async def test_nothing_is_said_of_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """A drained worker finishes what it has."""

    class Running(FakeQueue):
        async def Get(self, request: queue_pb2.GetRequest, context: Any) -> queue_pb2.GetResponse:
            return queue_pb2.GetResponse(request_id=request.request_id, state=queue_pb2.REQUEST_STATE_LEASED)

    await submit(Running(), FakeScheduler(pb.StatusResponse(workers=[DRAINED])), "tiny", 4)
    assert capsys.readouterr() == ("P\n", "")


async def test_nothing_is_said_of_a_fleet_that_may_not_be_whole(capsys: pytest.CaptureFixture[str]) -> None:
    await submit(FakeQueue(), FakeScheduler(pb.StatusResponse(up_ns=10**9)), "tiny", 4)
    assert capsys.readouterr() == ("P\n", "")
