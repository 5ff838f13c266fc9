"""The scheduler's stream to a queue that reads nothing, or refuses: what it says there and in its log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from penstock.queue.v1 import queue_pb2, queue_pb2_grpc
from penstock.tls import Access
from services.rpc.outbox import Outbox
from services.scheduler.links import BacklogLink
from tests.support.fake_peers import until


class Deaf(queue_pb2_grpc.QueueServiceServicer):
    """Lets the scheduler in, and reads no frame after its first."""

    def __init__(self) -> None:
        self.opens = 0
        self.over = asyncio.Event()

    async def Backlog(
        self, frames: AsyncIterator[queue_pb2.BacklogRequest], context: Any
    ) -> AsyncIterator[queue_pb2.BacklogResponse]:
        """Say that it is open, and wait for the end."""
        await anext(frames)
        self.opens += 1
        opened = queue_pb2.QueueToScheduler(open=queue_pb2.BacklogOpen())
        yield queue_pb2.BacklogResponse(messages=[opened])
        await self.over.wait()


class Refusing(queue_pb2_grpc.QueueServiceServicer):
    """Ends each stream with the next of its codes, and the last of them for ever; lets in where that is OK."""

    def __init__(self, *codes: grpc.StatusCode) -> None:
        self.codes = list(codes)
        self.asked: list[queue_pb2.BacklogOpen] = []

    async def Backlog(
        self, frames: AsyncIterator[queue_pb2.BacklogRequest], context: Any
    ) -> AsyncIterator[queue_pb2.BacklogResponse]:
        """Refuse, or let in and end the stream at once."""
        self.asked.append((await anext(frames)).messages[0].open)
        code = self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]
        if code is not grpc.StatusCode.OK:
            await context.abort(code, f"because of {code.name}")
        yield queue_pb2.BacklogResponse(messages=[queue_pb2.QueueToScheduler(open=queue_pb2.BacklogOpen())])


class Heard:
    """In place of the runner: the outbox of each stream."""

    def __init__(self) -> None:
        self.outboxes: list[Outbox] = []
        self.connected = 0

    def workers(self) -> int:
        return self.connected

    def open_queue(self, outbox: Outbox) -> None:
        self.outboxes.append(outbox)

    def close_queue(self) -> None:
        """Nobody asks."""

    def feed(self, messages: Iterable[Any]) -> None:
        """Nobody asks."""


@asynccontextmanager
async def linked(queue: queue_pb2_grpc.QueueServiceServicer, heard: Heard) -> AsyncIterator[None]:
    """Run a link to this queue."""
    server = grpc.aio.server()
    queue_pb2_grpc.add_QueueServiceServicer_to_server(queue, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = asyncio.create_task(BacklogLink(f"127.0.0.1:{port}", "s", heard, Access()).run())
    try:
        yield
    finally:
        link.cancel()
        with pytest.raises(asyncio.CancelledError):
            await link
        await server.stop(None)


async def test_the_log_tells_each_new_reason_once(caplog: pytest.LogCaptureFixture) -> None:
    away, taken, let_in = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.OK
    caplog.set_level(logging.INFO, "scheduler")
    queue = Refusing(away, away, taken, let_in, taken)  # type: ignore[abstract]
    async with linked(queue, Heard()):
        await until(lambda: len(queue.asked) > 6, "it to be refused twice at the end")
    said = [message.partition("127.0.0.1:")[2].partition(": ")[2] or "connected" for message in caplog.messages]
    assert said == [
        "because of UNAVAILABLE",
        "because of ALREADY_EXISTS",
        "connected",
        "it ended the stream",
        "because of ALREADY_EXISTS",
    ]


async def test_the_queue_is_told_each_time_how_many_workers_there_are() -> None:
    queue, heard = Refusing(grpc.StatusCode.ALREADY_EXISTS), Heard()  # type: ignore[abstract]
    async with linked(queue, heard):
        await until(lambda: bool(queue.asked), "it to ask")
        assert queue.asked[0].workers == 0
        heard.connected = 3
        await until(lambda: queue.asked[-1].workers == 3, "it to say that there are three")


async def test_a_queue_that_does_not_read_is_told_anew_and_costs_a_bounded_amount(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.rpc.unread.MAX_UNSENT_BYTES", 1_000_000)
    monkeypatch.setattr("services.rpc.unread.UNREAD_LOOK_S", 0.05)
    deaf, heard = Deaf(), Heard()  # type: ignore[abstract]
    async with linked(deaf, heard):
        await until(lambda: bool(heard.outboxes), "the stream to open")
        window = queue_pb2.SchedulerToQueue(window=queue_pb2.Window(channel="x" * 20_000))
        for _ in range(1000):  # of which gRPC takes some megabytes
            heard.outboxes[0].put(window)
        await until(lambda: deaf.opens == 2, "the stream to open again")
        assert (len(heard.outboxes[0]), heard.outboxes[0].size_bytes) == (0, 0)
        deaf.over.set()
