"""Results that are deleted, by name, by batch and by age."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from unittest.mock import patch

import grpc
import pytest

from penstock.queue.v1 import queue_pb2
from services.queue.admin import RESULTS_AT_ONCE
from services.queue.core.entry import request_id_of
from services.queue.core.records import RESULTS
from services.telemetry import Telemetry
from tests.support.serving import Peer, ids, refused, serving, text


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    async with serving(Telemetry(None)) as peer:
        yield peer


async def test_what_is_to_be_deleted_is_read_a_few_results_at_a_time(peer: Peer) -> None:
    names = await peer.submit(*(text(batch="b") for _ in range(100)))
    await peer.stub.Cancel(queue_pb2.CancelRequest(batch="b"))
    read: list[int] = []
    store = peer.service._store
    get_many = store.get_many

    def counted(family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        if family == RESULTS:
            read.append(len(keys))
        return get_many(family, keys)

    unknown = request_id_of((await peer.stub.Stats(queue_pb2.StatsRequest())).store_id, 1 << 40)
    with patch.object(store, "get_many", counted):
        delete = queue_pb2.DeleteRequest(request_ids=ids(unknown, *names[:50]))
        assert (await peer.stub.Delete(delete)).deleted == 50
        assert (await peer.stub.Delete(queue_pb2.DeleteRequest(batch="b"))).deleted == 50
    assert sum(read) == 101
    assert max(read) <= RESULTS_AT_ONCE


async def test_an_expired_result_is_swept(peer: Peer) -> None:
    (name,) = await peer.submit(text())
    work = await peer.work()
    await work.complete((await work.claim(name)).lease)
    assert await peer.service._admin.sweep(3600 * 10**9) == 0
    assert await peer.service._admin.sweep(0) == 1
    await refused(peer.stub.Get(queue_pb2.GetRequest(request_id=name)), grpc.StatusCode.NOT_FOUND, name)
