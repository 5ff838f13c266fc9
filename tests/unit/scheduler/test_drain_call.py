"""DrainWorker is answered when nothing stands ready at the worker that could still meet a request."""

from __future__ import annotations

import asyncio
import logging
from typing import cast

import grpc
import pytest

from penstock.keys import Role
from penstock.scheduler.v1 import scheduler_pb2
from services.auth.caller import CALLER, Caller
from services.scheduler import servicer
from services.scheduler.core import messages as m
from services.scheduler.servicer import Context, SchedulerServicer
from tests.support.scheduler_shell import Shell
from tests.support.scheduling import SECOND_NS, announced

HOUR_S = 3_600.0
TIMEOUT_S = 30


def shell_where_one_stands_ready() -> tuple[Shell, int]:
    """Return a shell with one worker that has a standing grant and nothing else, and its epoch."""
    shell = Shell(standing_ns=SECOND_NS)
    epoch = shell.open().epoch
    ended = m.CompletionAck(epoch, epoch, "r1", 1, m.ReleaseCause.COMPLETED)
    for message in (announced("r1", "batch", 1), m.Gone("r1", m.GoneReason.CLAIMED), ended):
        shell.runner.feed([message])
        shell.runner.wake()
    assert standing(shell) == 1
    return shell, epoch


def standing(shell: Shell) -> int:
    (worker,) = shell.runner.snapshot().workers
    return worker.reservations


async def asked_to_drain(shell: Shell) -> asyncio.Task[scheduler_pb2.DrainWorkerResponse]:
    """Return the call once the worker was told."""
    request = scheduler_pb2.DrainWorkerRequest(worker_id="w1")
    call = asyncio.create_task(SchedulerServicer(shell.runner).DrainWorker(request, cast("Context", None)))
    await asyncio.sleep(0)
    shell.runner.wake()
    return call


async def test_a_drain_is_answered_once_what_stood_ready_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "WITHDRAWN_WITHIN_S", HOUR_S)
    shell, epoch = shell_where_one_stands_ready()
    call = await asked_to_drain(shell)
    shell.runner.feed([m.Tick()])
    shell.runner.wake()
    await asyncio.sleep(0)
    assert not call.done()
    shell.runner.feed([m.CompletionAck(epoch, epoch, f"standing/{epoch}-1", 2, m.ReleaseCause.UNCLAIMED)])
    shell.runner.wake()
    async with asyncio.timeout(TIMEOUT_S):
        assert (await call).reservations == 0
    assert not shell.runner._withdrawing


async def test_a_drain_is_answered_though_the_worker_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "WITHDRAWN_WITHIN_S", 0)
    shell, _ = shell_where_one_stands_ready()
    async with asyncio.timeout(TIMEOUT_S):
        assert (await (await asked_to_drain(shell))).reservations == 1
    assert not shell.runner._withdrawing


async def test_a_drain_is_answered_at_once_where_nothing_stands_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "WITHDRAWN_WITHIN_S", HOUR_S)
    shell = Shell()
    shell.open()
    async with asyncio.timeout(TIMEOUT_S):
        assert (await (await asked_to_drain(shell))).reservations == 0


async def test_a_drain_and_its_end_are_told_with_whose_key(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, servicer.log.name)
    CALLER.set(Caller(Role.OPERATOR, "t", key_id="ops"))
    shell, _ = shell_where_one_stands_ready()
    called = SchedulerServicer(shell.runner)
    monkeypatch.setattr(servicer, "WITHDRAWN_WITHIN_S", 0)
    async with asyncio.timeout(TIMEOUT_S):
        await called.DrainWorker(scheduler_pb2.DrainWorkerRequest(worker_id="w1"), cast("Context", None))
        await called.UndrainWorker(scheduler_pb2.UndrainWorkerRequest(worker_id="w1"), cast("Context", None))
    assert [record.getMessage() for record in caplog.records if record.name == servicer.log.name] == [
        "worker w1 is drained; it still has 1 requests (key ops, operator, tenant t)",
        "worker w1 is drained no more (key ops, operator, tenant t)",
    ]


async def test_a_worker_that_is_stopping_is_not_said_to_take_grants_again() -> None:
    shell = Shell()
    epoch = shell.open().epoch
    shell.runner.feed([m.DrainRequested("w1"), m.WorkerLeaving(epoch, "told to stop")])
    shell.runner.wake()
    context = Refusing()
    with pytest.raises(EndedError):
        await SchedulerServicer(shell.runner).UndrainWorker(
            scheduler_pb2.UndrainWorkerRequest(worker_id="w1"), cast("Context", context)
        )
    assert context.said == [
        (
            grpc.StatusCode.FAILED_PRECONDITION,
            "worker_id: 'w1' is stopping, and takes no grants until it is started again",
        )
    ]
    (worker,) = shell.runner.snapshot().workers
    assert (worker.draining, worker.leaving) == (True, True)


class EndedError(Exception):
    """A call was ended."""


class Refusing:
    """A call's context that keeps what it was ended with."""

    def __init__(self) -> None:
        self.said: list[tuple[grpc.StatusCode, str]] = []

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        self.said.append((code, text))
        raise EndedError
