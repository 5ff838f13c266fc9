"""A peer that is slow to answer a connection's first bytes, far away or busy, is connected to at the first attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from penstock import connection
from penstock.queue.v1 import queue_pb2, queue_pb2_grpc
from services.rpc import limits
from services.telemetry import Telemetry
from tests.chaos.proxy import Proxy
from tests.support.memory_store import MemoryStore
from tests.support.serving import serving

TRIES = 5
"""Of the services, which have half a second, so that a pause of the machine may cost one."""


async def connects(options: Sequence[tuple[str, int]], slow_s: float) -> bool:
    """Return whether a call that does not wait for a second attempt is answered by a peer that is slow at first."""
    async with serving(Telemetry(None), MemoryStore()) as peer:
        proxy = Proxy("slow", f"127.0.0.1:{peer.port}")
        await proxy.start()
        stalling = asyncio.create_task(proxy.stall(slow_s))
        try:
            async with grpc.aio.insecure_channel(proxy.address, options=options) as channel:
                await queue_pb2_grpc.QueueServiceStub(channel).Stats(queue_pb2.StatsRequest())
        except grpc.aio.AioRpcError:
            return False
        else:
            assert stalling.done(), "nothing was carried before"
            return True
        finally:
            await stalling
            await proxy.close()


async def test_a_client_waits_for_a_connection_across_the_world() -> None:
    assert await connects(connection.CHANNEL_OPTIONS, 1.0)


async def test_a_service_waits_for_a_connection_across_a_continent() -> None:
    for _ in range(TRIES):
        if await connects(limits.CHANNEL_OPTIONS, 0.25):
            return
    raise AssertionError("never")
