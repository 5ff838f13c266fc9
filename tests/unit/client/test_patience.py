"""How long a stream that breaks is opened again: `retry_for_s` counts from when the queue was last there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

import penstock
from penstock import submitting
from penstock.fields import RequestFields
from penstock.queue.v1 import queue_pb2 as pb
from tests.support.fake_queue import FakeQueue, serving

RETRY_FOR_S = 0.2
RESTARTS = 10
"""Pauses that double from the first failure on come to far more than RETRY_FOR_S by then."""


class Restarting(FakeQueue):
    """Ends its streams with the first answer after which `ends_after` says so, `restarts` times in all."""

    def __init__(self, restarts: int = RESTARTS) -> None:
        super().__init__()
        self.restarts = restarts
        self.back = asyncio.Event()

    def ends_after(self, response: pb.SubmitResponse | pb.WatchResponse) -> bool:
        return True

    async def _broken_off(self, responses: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for response in responses:
            yield response
            if self.restarts and self.ends_after(response):
                self.restarts -= 1
                await context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
            if not self.restarts:
                self.back.set()

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[Any]:
        async for response in self._broken_off(super().Watch(request, context), context):
            yield response

    async def Submit(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for response in self._broken_off(super().Submit(request_iterator, context), context):
            yield response


async def test_a_watch_of_requests_that_wait_outlives_any_number_of_restarts() -> None:
    queue = Restarting(restarts=0)
    queue.paused = True
    async with serving(queue) as address, penstock.Client(address, retry_for_s=RETRY_FOR_S) as client:
        name = await client.submit(prompt="p")
        queue.restarts = RESTARTS
        queue.back.clear()
        watching = asyncio.ensure_future(anext(client.watch(request_ids=[name])))
        await _first_of(watching, queue.back.wait())
        await queue.finish_all()
        assert (await watching).request_id == name


async def test_a_submitter_with_nothing_to_send_outlives_any_number_of_restarts() -> None:
    queue = Restarting()

    async def slow() -> AsyncIterator[RequestFields]:
        await queue.back.wait()
        yield {"prompt": "p"}

    async with serving(queue) as address, penstock.Client(address, retry_for_s=RETRY_FOR_S) as client:
        async with asyncio.timeout(30):
            assert len([ack async for ack in client.submit_many(slow())]) == 1


class OverQuota(Restarting):
    """Ends its streams once it has refused what was submitted for a quota."""

    def ends_after(self, response: Any) -> bool:
        return bool(response.acks.acks)


async def test_who_waits_for_a_quota_outlives_any_number_of_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submitting, "QUOTA_PAUSE_S", 0.01)
    queue = OverQuota()
    queue.over_quota = RESTARTS
    async with serving(queue) as address, penstock.Client(address, retry_for_s=RETRY_FOR_S) as client:
        acks = [ack async for ack in client.submit_many([{"prompt": "p"}], wait_for_quota=True)]
    assert [ack.error for ack in acks] == [None]


async def test_a_queue_that_opens_streams_and_acks_nothing_is_given_up() -> None:
    """What breaks the stream may be the request itself, a frame that the queue does not take."""
    queue = Restarting(restarts=10**6)
    async with serving(queue) as address, penstock.Client(address, retry_for_s=RETRY_FOR_S) as client:
        with pytest.raises(penstock.Unavailable, match="restarting"):
            async with asyncio.timeout(30):
                [_ async for _ in client.submit_many([{"prompt": "p"}])]


async def _first_of(reading: asyncio.Future[Any], fact: Any) -> None:
    """Wait for `fact`, or raise what ended `reading` before it."""
    known = asyncio.ensure_future(fact)
    done, _ = await asyncio.wait([reading, known], return_when=asyncio.FIRST_COMPLETED, timeout=30)
    known.cancel()
    if reading in done:
        reading.result()
    assert known in done
