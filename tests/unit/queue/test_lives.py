"""A store whose lives had clocks that contradict each other keeps what nobody has read."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.files.v1 import files_pb2 as pb
from penstock.files.v1 import files_pb2_grpc
from penstock.queue.v1 import queue_pb2
from services.queue.core import records
from services.queue.storage import lives
from services.queue.storage.rocksdb_store import RocksdbStore
from services.queue.storage.verify import Verifier
from services.telemetry import Telemetry
from tests.support.memory_store import MemoryStore
from tests.support.serving import Peer, ids, refused, serving, text
from tests.support.waiting import wait_for_async

WEEK_S = 7 * 24 * 3600
DAY_NS = 24 * 3600 * 10**9


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RocksdbStore]:
    store = RocksdbStore(tmp_path / "queue")
    yield store
    store.close()


@asynccontextmanager
async def life(store: Any, behind_ns: int) -> AsyncIterator[Peer]:
    """Yield a queue over `store`, begun by a clock that is behind."""
    wall_ns = time.time_ns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: wall_ns() - behind_ns)
        store.reopen()
        async with serving(Telemetry(None), store) as peer:
            yield peer


async def submit(peer: Peer) -> str:
    """Submit a request under its idempotency key, or find it; return its name."""
    (name,) = await peer.submit(text(idempotency_key="k"))
    return name


@pytest.mark.parametrize(("before_ns", "after_ns"), [(8 * DAY_NS, 0), (0, -8 * DAY_NS)], ids=["behind", "ahead"])
async def test_a_result_and_its_key_outlive_a_clock_that_leaps_between_two_lives(
    store: Any, before_ns: int, after_ns: int
) -> None:
    async with life(store, before_ns) as peer:
        name = await submit(peer)
        await peer.stub.Cancel(queue_pb2.CancelRequest(request_ids=ids(name)))
    for _ in range(2):  # what is found at one start holds at the next
        async with life(store, after_ns) as peer:
            await peer.service.clockwork.sweep(WEEK_S * 10**9)
            assert (await peer.stub.Get(queue_pb2.GetRequest(request_id=name))).state == queue_pb2.REQUEST_STATE_DONE
            assert await submit(peer) == name
    store.reopen()
    assert list(Verifier(store).violations()) == []


async def test_what_a_life_serves_is_counted(store: Any) -> None:
    async with life(store, 8 * DAY_NS) as peer:
        name = await submit(peer)
        await peer.stub.Cancel(queue_pb2.CancelRequest(request_ids=ids(name)))
    async with life(store, 0) as peer:
        await peer.service.clockwork.sweep(0)
        await refused(peer.stub.Get(queue_pb2.GetRequest(request_id=name)), grpc.StatusCode.NOT_FOUND, name)


async def test_what_ends_in_a_life_whose_clock_is_behind_the_one_before_is_swept_too(store: Any) -> None:
    for behind_ns in (0, DAY_NS):
        async with life(store, behind_ns) as peer:
            (name,) = await peer.submit(text())
            await peer.stub.Cancel(queue_pb2.CancelRequest(request_ids=ids(name)))
            await peer.service.clockwork.sweep(0)
            await refused(peer.stub.Get(queue_pb2.GetRequest(request_id=name)), grpc.StatusCode.NOT_FOUND, name)


async def test_files_and_uploads_outlive_it_too(store: Any) -> None:
    async with life(store, 8 * DAY_NS) as peer:
        stub: Any = files_pb2_grpc.FilesServiceStub(peer.channel)
        for name in ("upload", "file", "short"):
            await stub.CreateFile(pb.CreateFileRequest(file_id=name))
        await stub.CloseFile(pb.CloseFileRequest(file_id="file", expires_after_ns=7 * DAY_NS))
        await stub.CloseFile(pb.CloseFileRequest(file_id="short", expires_after_ns=1))
    async with life(store, 0) as peer:
        await peer.service.clockwork.sweep(WEEK_S * 10**9)
        assert [key for key, _ in store.scan(records.FILES, b"", b"", 9)] == [b"file", b"upload"]


async def test_the_clock_is_noted_while_a_life_lasts_and_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()

    def known_ns() -> int:
        row = store.get(records.META, records.CLOCK_KEY)
        return 0 if row is None else records.decode_clock(row)[0]

    async with life(store, 0) as peer:
        assert known_ns() == 0
        monkeypatch.setattr(lives, "NOTE_NS", 0)

        async def noted() -> bool:
            return known_ns() > 0

        await wait_for_async(noted, "the clock to be noted")
        monkeypatch.setattr(lives, "NOTE_NS", DAY_NS)
        last_ns = peer.service._clock.now_ns()
    assert known_ns() > last_ns
