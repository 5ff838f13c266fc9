"""The whole queue service over gRPC with a store in memory, and its peers as they would see it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from penstock.queue.v1 import queue_pb2, queue_pb2_grpc
from penstock.request.v1 import request_pb2
from services.queue.metrics import QueueMetrics
from services.queue.service import Service
from services.queue.settings import QueueSettings
from services.telemetry import Telemetry
from tests.support.memory_store import MemoryStore

Request = request_pb2.Request
COMPLETED = request_pb2.OUTCOME_COMPLETED


@dataclass
class Work:
    """A worker's stream, as a worker would see it."""

    call: Any
    inbox: list[queue_pb2.QueueToWorker] = field(default_factory=list)

    async def send(self, *messages: queue_pb2.WorkerToQueue) -> None:
        await self.call.write(queue_pb2.WorkRequest(messages=messages))

    async def close(self) -> None:
        """End the stream, and return when the service has seen it."""
        await self.call.done_writing()
        while await self.call.read() is not grpc.aio.EOF:
            pass

    async def next(self, kind: str) -> Any:
        """Return the next message of this kind; others in between are an error."""
        while not self.inbox:
            frame = await self.call.read()
            assert frame is not grpc.aio.EOF, "the stream ended"
            self.inbox += frame.messages
        message = self.inbox.pop(0)
        assert message.WhichOneof("message") == kind, message
        return getattr(message, kind)

    async def claim(self, request_id: str) -> queue_pb2.Deliver:
        await self.send(queue_pb2.WorkerToQueue(claim=queue_pb2.Claim(request_id=request_id)))
        delivery: queue_pb2.Deliver = await self.next("deliver")
        return delivery

    async def complete(self, lease: queue_pb2.LeaseRef, **fields: Any) -> queue_pb2.Recorded:
        complete = queue_pb2.Complete(lease=lease, **(fields or {"result": request_pb2.Result(outcome=COMPLETED)}))
        await self.send(queue_pb2.WorkerToQueue(complete=complete))
        recorded: queue_pb2.Recorded = await self.next("recorded")
        return recorded


@dataclass
class Peer:
    """A client of the service under test."""

    stub: Any
    service: Service
    channel: grpc.aio.Channel
    registry: CollectorRegistry
    port: int
    stop: asyncio.Event
    """Ends the service."""

    async def submit(self, *requests: Request) -> list[str]:
        response = await self.stub.SubmitUnary(queue_pb2.SubmitUnaryRequest(requests=requests))
        return [ack.request_id for ack in response.acks]

    async def work(self, worker: str = "w", life: str = "1", held: Any = ()) -> Work:
        work = Work(self.stub.Work())
        opening = queue_pb2.WorkOpen(worker_id=worker, instance_id=life, held=held)
        await work.send(queue_pb2.WorkerToQueue(open=opening))
        await work.next("open")
        return work

    async def settled(self) -> None:
        """Let the service handle what was sent before on other streams of this channel."""
        await self.stub.Stats(queue_pb2.StatsRequest())


def text(**fields: Any) -> Request:
    return Request(text="hi", **fields)


async def refused(call: Any, code: grpc.StatusCode, text_part: str) -> None:
    """Expect that the call fails so."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    assert error.value.code() is code
    assert text_part in (error.value.details() or "")


def ids(*names: str) -> queue_pb2.RequestIds:
    return queue_pb2.RequestIds(ids=names)


@asynccontextmanager
async def serving(
    telemetry: Telemetry, store: MemoryStore | None = None, keys: Path | None = None
) -> AsyncIterator[Peer]:
    settings = QueueSettings(listen="127.0.0.1:0", max_attempts=2, PENSTOCK_KEYS=keys)
    registry = CollectorRegistry()
    service = Service(settings, store or MemoryStore(), telemetry, QueueMetrics(registry))
    stop = asyncio.Event()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(service.run(stop, port.set_result))
    running.add_done_callback(lambda _: port.cancel())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await port}") as channel:
        yield Peer(queue_pb2_grpc.QueueServiceStub(channel), service, channel, registry, port.result(), stop)
    stop.set()
    await running
