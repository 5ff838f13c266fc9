"""Calls are counted by host, and a call that says nothing ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc
import pytest

from penstock.scheduler.v1 import scheduler_pb2 as pb
from penstock.scheduler.v1 import scheduler_pb2_grpc
from services.rpc import strict
from services.rpc.strict import BadInputError, Doorkeeper, add_servicer
from tests.support.waiting import wait_for_async

SERVICE = pb.DESCRIPTOR.services_by_name["SchedulerService"]


class AbortedError(Exception):
    """Stands for the end of a call."""


class Context:
    """A call of a host, as far as the doorkeeper asks."""

    def __init__(self, peer: str) -> None:
        self._peer = peer

    def peer(self) -> str:
        return self._peer

    async def abort(self, code: grpc.StatusCode, text: str) -> NoReturn:
        raise AbortedError(code, text)


async def nobody(door: Doorkeeper) -> bool:
    return len(door) == 0


async def test_a_host_has_so_many_calls_over_all_its_connections() -> None:
    door: Any = Doorkeeper(2)
    over = asyncio.Event()

    async def call(peer: str, error: Exception | None = None) -> None:
        await door.admit(Context(peer))
        if error is not None:
            raise error
        await over.wait()

    peers = ("ipv4:10.0.0.1:1", "ipv4:10.0.0.1:2", "ipv4:10.0.0.2:1", "ipv6:[::1]:1")
    calls = [asyncio.create_task(call(peer)) for peer in peers]
    with pytest.raises(AbortedError, match="this host has 2 calls open already"):
        await asyncio.create_task(call("ipv4:10.0.0.1:3"))
    assert len(door) == 4
    over.set()
    await asyncio.gather(*calls)
    await wait_for_async(lambda: nobody(door), "the calls to be counted no more")
    with pytest.raises(BadInputError):
        await asyncio.create_task(call("ipv4:10.0.0.1:4", BadInputError("field: wrong")))
    await wait_for_async(lambda: nobody(door), "a call that failed to be counted no more")


class Servicer:
    """Answers each method of the scheduler, if only with how many messages it read."""

    async def Credits(self, requests: AsyncIterator[pb.CreditsRequest], _: Any) -> AsyncIterator[pb.CreditsResponse]:
        yield pb.CreditsResponse(messages=[pb.SchedulerToWorker()] * len([request async for request in requests]))

    async def Status(self, _request: pb.StatusRequest, _context: Any) -> pb.StatusResponse:
        return pb.StatusResponse(policy="p")

    async def DrainWorker(self, request: pb.DrainWorkerRequest, _: Any) -> pb.DrainWorkerResponse:
        return pb.DrainWorkerResponse(reservations=len(request.worker_id))

    async def UndrainWorker(self, _request: pb.UndrainWorkerRequest, _context: Any) -> pb.UndrainWorkerResponse:
        raise BadInputError("worker_id: wrong")


@asynccontextmanager
async def serving(doorkeeper: Doorkeeper) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    add_servicer(SERVICE, Servicer(), server, doorkeeper)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def test_a_call_that_says_nothing_ends_and_is_counted_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict, "FIRST_MESSAGE_S", 0.05)
    door = Doorkeeper()
    async with serving(door) as channel:
        for name in ("Credits", "Status"):
            # As a stream, whatever the API says: only so can a client keep its message to itself.
            call: Any = channel.stream_stream(f"/{SERVICE.full_name}/{name}")()
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await call.read()
            assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "first message did not come within 0.05 s" in (ended.value.details() or "")
        monkeypatch.undo()  # a call that says something has the usual time for it
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        assert (await stub.DrainWorker(pb.DrainWorkerRequest(worker_id="abc"))).reservations == 3
        await wait_for_async(lambda: nobody(door), "the calls to be counted no more")


class Stalling(Doorkeeper):
    """Has the loop stand still as soon as it has turned to a call, which has said what it has to say."""

    async def admit(self, context: Any) -> None:
        await super().admit(context)
        asyncio.get_running_loop().call_soon(time.sleep, 1.5)


async def test_a_call_whose_message_came_while_the_loop_stood_still_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict, "FIRST_MESSAGE_S", 1.0)
    async with serving(Stalling()) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        assert (await stub.DrainWorker(pb.DrainWorkerRequest(worker_id="abc"))).reservations == 3


async def test_one_message_where_one_is_meant_and_all_of_a_stream() -> None:
    async with serving(Doorkeeper()) as channel:
        stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        call = stub.Credits(iter([pb.CreditsRequest()] * 3))
        assert len((await call.read()).messages) == 3
        call = stub.Credits(iter(()))
        assert len((await call.read()).messages) == 0
        for path, text in (("Status", "ended without a message"), ("UndrainWorker", "worker_id: wrong")):
            messages: Any = iter([b""] if path == "UndrainWorker" else [])
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.stream_unary(f"/{SERVICE.full_name}/{path}")(messages)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert text in (refused.value.details() or "")


async def test_the_doorkeeper_that_is_given_counts_also_if_no_call_is_open_yet() -> None:
    async with serving(Doorkeeper(0)) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="this host has 0 calls open already"):
            await scheduler_pb2_grpc.SchedulerServiceStub(channel).Status(pb.StatusRequest())
