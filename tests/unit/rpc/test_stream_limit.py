"""One connection's open streams are bounded; what is beyond waits at its client, and other connections do not."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from penstock.queue.v1 import queue_pb2, queue_pb2_grpc
from services.rpc import limits, server
from services.telemetry import Telemetry
from tests.support.serving import serving


async def test_streams_beyond_the_limit_wait_for_their_own_connection_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dict(limits.SERVER_OPTIONS)["grpc.max_concurrent_streams"] == limits.MAX_STREAMS
    others = [option for option in limits.SERVER_OPTIONS if option[0] != "grpc.max_concurrent_streams"]
    monkeypatch.setattr(server, "SERVER_OPTIONS", [*others, ("grpc.max_concurrent_streams", 2)])
    async with serving(Telemetry(None)) as peer:
        watches = [peer.stub.Watch(queue_pb2.WatchRequest(batch="b", follow=True)) for _ in range(2)]
        for watch in watches:
            await watch.read()
        third = asyncio.ensure_future(peer.stub.Stats(queue_pb2.StatsRequest()))
        own = [("grpc.use_local_subchannel_pool", 1)]
        address = f"127.0.0.1:{peer.port}"
        async with grpc.aio.insecure_channel(address, options=own) as other:
            await queue_pb2_grpc.QueueServiceStub(other).Stats(queue_pb2.StatsRequest())
        assert not third.done()
        watches[0].cancel()
        assert (await third).store_id
        watches[1].cancel()
