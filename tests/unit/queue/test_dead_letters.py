"""Dead letters over gRPC: listed in pages, revived one by one and all at once."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2
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
