"""A queue that is connected and does not answer: its process is stopped, or its disk hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import penstock
from penstock import connection
from penstock.queue.v1 import queue_pb2 as pb
from tests.support.fake_queue import FakeQueue, serving


class Standing(FakeQueue):
    """Takes every call, and answers none while it stands still."""

    def __init__(self) -> None:
        super().__init__()
        self.going = asyncio.Event()
        self.asked = 0

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name not in {"SubmitUnary", "Get", "Cancel", "Delete", "Identify", "Stats", "ListDead", "RequeueDead"}:
            return method

        async def answer(request: Any, context: Any) -> Any:
            self.asked += 1
            await self.going.wait()
            return await method(request, context)

        return answer

    async def Submit(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        self.asked += 1
        await self.going.wait()
        async for response in super().Submit(request_iterator, context):
            yield response


async def _first_dead(client: penstock.Client) -> object:
    return await anext(client.dead_letters(), None)


ANSWERED_AT_ONCE: dict[str, Callable[[penstock.Client], Awaitable[object]]] = {
    "submit": lambda client: client.submit(prompt="p"),
    "submit of much": lambda client: client.submit(prompt="p" * 2_000_000),
    "get": lambda client: client.get("r-1"),
    "stats": lambda client: client.stats(),
    "identify": lambda client: client.identify(),
    "cancel": lambda client: client.cancel("r-1"),
    "dead letters": _first_dead,
}


@pytest.mark.parametrize("call", ANSWERED_AT_ONCE)
async def test_what_is_answered_at_once_is_not_waited_for_without_end(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "ANSWER_S", 0.2)
    queue = Standing()
    async with serving(queue) as address, penstock.Client(address, retry_for_s=0) as client:
        with pytest.raises(penstock.Unavailable, match=r"has not answered for 0\.2 s"):
            async with asyncio.timeout(20):
                await ANSWERED_AT_ONCE[call](client)
        assert queue.asked == 1, "it is not asked again, as patience is at an end"
        queue.going.set()


class Slow(FakeQueue):
    """Acks one submit of a stream after another."""

    async def Submit(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for response in super().Submit(request_iterator, context):
            for ack in response.acks.acks:
                await asyncio.sleep(0.1)
                yield pb.SubmitResponse(acks=pb.SubmitAcks(acks=[ack]))


async def test_a_submit_waits_behind_others_for_as_long_as_these_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ANSWER_S", 0.5)
    async with serving(Slow()) as address, penstock.Client(address, retry_for_s=0) as client:
        names = await asyncio.gather(*(client.submit(prompt="p") for _ in range(20)))
    assert len(set(names)) == 20, "the last has waited for two seconds, and the queue was never silent for half of one"


async def test_what_may_take_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience that is longer, and calls whose work nobody knows beforehand."""
    monkeypatch.setattr(connection, "ANSWER_S", 0.0)
    queue = Standing()
    queue.going.set()
    async with serving(queue) as address:
        async with penstock.Client(address, retry_for_s=20) as client:
            await client.generate(prompt="p")
        async with penstock.Client(address, retry_for_s=0) as client:
            assert await client.delete("r-0") == 1
            assert (await client.cancel(batch="b")).cancelled == 0
            assert (await client.requeue("r-0")).requeued == 0
