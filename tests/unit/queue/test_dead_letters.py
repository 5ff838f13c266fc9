"""Dead letters over gRPC: listed in pages, revived one by one and all at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import patch

import grpc
import pytest

from penstock import Client
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2
from services.queue.storage.reader import PAGE_BYTES
from services.telemetry import Telemetry
from tests.support.modules import COMPILED
from tests.support.serving import Peer, ids, serving, text


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    async with serving(Telemetry(None)) as peer:
        yield peer


async def test_dead_letters_are_listed_in_pages_and_requeued(peer: Peer) -> None:
    names = await peer.submit(*(text(batch="b") for _ in range(3)))
    work = await peer.work()
    error = request_pb2.RequestError(code="oom", message="out of memory")
    for name in names:
        for _ in range(2):
            await work.complete((await work.claim(name)).lease, failure=error)
    page = await peer.stub.ListDead(queue_pb2.ListDeadRequest(page_size=2))
    assert [letter.request_id for letter in page.letters] == names[:2]
    assert (page.letters[0].last_error, page.letters[0].attempts) == ("out of memory", 2)
    rest = await peer.stub.ListDead(queue_pb2.ListDeadRequest(page_size=2, page_token=page.next_page_token))
    assert [letter.request_id for letter in rest.letters] == names[2:]
    assert not rest.next_page_token
    found = await peer.stub.Get(queue_pb2.GetRequest(request_id=names[0]))
    assert found.state == queue_pb2.REQUEST_STATE_DEAD
    assert found.result.outcome == request_pb2.OUTCOME_DEAD
    done = await peer.stub.RequeueDead(queue_pb2.RequeueDeadRequest(request_ids=ids(names[0], "nobody")))
    assert (done.requeued, list(done.not_dead)) == (1, ["nobody"])
    assert (await peer.stub.RequeueDead(queue_pb2.RequeueDeadRequest(all=True))).requeued == 2
    assert (await work.claim(names[0])).lease.attempt == 3  # none has the number of one before


async def test_a_page_of_dead_letters_ends_after_a_page_of_what_was_said_of_them(peer: Peer) -> None:
    names = await peer.submit(*(text() for _ in range(5)))
    work = await peer.work()
    error = request_pb2.RequestError(code="engine_error", message="x" * (PAGE_BYTES * 2 // 3))
    for name in names:
        for _ in range(2):
            await work.complete((await work.claim(name)).lease, failure=error)
    pages: list[list[str]] = []
    token = ""
    while not pages or token:
        page = await peer.stub.ListDead(queue_pb2.ListDeadRequest(page_token=token))
        pages.append([letter.request_id for letter in page.letters])
        token = page.next_page_token
    assert pages == [names[:2], names[2:4], names[4:]]


async def test_a_requeue_that_is_said_again_leaves_what_has_died_again_since_the_first(peer: Peer) -> None:
    names = await peer.submit(text(), text())
    work = await peer.work()

    async def die(name: str) -> None:
        for _ in range(2):
            await work.complete((await work.claim(name)).lease, failure=request_pb2.RequestError(code="oom"))

    await die(names[0])
    up_to = (await peer.stub.Stats(queue_pb2.StatsRequest())).cursor
    await die(names[1])
    all_of_then = queue_pb2.RequeueDeadRequest(all=True, up_to=up_to)
    assert (await peer.stub.RequeueDead(all_of_then)).requeued == 1
    await die(names[0])
    assert (await peer.stub.RequeueDead(all_of_then)).requeued == 0
    by_name = queue_pb2.RequeueDeadRequest(request_ids=ids(*names), up_to=up_to)
    assert list((await peer.stub.RequeueDead(by_name)).not_dead) == names
    assert (await peer.stub.RequeueDead(queue_pb2.RequeueDeadRequest(all=True))).requeued == 2


async def test_a_client_whose_answer_was_lost_requeues_nothing_that_has_died_again(peer: Peer) -> None:
    (name,) = await peer.submit(text())
    work = await peer.work()

    async def die() -> None:
        for _ in range(2):
            await work.complete((await work.claim(name)).lease, failure=request_pb2.RequestError(code="oom"))

    await die()
    requeue_dead, lost = peer.service._admin.requeue_dead, list[int]()

    async def requeue_and_lose_the_answer(
        request: queue_pb2.RequeueDeadRequest, context: Any
    ) -> queue_pb2.RequeueDeadResponse:
        done = await requeue_dead(request, context)
        if not lost:
            lost.append(done.requeued)
            await die()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
        return done

    with patch.object(peer.service._admin, "requeue_dead", requeue_and_lose_the_answer):
        async with Client(f"127.0.0.1:{peer.port}") as client:
            assert (await client.requeue(all_dead=True)).requeued == 0
            assert lost == [1]
            assert (await client.requeue(all_dead=True)).requeued == 1


@pytest.mark.skipif(COMPILED, reason="compiled code has its constants built in")
async def test_many_dead_letters_are_revived_a_page_in_a_commit(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.queue.core.machine.ENDED_AT_ONCE", 2)
    monkeypatch.setattr("services.queue.admin.ENDED_AT_ONCE", 2)
    names = await peer.submit(*(text(batch="b") for _ in range(5)))
    work = await peer.work()

    async def fail_all() -> None:
        for name in names:
            for _ in range(2):
                lease = (await work.claim(name)).lease
                await work.complete(lease, failure=request_pb2.RequestError(code="oom", message="out of memory"))

    await fail_all()
    done = await peer.stub.RequeueDead(queue_pb2.RequeueDeadRequest(all=True))
    assert (done.requeued, list(done.not_dead)) == (5, [])
    await fail_all()
    done = await peer.stub.RequeueDead(queue_pb2.RequeueDeadRequest(request_ids=ids(*names, "nobody")))
    assert (done.requeued, list(done.not_dead)) == (5, ["nobody"])
