"""The scheduler's stream to a queue that accepts what it is told and reads nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
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


class Heard:
    """In place of the runner: the outbox of each stream."""

    def __init__(self) -> None:
        self.outboxes: list[Outbox] = []

    def open_queue(self, outbox: Outbox) -> None:
        self.outboxes.append(outbox)

    def close_queue(self) -> None:
        """Nobody asks."""

    def feed(self, messages: Iterable[Any]) -> None:
        """Nobody asks."""


async def test_a_queue_that_does_not_read_is_told_anew_and_costs_a_bounded_amount(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.rpc.unread.MAX_UNSENT_BYTES", 1_000_000)
    monkeypatch.setattr("services.rpc.unread.UNREAD_LOOK_S", 0.05)
    server, deaf, heard = grpc.aio.server(), Deaf(), Heard()  # type: ignore[abstract]
    queue_pb2_grpc.add_QueueServiceServicer_to_server(deaf, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = asyncio.create_task(BacklogLink(f"127.0.0.1:{port}", "s", heard, Access()).run())
    await until(lambda: bool(heard.outboxes), "the stream to open")
    window = queue_pb2.SchedulerToQueue(window=queue_pb2.Window(channel="x" * 20_000))
    for _ in range(1000):  # of which gRPC takes some megabytes
        heard.outboxes[0].put(window)
    await until(lambda: deaf.opens == 2, "the stream to open again")
    assert (len(heard.outboxes[0]), heard.outboxes[0].size_bytes) == (0, 0)
    link.cancel()
    with pytest.raises(asyncio.CancelledError):
        await link
    deaf.over.set()
    await server.stop(None)
