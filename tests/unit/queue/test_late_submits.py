"""A submit whose deadline has passed is taken: it may repeat one that was stored, and whose ack was lost."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest

from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2
from services.telemetry import Telemetry
from tests.support.serving import Peer, serving, text
from tests.support.waiting import wait_for_async


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    async with serving(Telemetry(None)) as peer:
        yield peer


def late(**fields: object) -> request_pb2.Request:
    return text(deadline_unix_ns=time.time_ns() - 1_000_000_000, idempotency_key="k", **fields)


async def test_it_ends_as_expired(peer: Peer) -> None:
    (name,) = await peer.submit(late())

    async def ended() -> queue_pb2.GetResponse | None:
        found: queue_pb2.GetResponse = await peer.stub.Get(queue_pb2.GetRequest(request_id=name))
        return found if found.state == queue_pb2.REQUEST_STATE_DONE else None

    found = await wait_for_async(ended, "the request to end", 20)
    assert found.result.outcome == request_pb2.OUTCOME_EXPIRED
    assert found.result.error.param == "deadline_unix_ns"


async def test_no_worker_gets_it(peer: Peer) -> None:
    work = await peer.work()
    (name,) = await peer.submit(late())
    await work.send(queue_pb2.WorkerToQueue(claim=queue_pb2.Claim(request_id=name)))
    assert (await work.next("refused")).reason == queue_pb2.REFUSED_REASON_ENDED


async def test_repeated_it_is_the_request_that_was_stored(peer: Peer) -> None:
    (name,) = await peer.submit(text(idempotency_key="k", deadline_unix_ns=time.time_ns() + 3600 * 10**9))
    work = await peer.work()
    await work.complete((await work.claim(name)).lease)
    assert await peer.submit(late()) == [name]
    found = await peer.stub.Get(queue_pb2.GetRequest(request_id=name))
    assert found.result.outcome == request_pb2.OUTCOME_COMPLETED
