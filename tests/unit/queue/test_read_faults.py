"""Reads of the store that fail: one code, a count, and nobody else's matter."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any
from unittest.mock import patch

import grpc
import pytest

from penstock.files.v1 import files_pb2
from penstock.files.v1.files_pb2_grpc import FilesServiceStub
from penstock.queue.v1 import queue_pb2
from services.queue.core.effects import Write
from services.queue.core.records import COMPLETIONS, PAYLOADS, RECORDS, RESULTS, seq_key
from services.queue.files.rows import record_key
from services.queue.storage.store import StoreDamagedError, StoreError
from services.telemetry import Telemetry
from tests.support.serving import Peer, ids, refused, serving, text


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    async with serving(Telemetry(None)) as peer:
        yield peer


async def all_events(call: Any) -> None:
    """Read a Watch stream to its end."""
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StoreDamagedError("Corruption: block checksum mismatch"), grpc.StatusCode.DATA_LOSS),
        (StoreError("Input/output error"), grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_a_read_that_fails_has_one_code_everywhere_and_is_counted(
    peer: Peer, error: StoreError, code: grpc.StatusCode
) -> None:
    (name,) = await peer.submit(text(batch="b", idempotency_key="k"))
    await peer.stub.Cancel(queue_pb2.CancelRequest(request_ids=ids(name)))
    store, stub = peer.service._store, peer.stub
    key = queue_pb2.IdempotencyKey(key="k")
    with (
        patch.object(store, "get", side_effect=error),
        patch.object(store, "get_many", side_effect=error),
        patch.object(store, "scan", side_effect=error),
    ):
        calls = [
            stub.Get(queue_pb2.GetRequest(request_id=name)),
            stub.Get(queue_pb2.GetRequest(idempotency_key=key)),
            stub.GetMany(queue_pb2.GetManyRequest(keys=["k"])),
            stub.Delete(queue_pb2.DeleteRequest(request_ids=ids(name))),
            stub.Delete(queue_pb2.DeleteRequest(batch="b")),
            stub.ListDead(queue_pb2.ListDeadRequest()),
            all_events(stub.Watch(queue_pb2.WatchRequest(batch="b"))),
            all_events(stub.Watch(queue_pb2.WatchRequest(request_ids=ids(name)))),
        ]
        for call in calls:
            await refused(call, code, str(error))
    failures = peer.registry.get_sample_value("penstock_queue_store_failures_total")
    assert failures is not None
    assert failures >= len(calls)
    assert (await stub.Get(queue_pb2.GetRequest(request_id=name))).request_id == name, "the service goes on"


async def test_a_read_that_fails_does_not_refuse_what_others_read_at_the_same_time(peer: Peer) -> None:
    bad, good = await peer.submit(text(), text())
    await peer.stub.Cancel(queue_pb2.CancelRequest(request_ids=ids(bad, good)))
    store = peer.service._store
    get_many = store.get_many

    def get_some(family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        if seq_key(1) in keys:
            raise StoreDamagedError("Corruption")
        return get_many(family, keys)

    with patch.object(store, "get_many", get_some):
        first = peer.stub.Delete(queue_pb2.DeleteRequest(request_ids=ids(bad)))
        second = peer.stub.Delete(queue_pb2.DeleteRequest(request_ids=ids(good)))
        await refused(first, grpc.StatusCode.DATA_LOSS, "Corruption")
        assert (await second).deleted == 1


async def test_a_result_that_cannot_be_decoded_is_damaged(peer: Peer) -> None:
    bad, good = await peer.submit(text(batch="b"), text())
    await peer.stub.Cancel(queue_pb2.CancelRequest(request_ids=ids(bad, good)))
    peer.service._store.write([Write(RESULTS, seq_key(1), b"no result at all")])
    for call in (
        peer.stub.Get(queue_pb2.GetRequest(request_id=bad)),
        peer.stub.Delete(queue_pb2.DeleteRequest(request_ids=ids(bad))),
        all_events(peer.stub.Watch(queue_pb2.WatchRequest(batch="b"))),
        all_events(peer.stub.Watch(queue_pb2.WatchRequest(request_ids=ids(bad)))),
    ):
        await refused(call, grpc.StatusCode.DATA_LOSS, "row")
    failures = peer.registry.get_sample_value("penstock_queue_store_failures_total")
    assert failures == 4
    assert (await peer.stub.Delete(queue_pb2.DeleteRequest(request_ids=ids(good)))).deleted == 1


async def test_a_name_longer_than_any_is_unknown_and_harms_nobody(peer: Peer) -> None:
    (name,) = await peer.submit(text())
    store_id = (await peer.stub.Stats(queue_pb2.StatsRequest())).store_id
    long = f"{store_id}-{2**64:x}"
    assert (await peer.stub.Delete(queue_pb2.DeleteRequest(request_ids=ids(long)))).deleted == 0
    assert (await peer.stub.Cancel(queue_pb2.CancelRequest(request_ids=ids(long)))).cancelled == 0
    await refused(peer.stub.Get(queue_pb2.GetRequest(request_id=long)), grpc.StatusCode.NOT_FOUND, long)
    watch = peer.stub.Watch(queue_pb2.WatchRequest(request_ids=ids(long)))
    await refused(all_events(watch), grpc.StatusCode.NOT_FOUND, long)
    follow = peer.stub.Follow()
    await follow.write(queue_pb2.FollowRequest(follow=[queue_pb2.FollowedRequest(request_id=long)]))
    while not (frame := await follow.read()).unknown:
        assert frame is not grpc.aio.EOF
    assert list(frame.unknown) == [long]
    assert (await peer.stub.Get(queue_pb2.GetRequest(request_id=name))).request_id == name, "the service goes on"


async def test_a_look_into_the_store_that_fails_unforeseen_ends_its_call_alone(peer: Peer) -> None:
    (name,) = await peer.submit(text())
    await peer.stub.Cancel(queue_pb2.CancelRequest(request_ids=ids(name)))
    delete = queue_pb2.DeleteRequest(request_ids=ids(name))
    store = peer.service._store
    get_many = store.get_many

    def get_some(family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        if family == COMPLETIONS:
            raise RuntimeError("out of step")
        return get_many(family, keys)

    with patch.object(store, "get_many", get_some):
        await refused(peer.stub.Delete(delete), grpc.StatusCode.INTERNAL, "out of step")
    assert (await peer.stub.Delete(delete)).deleted == 1


async def test_a_damaged_payload_is_the_matter_of_its_request_alone(peer: Peer) -> None:
    bad, good = await peer.submit(text(), text())
    work = await peer.work()
    store = peer.service._store
    get, get_many = store.get, store.get_many

    def get_one(family: str, key: bytes) -> bytes | None:
        (row,) = get_some(family, [key])
        return row

    def get_some(family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        if family == PAYLOADS and seq_key(1) in keys:
            raise StoreDamagedError("Corruption")
        return get_many(family, keys)

    with patch.object(store, "get", get_one), patch.object(store, "get_many", get_some):
        await work.send(
            queue_pb2.WorkerToQueue(claim=queue_pb2.Claim(request_id=bad)),
            queue_pb2.WorkerToQueue(claim=queue_pb2.Claim(request_id=good)),
        )
        refusal = await work.next("refused")
        assert (refusal.request_id, refusal.reason) == (bad, queue_pb2.REFUSED_REASON_UNKNOWN)
        assert (await work.next("deliver")).lease.request_id == good
    assert not peer.service.committer.health.broken
    assert get(PAYLOADS, seq_key(1)) is not None
    assert peer.registry.get_sample_value("penstock_queue_store_failures_total") == 1


async def test_a_record_whose_row_is_none_is_listed_by_its_name(peer: Peer) -> None:
    files, store = FilesServiceStub(peer.channel), peer.service._store
    puts = [files_pb2.PutRecord(record=files_pb2.Record(kind="batch", record_id=name)) for name in ("a", "z")]
    await files.PutRecords(files_pb2.PutRecordsRequest(puts=puts))
    store.write([Write(RECORDS, record_key("batch", "m"), b"\xff")])
    request = files_pb2.ListRecordsRequest(kind="batch", ascending=True)
    page = await files.ListRecords(request)
    assert [(one.record_id, one.revision) for one in page.records] == [("a", 1), ("m", 0), ("z", 1)]
    with pytest.raises(StoreDamagedError):  # whose it is cannot be known
        await peer.service._shelf.records(request, 100, sees="default")
