"""Clients that mean ill, over real sockets: others are served meanwhile, and memory stays bounded."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from penstock.limits import MAX_MESSAGE_BYTES
from penstock.queue.v1 import queue_pb2, queue_pb2_grpc
from penstock.request.v1 import request_pb2
from penstock.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.rpc.limits import (
    MAX_CALLS,
    MAX_CALLS_OF_HOST,
    MAX_CONNECTIONS,
    MAX_KEYLESS_CALLS_OF_HOST,
    MAX_STREAMS,
)
from tests.support.fleet import Fleet, Service
from tests.support.raw_http2 import CONTINUATION, HEADERS, RawConnection, frame, grpc_headers, grpc_message, literal
from tests.support.waiting import wait_for_async

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

MEMORY_BYTES = 256 * 1024 * 1024
"""What an attack may cost at most. The largest is MAX_CALLS_OF_HOST calls, of about 30 KiB each."""

PATHS = {
    "queue": "/penstock.queue.v1.QueueService/Submit",
    "scheduler": "/penstock.scheduler.v1.SchedulerService/Credits",
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("hostile"))
    try:
        made.start_core()
        yield made
    finally:
        made.close()


@pytest.fixture(params=["queue", "scheduler"])
def victim(request: pytest.FixtureRequest, fleet: Fleet) -> Service:
    return fleet.services[request.param]


NUMBERS = itertools.count(1)
Works = Callable[[], Awaitable[None]]


@asynccontextmanager
async def good_client(victim: Service) -> AsyncIterator[Works]:
    """Yield a call that raises unless a stream opened beforehand, and a new call, are served."""
    async with grpc.aio.insecure_channel(victim.address) as channel:
        make = _good_submitter if victim.name == "queue" else _good_worker
        yield await make(channel)


async def _good_submitter(channel: grpc.aio.Channel) -> Works:
    stub: Any = queue_pb2_grpc.QueueServiceStub(channel)
    stream = stub.Submit()
    await stream.write(queue_pb2.SubmitRequest(open=queue_pb2.SubmitOpen(client_id="good")))
    assert (await stream.read()).WhichOneof("message") == "open"

    async def works() -> None:
        tagged = queue_pb2.TaggedRequest(tag=1, request=request_pb2.Request(text="x", channel="batch"))
        await stream.write(queue_pb2.SubmitRequest(batch=queue_pb2.SubmitBatch(requests=[tagged])))
        async with asyncio.timeout(60):
            acks = (await stream.read()).acks.acks
            await stub.Stats(queue_pb2.StatsRequest())
        assert [ack.status for ack in acks] == [queue_pb2.SUBMIT_STATUS_ACCEPTED]

    return works


async def _good_worker(channel: grpc.aio.Channel) -> Works:
    stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
    name = f"good-{next(NUMBERS)}"
    stream = stub.Credits()
    opening = scheduler_pb2.CreditsOpen(
        worker_id=name, instance_id="i", capacity_blocks=10, block_size=16, max_model_len=100, model="no-such-model",
        role=scheduler_pb2.WORKER_ROLE_UNIFIED, max_num_seqs=5,
    )  # fmt: skip
    messages = [scheduler_pb2.WorkerToScheduler(open=opening)]
    await stream.write(scheduler_pb2.CreditsRequest(messages=messages))
    epoch = (await stream.read()).messages[0].open.epoch
    steps = iter(range(1, 1000))

    async def works() -> None:
        step = next(steps)
        report = scheduler_pb2.EngineReport(epoch=epoch, blocks_free=10, step_ns=step)
        messages = [scheduler_pb2.WorkerToScheduler(engine_report=report)]
        await stream.write(scheduler_pb2.CreditsRequest(messages=messages))

        async def heard() -> bool:
            status = await stub.Status(scheduler_pb2.StatusRequest())
            return any(worker.worker_id == name and worker.engine.step_ns == step for worker in status.workers)

        await wait_for_async(heard, "the scheduler to hear the good worker")

    return works


def memory(victim: Service) -> int:
    pages = Path(f"/proc/{victim.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@asynccontextmanager
async def undisturbed(victim: Service) -> AsyncIterator[Works]:
    """Check that the good client is served before, after and, by the yielded call, during an attack."""
    before = memory(victim)
    async with good_client(victim) as works:
        await works()
        yield works
        await works()
    assert victim.running, victim.log()
    assert memory(victim) - before < MEMORY_BYTES
    assert "Traceback" not in victim.log(), victim.log()


async def test_garbage(victim: Service) -> None:
    chance = random.Random(1)
    block = grpc_headers(PATHS[victim.name])
    async with undisturbed(victim) as works:
        for greet in (False, True):
            for _ in range(30):
                connection = await RawConnection.open(victim.address, greet)
                await connection.send(chance.randbytes(chance.randint(1, 5000)))
                await connection.close()
        # Sound frames around calls of garbage: unknown kinds, calls on streams that were never opened, bad flags.
        connection = await RawConnection.open(victim.address)
        for stream in range(1, 400, 2):
            kind, flags = chance.randint(0, 12), chance.randint(0, 255)
            await connection.send(frame(HEADERS, 4, stream, block), frame(kind, flags, stream, chance.randbytes(20)))
        await works()
        await connection.close()


async def test_messages_that_are_none(victim: Service) -> None:
    async with undisturbed(victim) as works:
        connection = await RawConnection.open(victim.address)
        streams = range(1, 2 * 100, 2)
        await connection.call(PATHS[victim.name], streams, grpc_message(b"\xff" * 30))
        await works()

        async def refused() -> bool:
            return len(connection.ended) == len(streams)

        await wait_for_async(refused, "every such call to be ended")
        await connection.close()


async def test_oversized_messages(victim: Service) -> None:
    async with undisturbed(victim) as works:
        connection = await RawConnection.open(victim.address)
        streams = range(1, 2 * 50, 2)
        await connection.call(PATHS[victim.name], streams, grpc_message(b"x" * 100, length=MAX_MESSAGE_BYTES + 1))
        await works()

        async def refused() -> bool:
            return len(connection.ended) == len(streams)

        await wait_for_async(refused, "every such call to be ended")
        await connection.close()


async def test_messages_that_would_become_large(victim: Service) -> None:
    """Names of megabytes, kept or repeated in a status; and millions of entries of a few bytes each."""
    name = "\1" * (MAX_MESSAGE_BYTES - 1000)
    empty = request_pb2.Request(sampling=request_pb2.SamplingParams())
    entry = queue_pb2.SubmitUnaryRequest(requests=[empty]).SerializeToString()
    calls = [
        ("/grpc.health.v1.Health/Watch", health_pb2.HealthCheckRequest(service=name).SerializeToString(), "service")
    ]
    if victim.name == "queue":
        service = "/penstock.queue.v1.QueueService"
        calls.append((f"{service}/Get", queue_pb2.GetRequest(request_id=name).SerializeToString(), "request_id"))
        calls.append((f"{service}/SubmitUnary", entry * (len(name) // len(entry)), "requests"))
    options = [("grpc.max_send_message_length", MAX_MESSAGE_BYTES)]
    async with undisturbed(victim) as works, grpc.aio.insecure_channel(victim.address, options=options) as channel:
        for path, message, field in calls:
            method: Any = channel.stream_stream(path)
            for _ in range(5):
                call = method(iter([message]))
                assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert (await call.details()).startswith(f"{field}: ")
            await works()


async def test_compressed_messages_are_refused(victim: Service) -> None:
    """A thousand times as large once they are read: what bounds a sender is what it has to send."""
    async with grpc.aio.insecure_channel(victim.address) as channel:
        call: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await call(b"") is not None
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(bytes(1000), compression=grpc.Compression.Gzip)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_endless_headers(victim: Service) -> None:
    block = grpc_headers(PATHS[victim.name])
    more = b"".join(literal(f"x-{n:03}", "y" * 100) for n in range(100))
    async with undisturbed(victim) as works:
        connection = await RawConnection.open(victim.address)
        taken = await connection.send(frame(HEADERS, 0, 1, block))
        sent = 0
        while taken and sent < 64 * 1024 * 1024:
            taken = await connection.send(frame(CONTINUATION, 0, 1, more))
            sent += len(more)
        await works()
        await connection.close()


async def test_ten_thousand_idle_calls(victim: Service) -> None:
    """A host may have MAX_CALLS_OF_HOST calls open; those beyond are refused, and another host is served."""
    async with undisturbed(victim) as works:
        connections = [await RawConnection.open(victim.address) for _ in range(10)]
        for connection in connections:
            await connection.call(PATHS[victim.name], range(1, 2 * 1000, 2))
        await works()

        async def refused() -> bool:
            return sum(len(connection.ended) for connection in connections) >= 10_000 - MAX_CALLS_OF_HOST

        await wait_for_async(refused, "the calls beyond the limit to be refused")
        await works()
        for connection in connections:
            await connection.close()


async def test_calls_whose_answers_nobody_takes(victim: Service) -> None:
    """As many as all hosts together may have open, without a key: all but those of one host are refused."""
    async with undisturbed(victim) as works:
        connections = [
            await RawConnection.open(victim.address, window_bytes=0) for _ in range(MAX_CALLS // MAX_STREAMS)
        ]
        for connection in connections:
            streams = range(1, 2 * MAX_STREAMS, 2)
            await connection.call("/grpc.health.v1.Health/Check", streams, grpc_message(b""), last=True)
        await works()

        async def refused() -> bool:
            return sum(len(connection.ended) for connection in connections) == MAX_CALLS - MAX_KEYLESS_CALLS_OF_HOST

        await wait_for_async(refused, "the calls beyond the limit to be refused")
        await works()
        async with grpc.aio.insecure_channel(victim.address) as channel:
            check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert await check(b"") is not None
        for connection in connections:
            await connection.close()


async def test_a_connection_has_no_more_streams_than_allowed(victim: Service) -> None:
    async with undisturbed(victim) as works:
        connection = await RawConnection.open(victim.address)
        await connection.call(PATHS[victim.name], range(1, 2 * (MAX_STREAMS + 200), 2))

        async def refused() -> bool:
            return len(connection.ended) >= 200 or connection.closed.is_set()

        await wait_for_async(refused, "the streams beyond the limit to be refused")
        await works()
        await connection.close()


async def test_connections_that_say_nothing_and_calls_that_begin_to(victim: Service) -> None:
    async with undisturbed(victim) as works:
        silent = [await RawConnection.open(victim.address, greet=False) for _ in range(300)]
        slow = await RawConnection.open(victim.address)
        streams = range(1, 2 * 200, 2)
        await slow.call(PATHS[victim.name], streams, grpc_message(b"", length=MAX_MESSAGE_BYTES))
        for _ in range(5):
            await slow.send(*(frame(0, 0, stream, b"x") for stream in streams))
            await works()
        for connection in (*silent, slow):
            await connection.close()


async def test_more_connections_than_allowed(victim: Service) -> None:
    """Open streams go on, and new connections are taken again once the many have gone."""
    async with undisturbed(victim) as works:
        many = [await RawConnection.open(victim.address) for _ in range(MAX_CONNECTIONS + 100)]

        async def refused() -> bool:
            return sum(connection.closed.is_set() for connection in many) >= 100

        await wait_for_async(refused, "the connections beyond the limit to be closed")
        await works()
        for connection in many:
            await connection.close()

        async def served() -> bool:
            try:
                async with good_client(victim) as newcomer:
                    await newcomer()
            except grpc.aio.AioRpcError:
                return False
            return True

        await wait_for_async(served, "a new connection to be served")


def test_the_file_limit_leaves_room_for_the_store(victim: Service) -> None:
    limits = Path(f"/proc/{victim.pid}/limits").read_text()
    soft = next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3]
    assert soft == "unlimited" or int(soft) >= 8192 or int(soft) == os.sysconf("SC_OPEN_MAX")
