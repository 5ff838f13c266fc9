"""Watches that end before what they watch has: of what has ended until now, and of a queue that stops."""

from __future__ import annotations

import grpc

from penstock.queue.v1 import queue_pb2
from services.telemetry import Telemetry
from tests.support.serving import ids, refused, serving, text
from tests.unit.queue.test_service import all_events, results


async def test_a_watch_until_now_ends_with_what_has_ended_and_says_how_much_has_not() -> None:
    async with serving(Telemetry(None)) as peer:
        names = await peer.submit(*(text(batch="b", client_reference="mine") for _ in range(3)))
        work = await peer.work()
        await work.complete((await work.claim(names[1])).lease)
        seen = await all_events(peer.stub.Watch(queue_pb2.WatchRequest(batch="b", until_now=True, follow=True)))
        assert [result.result.request_id for result in results(seen)] == [names[1]]
        assert (seen[-1].progress.waiting, seen[-1].progress.running) == (2, 0)
        for name in names[:2]:
            assert (await peer.stub.Get(queue_pb2.GetRequest(request_id=name))).client_reference == "mine"


async def test_watchers_do_not_hold_up_a_queue_that_stops() -> None:
    """They are told, as they would not be by a server that cancels them at the end of its grace."""
    async with serving(Telemetry(None)) as peer:
        (name,) = await peer.submit(text(batch="b"))
        named = peer.stub.Watch(queue_pb2.WatchRequest(request_ids=ids(name), tokens=True))
        batch = peer.stub.Watch(queue_pb2.WatchRequest(batch="b"))
        for call in (named, batch):
            await call.read()
        peer.stop.set()
        for call in (named, batch):
            await refused(call.read(), grpc.StatusCode.UNAVAILABLE, "the queue service is stopping")
