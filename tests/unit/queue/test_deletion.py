"""Results that are deleted, by name, by batch and by age."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any
from unittest.mock import AsyncMock, patch

import grpc
import pytest

from penstock import Client
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2
from services.queue.admin import delete_item
from services.queue.committer import RefusedError
from services.queue.core.effects import Write
from services.queue.core.entry import DEFAULT_TENANT, request_id_of
from services.queue.core.messages import Cancel, Delete, RequeueDead
from services.queue.core.records import EXPIRY, RESULTS, expiry_key, seq_key
from services.queue.storage.reader import LOOK_RESULTS, PAGE_BYTES, Reader
from services.queue.storage.store import Store, StoreDamagedError
from services.telemetry import Telemetry
from tests.support.modules import COMPILED
from tests.support.queueing import STORE_ID, Queue, dead_letter, meta, working
from tests.support.serving import COMPLETED, Peer, ids, refused, serving, text
from tests.support.waiting import wait_for_async


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
    assert max(read) <= LOOK_RESULTS


class Held:
    """Reads of results that wait until they may go on, and what they were."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._begun = threading.Semaphore(0)
        self._may_go_on = threading.Semaphore(0)
        self.threads: list[str] = []

    def get_many(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the rows, of results once that is allowed."""
        if family == RESULTS:
            self.threads.append(threading.current_thread().name)
            self._begun.release()
            assert self._may_go_on.acquire(timeout=30)
        return type(self._store).get_many(self._store, family, keys)

    async def begun(self) -> None:
        """Return when a read has begun that was not waited for before."""
        assert await asyncio.to_thread(self._begun.acquire, timeout=30)

    def go_on(self, reads: int = 1) -> None:
        """Let reads go on."""
        self._may_go_on.release(reads)


def by_name(peer: Peer, names: Sequence[str]) -> Awaitable[int]:
    return deleted(peer.stub.Delete(queue_pb2.DeleteRequest(request_ids=ids(*names))))


def by_batch(peer: Peer, _names: Sequence[str]) -> Awaitable[int]:
    return deleted(peer.stub.Delete(queue_pb2.DeleteRequest(batch="b")))


def by_age(peer: Peer, _names: Sequence[str]) -> Awaitable[int]:
    return peer.service._admin.sweep(0)


async def deleted(call: Any) -> int:
    return int((await call).deleted)


@pytest.mark.parametrize("delete", [by_name, by_batch, by_age])
async def test_while_large_results_are_read_for_their_deletion_others_commit(
    peer: Peer, delete: Callable[[Peer, Sequence[str]], Awaitable[int]]
) -> None:
    names = await peer.submit(*(text(batch="b") for _ in range(3)))
    work = await peer.work()
    choices = [request_pb2.Choice(text="x" * PAGE_BYTES)]
    for name in names:
        lease = (await work.claim(name)).lease
        await work.complete(lease, result=request_pb2.Result(outcome=COMPLETED, choices=choices))
    held = Held(peer.service._store)
    with patch.object(peer.service._store, "get_many", held.get_many):
        deleting = asyncio.ensure_future(delete(peer, names))
        for _ in names:
            await held.begun()
            await asyncio.wait_for(peer.submit(text()), 30)
            held.go_on()
        assert await deleting == 3
    assert len(held.threads) == 3, "each alone: they are large"
    assert {thread.partition("_")[0] for thread in held.threads} == {"read"}


async def test_what_ends_while_its_batch_is_deleted_stays(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.queue.admin.DELETE_PAGE", 2)
    await peer.submit(*(text(batch="b") for _ in range(4)))
    await peer.stub.Cancel(queue_pb2.CancelRequest(batch="b"))
    held = Held(peer.service._store)
    with patch.object(peer.service._store, "get_many", held.get_many):
        deleting = asyncio.ensure_future(by_batch(peer, ()))
        await held.begun()
        names = await peer.submit(*(text(batch="b", idempotency_key=key) for key in "klm"))
        await peer.stub.Cancel(queue_pb2.CancelRequest(batch="b"))
        held.go_on(100)
        assert await deleting == 4
    assert len(held.threads) == 4, "what ended later is not even read: the call ends, however much that is"
    watched = peer.stub.Watch(queue_pb2.WatchRequest(batch="b"))
    left = [event.result.result.request_id async for frame in watched for event in frame.events]
    assert [name for name in left if name] == names
    assert await peer.submit(text(batch="b", idempotency_key="m")) == names[2:], "its key is known"
    assert await by_batch(peer, ()) == 3


async def test_a_delete_that_is_said_again_leaves_what_ended_since_the_first(peer: Peer) -> None:
    first = await peer.submit(text(batch="b"), text(batch="b"))
    await peer.stub.Cancel(queue_pb2.CancelRequest(batch="b"))
    up_to = (await peer.stub.Stats(queue_pb2.StatsRequest())).cursor
    later = await peer.submit(text(batch="b"))
    await peer.stub.Cancel(queue_pb2.CancelRequest(batch="b"))
    for deleted, request in (
        (2, queue_pb2.DeleteRequest(batch="b", up_to=up_to)),
        (0, queue_pb2.DeleteRequest(batch="b", up_to=up_to)),
        (0, queue_pb2.DeleteRequest(request_ids=ids(*first, *later), up_to=up_to)),
        (0, queue_pb2.DeleteRequest(batch="b", up_to=0)),
        (1, queue_pb2.DeleteRequest(batch="b", up_to=(1 << 64) - 1)),
    ):
        assert (await peer.stub.Delete(request)).deleted == deleted


async def test_a_client_whose_answer_was_lost_deletes_nothing_that_ended_meanwhile(peer: Peer) -> None:
    await peer.submit(text(batch="b"))
    await peer.stub.Cancel(queue_pb2.CancelRequest(batch="b"))
    delete, later = peer.service._admin.delete, list[str]()

    async def delete_and_lose_the_answer(request: queue_pb2.DeleteRequest, context: Any) -> queue_pb2.DeleteResponse:
        done = await delete(request, context)
        if not later:
            later.extend(await peer.submit(text(batch="b")))
            await peer.stub.Cancel(queue_pb2.CancelRequest(batch="b"))
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
        return done

    with patch.object(peer.service._admin, "delete", delete_and_lose_the_answer):
        async with Client(f"127.0.0.1:{peer.port}") as client:
            assert await client.delete(batch="b") == 0
            assert (await client.result(later[0])).request_id == later[0]


async def test_a_dead_letter_that_ends_anew_while_its_batch_is_deleted_stays(peer: Peer) -> None:
    (name,) = await peer.submit(text(batch="b"))
    work = await peer.work()
    for _ in range(2):
        failure = request_pb2.RequestError(code="oom", message="out of memory")
        await work.complete((await work.claim(name)).lease, failure=failure)
    held = Held(peer.service._store)
    with patch.object(peer.service._store, "get_many", held.get_many):
        deleting = asyncio.ensure_future(by_batch(peer, ()))
        await held.begun()
        assert (await peer.stub.RequeueDead(queue_pb2.RequeueDeadRequest(all=True))).requeued == 1
        await work.complete((await work.claim(name)).lease)
        held.go_on(100)
        assert await deleting == 0
    assert (await peer.stub.Get(queue_pb2.GetRequest(request_id=name))).result.outcome == COMPLETED


def test_a_delete_is_of_what_was_read_for_it_and_of_nothing_that_took_its_place() -> None:
    queue = working(Queue())
    name, read = dead_letter(queue)
    assert delete_item(1, [read]).read(queue.store) == Delete(1, (read,))
    queue.step(RequeueDead(1, (name,)))
    assert delete_item(1, [read]).read(queue.store) == Delete(1, ())
    queue.step(Cancel(2, (name,)))
    assert delete_item(1, [read]).read(queue.store) == Delete(1, ()), "it has ended anew"


async def test_damage_between_results_hides_none_of_the_others() -> None:
    queue = working(Queue())
    queue.submit(*(meta(batch="b") for _ in range(40)))
    queue.step(Cancel(1, None, (DEFAULT_TENANT, "b")))
    store, damaged = queue.store, {seq_key(seq) for seq in (1, 20, 21, 40)}

    def get_many(family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        if damaged & set(keys):
            raise StoreDamagedError("Corruption: block checksum mismatch")
        return type(store).get_many(store, family, keys)

    reader = Reader(store, STORE_ID)
    with patch.object(store, "get_many", get_many):
        heads = await reader.heads(range(1, 41))
    reader.close()
    assert [head.seq for head in heads.rows] == [seq for seq in range(1, 41) if seq_key(seq) not in damaged]
    assert heads.damaged == 4


async def test_an_expired_result_is_swept(peer: Peer) -> None:
    (name,) = await peer.submit(text())
    work = await peer.work()
    await work.complete((await work.claim(name)).lease)
    assert await peer.service._admin.sweep(3600 * 10**9) == 0
    assert await peer.service._admin.sweep(0) == 1
    await refused(peer.stub.Get(queue_pb2.GetRequest(request_id=name)), grpc.StatusCode.NOT_FOUND, name)


async def test_a_sweep_leaves_a_result_that_is_younger_than_the_one_it_found(peer: Peer) -> None:
    (name,) = await peer.submit(text())
    await peer.stub.Cancel(queue_pb2.CancelRequest(request_ids=ids(name)))
    # As if a dead letter had been requeued, and had ended again, since the sweep found its old result.
    with patch.object(peer.service._reader, "older_than", AsyncMock(side_effect=[([1], b""), ([], b"")])):
        assert await peer.service._admin.sweep(3600 * 10**9) == 0
    assert (await peer.stub.Get(queue_pb2.GetRequest(request_id=name))).state == queue_pb2.REQUEST_STATE_DONE


async def test_all_that_is_old_is_swept_in_one_round(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.queue.admin.DELETE_PAGE", 10)
    await peer.submit(*(text(batch="b") for _ in range(45)))
    await peer.stub.Cancel(queue_pb2.CancelRequest(batch="b"))
    await peer.service.clockwork.sweep(0)
    assert (await peer.stub.Stats(queue_pb2.StatsRequest())).results == 0
    assert peer.registry.get_sample_value("penstock_queue_expired_results_total") == 45


@pytest.mark.skipif(COMPILED, reason="nothing patches a compiled method")
async def test_many_are_deleted_by_name_a_page_in_a_commit(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.queue.admin.DELETE_PAGE", 10)
    names = await peer.submit(*(text(batch="b") for _ in range(25)))
    await peer.stub.Cancel(queue_pb2.CancelRequest(batch="b"))
    with patch.object(peer.service.committer, "ask", wraps=peer.service.committer.ask) as ask:
        done = await peer.stub.Delete(queue_pb2.DeleteRequest(request_ids=ids(*names, names[0])))
    assert (done.deleted, ask.call_count) == (25, 3)


async def test_a_damaged_result_stays_and_keeps_no_other(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.queue.admin.DELETE_PAGE", 2)
    names = await peer.submit(*(text(batch="b") for _ in range(6)))
    await peer.stub.Cancel(queue_pb2.CancelRequest(batch="b"))
    for seq in (1, 2):
        peer.service._store.write([Write(RESULTS, seq_key(seq), b"\x01")])
    assert await peer.service._admin.sweep(0) == 4
    await refused(peer.stub.Get(queue_pb2.GetRequest(request_id=names[0])), grpc.StatusCode.DATA_LOSS, "")
    await refused(peer.stub.Get(queue_pb2.GetRequest(request_id=names[5])), grpc.StatusCode.NOT_FOUND, names[5])


@pytest.mark.parametrize("by", [by_name, by_batch])
async def test_a_delete_goes_on_past_what_is_damaged_and_says_how_much_stays(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, by: Callable[[Peer, Sequence[str]], Awaitable[int]]
) -> None:
    monkeypatch.setattr("services.queue.admin.DELETE_PAGE", 2)
    names = await peer.submit(*(text(batch="b") for _ in range(7)))
    await peer.stub.Cancel(queue_pb2.CancelRequest(batch="b"))
    for seq in (1, 4):
        peer.service._store.write([Write(RESULTS, seq_key(seq), b"\x01")])
    for deleted in (5, 0):
        told = f"a result row of 1 bytes; so stay 2 of the results, {deleted} were deleted"
        await refused(by(peer, names), grpc.StatusCode.DATA_LOSS, told)
        assert (await peer.stub.Stats(queue_pb2.StatsRequest())).results == 2
    assert peer.registry.get_sample_value("penstock_queue_store_failures_total") == 4


async def test_a_sweep_that_finds_rows_it_cannot_delete_ends(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.queue.admin.DELETE_PAGE", 2)
    peer.service._store.write([Write(EXPIRY, expiry_key(1, seq), b"") for seq in (7, 8, 9)])
    assert await peer.service._admin.sweep(0) == 0


def swept_from(store: Store) -> list[bytes]:
    """Note in a list, which is returned, where sweeps begin to read the results by age."""
    starts: list[bytes] = []

    def scan(family: str, start: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        if family == EXPIRY:
            starts.append(start)
        return type(store).scan(store, family, start, end, limit)

    store.scan = scan  # type: ignore[method-assign]
    return starts


async def test_a_sweep_walks_over_nothing_that_was_deleted_by_one_before(peer: Peer) -> None:
    starts = swept_from(peer.service._store)
    last_key = b""
    for deleted in (3, 1, 0):
        names = [name for _ in range(deleted) for name in await peer.submit(text())]
        if names:
            await peer.stub.Cancel(queue_pb2.CancelRequest(request_ids=ids(*names)))
        rows = peer.service._store.scan(EXPIRY, b"", b"", 9)
        starts.clear()
        assert await peer.service._admin.sweep(0) == deleted
        assert min(starts) > last_key if last_key else min(starts) == b""
        last_key = rows[-1][0] if rows else last_key


@pytest.mark.skipif(COMPILED, reason="nothing patches a compiled method")
async def test_a_page_that_could_not_be_deleted_is_where_the_next_sweep_begins(peer: Peer) -> None:
    names = await peer.submit(text(), text())
    await peer.stub.Cancel(queue_pb2.CancelRequest(request_ids=ids(*names)))
    with (
        patch.object(peer.service.committer, "ask", side_effect=RefusedError("no", disk_full=False)),
        pytest.raises(RefusedError),
    ):
        await peer.service._admin.sweep(0)
    assert await peer.service._admin.sweep(0) == 2


async def test_deadlines_are_met_while_a_sweep_takes_long(peer: Peer) -> None:
    sweeping, go_on = asyncio.Event(), asyncio.Event()

    async def long(_ttl_ns: int) -> int:
        sweeping.set()
        await go_on.wait()
        return 0

    async def ended() -> bool:
        return bool((await peer.stub.Get(get)).state == queue_pb2.REQUEST_STATE_DONE)

    with patch.object(peer.service._admin, "sweep", long):
        await sweeping.wait()
        (name,) = await peer.submit(text(deadline_unix_ns=time.time_ns() + 100_000_000))
        get = queue_pb2.GetRequest(request_id=name)
        await wait_for_async(ended, "the deadline to be noticed", 20)
        go_on.set()
