"""The health service says how a process is, to everyone but too many of one host, and waits for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.rpc.limits import MAX_HEALTH_WATCHES_OF_HOST, MAX_KEYLESS_CALLS_OF_HOST
from services.rpc.server import Server, bind
from tests.support.raw_http2 import RawConnection, grpc_message
from tests.support.waiting import wait_for_async

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
NAME = "penstock.test.v1.TestService"

LONG_S = 20.0
"""Far more than anything here takes, and less than a peer that answers no ping is given (PING_TIMEOUT_MS)."""


@asynccontextmanager
async def serving(reflected: bool = False) -> AsyncIterator[tuple[Server, grpc.aio.Channel, Any]]:
    """Serve nothing but health and reflection; yields the server, a channel to it, and a stub of its health service."""
    server = bind("127.0.0.1:0", [NAME], lambda _: None, reflected=reflected)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield server, channel, health_pb2_grpc.HealthStub(channel)
    await server.stop(0)


def of(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


async def status_of(call: Any) -> grpc.StatusCode:
    """Return the status that a call fails with."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value.code()


async def test_a_check_is_told_the_status_of_a_known_service() -> None:
    async with serving() as (_, _, health):
        assert (await health.Check(of(""))).status == SERVING
        assert (await health.Check(of(NAME))).status == SERVING
        assert await status_of(health.Check(of("nobody"))) is grpc.StatusCode.NOT_FOUND


async def test_a_watch_is_told_of_the_end_and_ends() -> None:
    async with serving() as (server, _, health):
        watches = {name: health.Watch(of(name)) for name in ("", NAME, "nobody")}
        for name, watch in watches.items():
            assert (await watch.read()).status == (SERVICE_UNKNOWN if name == "nobody" else SERVING)
        async with asyncio.timeout(LONG_S):  # calls that stayed open would be waited for
            await server.stop(10 * LONG_S)
        for name in ("", NAME):
            assert (await watches[name].read()).status == NOT_SERVING
            assert await watches[name].read() is grpc.aio.EOF


async def test_a_watcher_who_does_not_read_keeps_nobody_waiting() -> None:
    async with serving() as (server, _, health):
        deaf = await RawConnection.open(f"127.0.0.1:{server.port}", window_bytes=0)
        await deaf.call("/grpc.health.v1.Health/Watch", [1], grpc_message(b""), last=True)

        async def begun() -> bool:
            return 1 in deaf.begun

        await wait_for_async(begun, "an answer to begin")
        async with asyncio.timeout(LONG_S):
            assert (await health.Watch(of("")).read()).status == SERVING
            await server.stop(0)
        await deaf.close()


async def test_one_host_has_only_so_many_watches_and_is_checked_nevertheless() -> None:
    async with serving() as (_, _, health):
        watches = [health.Watch(of("")) for _ in range(MAX_HEALTH_WATCHES_OF_HOST)]
        for watch in watches:
            assert (await watch.read()).status == SERVING
        assert await status_of(health.Watch(of("")).read()) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await health.Check(of(""))).status == SERVING
        watches[0].cancel()

        async def one_more() -> bool:
            watch = health.Watch(of(""))
            try:
                return bool((await watch.read()).status == SERVING)
            except grpc.aio.AioRpcError:
                return False

        await wait_for_async(one_more, "the place of a watch that has ended")


@pytest.mark.parametrize(
    "path", ["grpc.health.v1.Health/Check", "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"]
)
async def test_calls_that_ask_for_no_key_are_counted_by_host_too(path: str) -> None:
    async with serving(reflected=True) as (_, channel, _):
        method: Any = channel.stream_stream(f"/{path}")
        silent: list[Any] = [method() for _ in range(MAX_KEYLESS_CALLS_OF_HOST + 1)]
        ended = [asyncio.ensure_future(call.code()) for call in silent]
        (first, *_), _ = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED, timeout=LONG_S)
        assert first.result() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in silent:
            call.cancel()
        await asyncio.wait(ended)


async def test_checks_whose_answers_nobody_takes_are_open_calls_of_their_host() -> None:
    async with serving() as (server, _, health):
        deaf = await RawConnection.open(f"127.0.0.1:{server.port}", window_bytes=0)
        streams = range(1, 2 * (MAX_KEYLESS_CALLS_OF_HOST + 44), 2)
        await deaf.call("/grpc.health.v1.Health/Check", streams, grpc_message(b""), last=True)

        async def refused() -> bool:
            return len(deaf.ended) == 44

        await wait_for_async(refused, "the checks beyond the limit to be refused")
        assert (await health.Check(of(""))).status == SERVING, "another host has places of its own"
        await deaf.close()


async def test_reflection_lists_the_services() -> None:
    async with serving(reflected=True) as (_, channel, _):
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {service.name for service in (await call.read()).list_services_response.service}
        assert listed == {NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
