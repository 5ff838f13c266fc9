"""What is found in the store is told only once it is durable: rows show before their sync, which may fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from penstock.files.v1 import files_pb2 as pb
from services.clock import SystemClock
from services.queue.committer import Committer, RefusedError
from services.queue.core import records
from services.queue.core.effects import Write
from services.queue.core.machine import Machine
from services.queue.core.messages import Inspect, NewRequest, Tick
from services.queue.files import changes
from services.queue.files.changes import UnknownError
from services.queue.files.rows import file_key
from services.queue.files.shelf import Shelf, ShelfRefusedError
from services.queue.storage.reader import Reader
from services.queue.storage.recovery import recover
from services.queue.storage.store import StoreError
from services.queue.submits.intake import submit_item
from tests.support.committing import WATERMARK_BYTES, Ear, HandClock
from tests.support.memory_store import MemoryStore
from tests.support.queueing import RULES, STORE_ID, meta

FILE = pb.File(file_id="file-1", bytes=3)
WAIT_S = 60


class DoubtfulStore(MemoryStore):
    """A store in which rows show before they are durable; a sync that fails leaves it in doubt, and loses its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.waited, self.may_return = threading.Event(), threading.Event()
        self.may_return.set()
        self.calls: list[str] = []
        self.syncs_fail = False
        self._doubt = ""
        self._durable: tuple[dict[str, dict[bytes, bytes]], dict[str, list[bytes]]] | None = None

    def write(self, writes: Sequence[Write]) -> None:
        """Apply the writes; they are durable unless syncs fail."""
        if self._doubt:
            raise StoreError(self._doubt)
        if self.syncs_fail:
            rows = {family: dict(rows) for family, rows in self._rows.items()}
            self._durable = (rows, {family: list(keys) for family, keys in self._keys.items()})
            self._doubt = "Input/output error"
        super().write(writes)
        if self._doubt:
            raise StoreError(self._doubt)

    def get(self, family: str, key: bytes) -> bytes | None:
        """Note the look."""
        self.calls.append("get")
        return super().get(family, key)

    def doubt(self) -> str:
        """Return what failed."""
        return self._doubt

    def write_failure(self) -> str:
        """Return what failed."""
        return self._doubt

    def wait_durable(self) -> None:
        """Wait for the test."""
        self.calls.append("wait_durable")
        self.waited.set()
        assert self.may_return.wait(WAIT_S)
        if self._doubt:
            raise StoreError(self._doubt)

    def reopen(self) -> None:
        """Find what is durable."""
        if self._durable is not None:
            self._rows, self._keys = self._durable
        self._doubt, self._durable = "", None


@pytest.fixture
def store() -> DoubtfulStore:
    store = DoubtfulStore()
    row = records.encode_result(records.ResultHead(1, 1, "t", "", "b"), b"")
    store.write([Write(records.RESULTS, records.seq_key(7), row)])
    store.write([Write(records.FILES, file_key("file-1"), FILE.SerializeToString())])
    return store


@asynccontextmanager
async def committing_to(store: DoubtfulStore, clock: HandClock) -> AsyncIterator[Committer]:
    """Yield a committer that runs on `store`."""
    build = lambda: Machine(STORE_ID, RULES, recover(store), clock.now_ns())  # noqa: E731
    committer = Committer(store, build, clock, Ear(), WATERMARK_BYTES)
    running = asyncio.create_task(committer.run())
    yield committer
    committer.stop()
    await running


@asynccontextmanager
async def shelving(store: DoubtfulStore) -> AsyncIterator[Shelf]:
    """Yield a shelf that runs on `store`."""
    shelf = Shelf(store, SystemClock(), lambda _: None)
    running = asyncio.create_task(shelf.run())
    yield shelf
    shelf.stop()
    await running


async def result_of(store: DoubtfulStore) -> bool:
    reader = Reader(store, STORE_ID)
    try:
        return await reader.result(7) is not None
    finally:
        await asyncio.to_thread(reader.close)


async def file_of(store: DoubtfulStore) -> bool:
    file = await Shelf(store, SystemClock(), lambda _: None).file("file-1")
    return file is not None and file.file_id == FILE.file_id


async def no_content_of(store: DoubtfulStore) -> bool:
    with pytest.raises(UnknownError):
        await Shelf(store, SystemClock(), lambda _: None).content("file-2", 0)
    return True


READS = [result_of, file_of, no_content_of]


@pytest.mark.parametrize("read", READS)
async def test_what_is_found_is_told_once_it_is_durable(
    store: DoubtfulStore, read: Callable[[DoubtfulStore], Awaitable[bool]]
) -> None:
    store.may_return.clear()
    reading = asyncio.ensure_future(read(store))
    assert await asyncio.to_thread(store.waited.wait, WAIT_S)
    done, _ = await asyncio.wait([reading], timeout=0.05)
    assert not done
    store.may_return.set()
    assert await reading
    assert "get" in store.calls
    assert store.calls[-1] == "wait_durable", "what is read after it may not be durable"


@pytest.mark.parametrize("read", READS)
async def test_what_is_found_in_doubt_is_not_told(
    store: DoubtfulStore, read: Callable[[DoubtfulStore], Awaitable[bool]]
) -> None:
    store.syncs_fail = True
    with pytest.raises(StoreError):
        store.write([])
    with pytest.raises(StoreError, match="Input/output error"):
        await read(store)


async def test_a_change_that_was_not_synced_is_not_found_made_when_it_is_asked_for_again(store: DoubtfulStore) -> None:
    async with shelving(store) as shelf:
        store.syncs_fail = True
        for _ in range(2):
            with pytest.raises(ShelfRefusedError, match="Input/output error"):
                await shelf.change(lambda draft: changes.create(draft, pb.CreateFileRequest(file_id="file-2")))


async def test_the_failed_sync_of_the_shelf_is_repaired_though_nobody_submits(store: DoubtfulStore) -> None:
    async with committing_to(store, HandClock()) as committer, shelving(store) as shelf:
        store.syncs_fail = True
        with pytest.raises(ShelfRefusedError):
            await shelf.change(lambda draft: changes.create(draft, pb.CreateFileRequest(file_id="file-2")))
        store.syncs_fail = False
        committer.post(Tick())
        await committer.ask(lambda ticket: Inspect(ticket, ()))
        assert not store.doubt()
        assert not committer.health.broken
        assert await shelf.file("file-2") is None
        assert await shelf.file("file-1") is not None


async def test_a_machine_is_not_built_of_what_is_in_doubt(store: DoubtfulStore) -> None:
    request = (NewRequest(meta(), b"p"),)
    async with committing_to(store, clock := HandClock()) as committer:
        await committer.submit(("t", 1), 1, lambda ticket: submit_item(ticket, request))
        store.syncs_fail = True
        with pytest.raises(RefusedError):
            await committer.submit(("t", 1), 1, lambda ticket: submit_item(ticket, request))
        with pytest.raises(RefusedError):
            await committer.ask(lambda ticket: Inspect(ticket, ()))
        store.syncs_fail = False
        clock.pass_ns(2_000_000_000)
        committer.post(Tick())
        await committer.ask(lambda ticket: Inspect(ticket, ()))
        assert len(committer.machine.book.entries) == 1


async def test_the_batch_that_heals_looks_nothing_up_before(store: DoubtfulStore) -> None:
    request = (NewRequest(meta(idempotency_key="k"), b"p"),)
    async with committing_to(store, clock := HandClock()) as committer:
        store.syncs_fail = True
        with pytest.raises(RefusedError):
            await committer.submit(("t", 1), 1, lambda ticket: submit_item(ticket, request))
        store.syncs_fail = False
        clock.pass_ns(2_000_000_000)
        committer.post(Tick())
        again = await committer.submit(("t", 1), 1, lambda ticket: submit_item(ticket, request))
        assert again.acks[0][1], "the first one was lost with its sync"
        assert len(committer.machine.book.entries) == 1
