"""A source that takes its time over each request: what it has given is sent meanwhile, and others have their turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

import penstock
from penstock.fields import RequestFields
from tests.support.fake_queue import FakeQueue, serving

SLOW_S = 0.003
"""For one request: a tokenizer, or a row of a database, on the loop."""

MANY = 1000
"""Requests that all fit the window: nothing else makes the submit wait."""


def _until(fact: Callable[[], bool]) -> Iterator[RequestFields]:
    for number in range(MANY):
        if fact():
            return
        time.sleep(SLOW_S)
        yield {"prompt": f"p {number}"}
    pytest.fail("the source was read to its end, and nothing came of it meanwhile")


async def _given(fields: Iterator[RequestFields]) -> AsyncIterator[RequestFields]:
    """Yield on the loop what never waits there."""
    for each in fields:
        yield each


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_what_a_slow_source_has_given_is_durable_while_it_makes_more(asynchronous: bool) -> None:
    queue = FakeQueue()
    async with serving(queue) as address, penstock.Client(address, retry_for_s=20) as client:
        fields = _until(lambda: len(queue.requests) >= 3)
        acks = [ack async for ack in client.submit_many(_given(fields) if asynchronous else fields)]
    assert len(acks) == len(queue.requests) < MANY


async def test_others_have_their_turn_beside_a_slow_source() -> None:
    queue = FakeQueue()
    async with serving(queue) as address, penstock.Client(address, retry_for_s=20) as client:
        beside = asyncio.create_task(client.generate(prompt="beside"))
        acks = [ack async for ack in client.submit_many(_until(beside.done))]
    assert (await beside).text == "BESIDE"
    assert len(acks) == len(queue.requests) - 1
