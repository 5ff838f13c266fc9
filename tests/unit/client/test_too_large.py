"""A request beyond the queue's limit is refused on this side, alone and at once, whatever gRPC would do with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

import penstock
from penstock import submitting
from penstock.fields import RequestFields
from penstock.limits import MAX_MESSAGE_BYTES
from tests.support.fake_queue import FakeQueue, serving


@pytest.fixture
async def queue() -> FakeQueue:
    return FakeQueue()


@pytest.fixture
async def client(queue: FakeQueue) -> AsyncIterator[penstock.Client]:
    async with serving(queue) as address, penstock.Client(address, retry_for_s=5) as client:
        yield client


LARGE: RequestFields = {"prompt": "x" * 1000}


@pytest.fixture
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submitting, "MAX_REQUEST_BYTES", 500)


async def test_one_beyond_grpcs_limit_concerns_no_other(client: penstock.Client, queue: FakeQueue) -> None:
    wanted: list[RequestFields] = [{"prompt": f"p {number}"} for number in range(20)]
    wanted.insert(10, {"prompt": "x" * (MAX_MESSAGE_BYTES + 1)})
    async with asyncio.timeout(30):
        acks = [ack async for ack in client.submit_many(wanted)]
    assert sorted(ack.index for ack in acks) == list(range(21))
    (refused,) = [ack for ack in acks if ack.error]
    assert (refused.index, refused.request_id, refused.error and refused.error.param) == (10, "", "request")
    assert len(queue.requests) == 20
    assert len(queue.submit_streams) == 1, "the stream did not break"


@pytest.mark.usefixtures("low_limit")
async def test_it_is_told_while_the_source_waits_for_it(client: penstock.Client) -> None:
    told = asyncio.Event()

    async def source() -> AsyncIterator[RequestFields]:
        for fields in (RequestFields(prompt="a"), LARGE, RequestFields(prompt="b")):
            yield fields
            await told.wait()
            told.clear()

    refused = []
    async with asyncio.timeout(30):
        async for ack in client.submit_many(source()):
            refused.append(ack.error is not None)
            told.set()
    assert refused == [False, True, False]


@pytest.mark.usefixtures("low_limit")
async def test_it_is_told_while_the_queue_is_away() -> None:
    async with penstock.Client("127.0.0.1:1", retry_for_s=60) as client:
        async with asyncio.timeout(30):
            assert [bool(ack.error) async for ack in client.submit_many([LARGE])] == [True]


@pytest.mark.usefixtures("low_limit")
async def test_a_source_of_nothing_else_is_read_only_as_fast_as_it_is_told(client: penstock.Client) -> None:
    given = 0

    def endless() -> Iterator[RequestFields]:
        nonlocal given
        while True:
            given += 1
            assert given < 100
            yield LARGE

    acks = client.submit_many(endless())
    for number in range(10):
        assert (await anext(acks)).index == number
    assert given <= 12
    await acks.aclose()
