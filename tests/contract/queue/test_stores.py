"""What every store must do; run on each of them."""

import random
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.queue.core.effects import Write
from services.queue.core.records import FAMILIES, META, READY, RECORDS, REQUESTS, SCHEMA_KEY
from services.queue.storage.rocksdb_options import CACHE_BYTES
from services.queue.storage.rocksdb_store import RocksdbStore
from services.queue.storage.store import Row, Store, StoreDamagedError, StoreError, StoreUnusableError
from services.queue.storage.synced import read_mark
from tests.support.memory_store import MemoryStore


@pytest.fixture(params=["memory", "rocksdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store = MemoryStore() if request.param == "memory" else RocksdbStore(tmp_path / "db")
    yield made
    made.close()


def test_every_family_is_there_and_apart(store: Store) -> None:
    store.write([Write(family, b"k", family.encode()) for family in FAMILIES])
    for family in FAMILIES:
        assert store.get(family, b"k") == family.encode()
        assert store.get(family, b"other") is None


def test_get_many_keeps_the_order_and_the_gaps(store: Store) -> None:
    store.write([Write(REQUESTS, bytes([n]), bytes([n, n])) for n in range(5)])
    assert store.get_many(REQUESTS, [b"\x03", b"\x09", b"\x00"]) == [b"\x03\x03", None, b"\x00\x00"]
    assert store.get_many(REQUESTS, []) == []


def test_scan_is_ordered_half_open_and_limited(store: Store) -> None:
    store.write([Write(READY, bytes([n]), b"") for n in (9, 3, 5, 1, 7)])
    keys = [key[0] for key, _ in store.scan(READY, b"\x03", b"\x09", 100)]
    assert keys == [3, 5, 7]
    assert [key[0] for key, _ in store.scan(READY, b"\x03", b"", 2)] == [3, 5]
    assert [key[0] for key, _ in store.scan(READY, b"", b"", 100)] == [1, 3, 5, 7, 9]
    assert store.scan(READY, b"\x08", b"\x09", 100) == []


def test_scan_back_is_scan_from_the_other_end(store: Store) -> None:
    store.write([Write(READY, bytes([n]), b"") for n in (9, 3, 5, 1, 7)])
    assert [key[0] for key, _ in store.scan_back(READY, b"\x03", b"\x09", 100)] == [7, 5, 3]
    assert [key[0] for key, _ in store.scan_back(READY, b"\x03", b"", 2)] == [9, 7]
    assert [key[0] for key, _ in store.scan_back(READY, b"", b"", 100)] == [9, 7, 5, 3, 1]
    assert store.scan_back(READY, b"\x08", b"\x09", 100) == []


def test_later_writes_of_a_batch_win(store: Store) -> None:
    store.write([Write(REQUESTS, b"k", b"1"), Write(REQUESTS, b"k", b"2"), Write(REQUESTS, b"gone", b"x")])
    store.write([Write(REQUESTS, b"gone", None), Write(REQUESTS, b"never", None)])
    assert store.get(REQUESTS, b"k") == b"2"
    assert store.scan(REQUESTS, b"", b"", 10) == [(b"k", b"2")]


def test_empty_values_are_values(store: Store) -> None:
    store.write([Write(REQUESTS, b"k", b"")])
    assert store.get(REQUESTS, b"k") == b""


def test_large_values_survive(store: Store) -> None:
    value = bytes(range(256)) * 50_000
    store.write([Write("payloads", b"k", value)])
    assert store.get("payloads", b"k") == value


def test_reopening_keeps_everything(store: Store) -> None:
    store.write([Write(REQUESTS, b"k", b"v")])
    store.reopen()
    assert store.get(REQUESTS, b"k") == b"v"


def test_what_was_written_is_durable(store: Store) -> None:
    store.wait_durable()
    store.write([Write(REQUESTS, b"k", b"v")])
    store.wait_durable()
    store.reopen()
    store.wait_durable()
    assert store.doubt() == ""


def test_the_free_space_is_known(store: Store) -> None:
    assert store.disk_free_bytes() > 0


WRITES = st.lists(
    st.builds(
        Write, st.sampled_from([REQUESTS, READY]), st.binary(min_size=1, max_size=2), st.none() | st.binary(max_size=3)
    )
)


@settings(max_examples=30, deadline=None)
@given(batches=st.lists(WRITES, max_size=5))
def test_both_stores_agree(tmp_path_factory: pytest.TempPathFactory, batches: list[list[Write]]) -> None:
    memory = MemoryStore()
    rocks = RocksdbStore(tmp_path_factory.mktemp("db"))
    for batch in batches:
        memory.write(batch)
        rocks.write(batch)
    for family in (REQUESTS, READY):
        assert memory.scan(family, b"", b"", 1000) == rocks.scan(family, b"", b"", 1000)
    rocks.close()


def test_a_directory_survives_its_process(tmp_path: Path) -> None:
    first = RocksdbStore(tmp_path)
    first.write([Write(REQUESTS, b"k", b"v")])
    first.close()
    second = RocksdbStore(tmp_path)
    assert second.get(REQUESTS, b"k") == b"v"
    second.close()


def test_a_locked_directory_is_refused(tmp_path: Path) -> None:
    first = RocksdbStore(tmp_path)
    with pytest.raises(StoreUnusableError, match="locked"):
        RocksdbStore(tmp_path)
    first.close()


def test_a_newer_schema_is_refused_with_both_versions(tmp_path: Path) -> None:
    store = RocksdbStore(tmp_path)
    store.write([Write(META, SCHEMA_KEY, b"99")])
    store.close()
    with pytest.raises(StoreUnusableError, match="schema version 99; this program knows version 3"):
        RocksdbStore(tmp_path)


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(StoreUnusableError, match="data directory"):
        RocksdbStore(path)


def test_a_directory_that_cannot_be_looked_at_is_refused(tmp_path: Path) -> None:
    """As one is below a directory that may not be entered, which root may: it has a name that no disk takes."""
    with pytest.raises(StoreUnusableError, match=r"^data directory /.*: File name too long$"):
        RocksdbStore(tmp_path / ("n" * 256))


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = RocksdbStore(tmp_path)
    store.close()
    with pytest.raises(StoreError):
        store.write([Write(REQUESTS, b"k", b"v")])


class Spy:
    """A database whose syncs are noted, and wait for `may_sync` or fail with `error`."""

    def __init__(self, database: Any) -> None:
        self._database = database
        self.calls: list[str] = []
        self.syncing, self.may_sync = threading.Event(), threading.Event()
        self.may_sync.set()
        self.error = ""

    def write(self, batch: Any, options: Any) -> None:
        self._database.write(batch, options)
        self.calls.append("write")

    def flush_wal(self, sync: bool) -> None:
        self.syncing.set()
        assert self.may_sync.wait(60)
        if self.error:
            raise Exception(self.error)  # as rocksdict does
        self._database.flush_wal(sync)
        self.calls.append(f"flush_wal({sync})")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)


@pytest.fixture
def spied(tmp_path: Path) -> Iterator[tuple[RocksdbStore, Spy]]:
    store = RocksdbStore(tmp_path / "db")
    spy = Spy(store._db)
    store._db = spy
    yield store, spy
    store.close()


def test_every_write_asks_rocksdb_for_an_fsync(spied: tuple[RocksdbStore, Spy]) -> None:
    store, spy = spied
    store.write([Write(REQUESTS, b"k", b"v")])
    assert spy.calls == ["write", "flush_wal(True)"]
    assert store.get(REQUESTS, b"k") == b"v"


def test_wait_durable_waits_for_the_sync_of_what_can_be_read(spied: tuple[RocksdbStore, Spy], tmp_path: Path) -> None:
    store, spy = spied
    store.wait_durable()
    marked = read_mark(tmp_path / "db")
    spy.may_sync.clear()
    with ThreadPoolExecutor(2) as threads:
        writing = threads.submit(store.write, [Write(REQUESTS, b"k", b"v")])
        assert spy.syncing.wait(60)
        assert store.get(REQUESTS, b"k") == b"v"
        assert read_mark(tmp_path / "db") == marked
        settling = threads.submit(store.wait_durable)
        assert not wait([settling], timeout=0.05).done
        spy.may_sync.set()
        settling.result(60)
        assert spy.calls == ["write", "flush_wal(True)"]
        writing.result(60)
    assert read_mark(tmp_path / "db") == spy.latest_sequence_number()


@pytest.mark.parametrize("other", ["write", "reopen"])
def test_a_store_that_syncs_is_neither_written_nor_closed(spied: tuple[RocksdbStore, Spy], other: str) -> None:
    store, spy = spied
    spy.may_sync.clear()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(store.write, [Write(REQUESTS, b"k", b"v")])
        assert spy.syncing.wait(60)
        work = store.reopen if other == "reopen" else lambda: store.write([Write(REQUESTS, b"l", b"w")])
        second = threads.submit(work)
        assert not wait([second], timeout=0.05).done
        assert spy.calls == ["write"]
        spy.may_sync.set()
        first.result(60)
        second.result(60)
    store.wait_durable()
    assert len(store.scan(REQUESTS, b"", b"", 10)) == (1 if other == "reopen" else 2)


def test_who_waits_while_the_store_is_opened_again_is_not_told_that_all_of_it_is_durable(
    spied: tuple[RocksdbStore, Spy], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, spy = spied

    def opened_meanwhile() -> int:
        number: int = spy._database.latest_sequence_number() + 1  # a write that is being synced, which fails
        store.reopen()  # and finds nothing of it
        return number

    monkeypatch.setattr(spy, "latest_sequence_number", opened_meanwhile, raising=False)
    with ThreadPoolExecutor(1) as threads:
        settling = threads.submit(store.wait_durable)
        try:
            with pytest.raises(StoreError, match="opened again meanwhile"):
                settling.result(60)
        finally:
            store.write([Write(REQUESTS, b"k", b"v")])  # lets go of who waits for a number
    store.wait_durable()


def test_after_a_sync_that_failed_nothing_is_written_or_told_until_the_store_is_opened_again(
    spied: tuple[RocksdbStore, Spy], tmp_path: Path
) -> None:
    store, spy = spied
    marked = read_mark(tmp_path / "db")
    spy.may_sync.clear()
    spy.error = "IO error: Input/output error"
    with ThreadPoolExecutor(2) as threads:
        writing = threads.submit(store.write, [Write(REQUESTS, b"k", b"v")])
        assert spy.syncing.wait(60)
        settling = threads.submit(store.wait_durable)
        spy.may_sync.set()
        for waiting in (writing, settling):
            with pytest.raises(StoreError, match="Input/output error"):
                waiting.result(60)
    spy.error = ""
    assert "Input/output error" in store.doubt()
    for refused in (store.wait_durable, lambda: store.write([Write(REQUESTS, b"l", b"w")])):
        with pytest.raises(StoreError, match="a sync failed"):
            refused()
    assert spy.calls == ["write"]
    assert read_mark(tmp_path / "db") == marked
    store.reopen()
    assert not store.doubt()
    store.wait_durable()
    store.write([Write(REQUESTS, b"l", b"w")])
    assert store.scan(REQUESTS, b"", b"", 10) == [(b"k", b"v"), (b"l", b"w")]


def test_a_write_that_fails_is_told_to_whoever_could_open_the_store_again(tmp_path: Path) -> None:
    store = RocksdbStore(tmp_path / "db")
    with files_may_not_grow(), pytest.raises(StoreError):
        store.write([Write(REQUESTS, b"lost", bytes(10_000))])
    assert "File too large" in store.write_failure()
    assert not store.doubt()
    store.reopen()
    assert not store.write_failure()
    store.close()


@pytest.mark.parametrize("limit", [1, 2])
def test_rows_beside_a_damaged_one_are_read(tmp_path: Path, limit: int) -> None:
    """Every row has a block of its own; of what is read backwards RocksDB looks at one row more than is asked for."""
    store = RocksdbStore(tmp_path / "db")
    rows = {bytes([n]): bytes([65 + n]) * 20 + random.Random(n).randbytes(20_000) for n in range(8)}
    store.write([Write(RECORDS, key, row) for key, row in rows.items()])
    store._families[RECORDS].flush()
    store.close()
    for path in (tmp_path / "db").glob("*.sst"):
        content = bytearray(path.read_bytes())
        if (at := content.find(b"E" * 20)) >= 0:
            content[at + 5000] ^= 255
            path.write_bytes(content)
    store = RocksdbStore(tmp_path / "db")

    def whole(scan: Callable[..., list[Row]], bounds: tuple[bytes, bytes]) -> list[int]:
        return [key[0] for key, _ in scan(RECORDS, *bounds, limit)]

    assert whole(store.scan, (bytes([4 - limit]), b"")) == list(range(4 - limit, 4))
    assert whole(store.scan, (b"\x05", b"")) == [5, 6][:limit]
    assert whole(store.scan_back, (b"", bytes([6 + limit]))) == [7, 6][-limit:]
    with pytest.raises(StoreDamagedError):
        store.scan(RECORDS, b"\x04", b"", 1)
    store.close()


@contextmanager
def files_may_not_grow() -> Iterator[None]:
    """Make every write beyond a file's first kilobyte fail, as on a full disk. Works without privileges."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_store_on_a_disk_that_was_full_opens_again_with_what_was_durable(tmp_path: Path) -> None:
    store = RocksdbStore(tmp_path / "db")
    durable = [Write(REQUESTS, bytes([n]), bytes(100)) for n in range(5)]
    store.write(durable)
    with files_may_not_grow():
        with pytest.raises(StoreError):
            store.write([Write(REQUESTS, b"lost", bytes(10_000))])
        with pytest.raises(StoreError):
            store.reopen()
        with pytest.raises(StoreError, match="closed"):
            store.get(REQUESTS, b"\x00")
    store.reopen()
    assert store.scan(REQUESTS, b"", b"", 100) == [(row.key, row.value) for row in durable]
    store.write([Write(REQUESTS, b"new", b"1")])
    store.close()
    store.close()
    again = RocksdbStore(tmp_path / "db")
    assert again.get(REQUESTS, b"new") == b"1"
    again.close()


def test_families_share_one_cache(tmp_path: Path) -> None:
    """Each with its own, memory would grow for as long as it takes the last of a dozen to fill."""
    store = RocksdbStore(tmp_path / "db")
    store.write([Write(REQUESTS, bytes([n]), random.Random(n).randbytes(3_000)) for n in range(100)])
    store._families[REQUESTS].flush()
    assert len(store.scan(REQUESTS, b"", b"", 200)) == 100

    def told(name: str) -> set[int]:
        return {family.property_int_value(f"rocksdb.block-cache-{name}") for family in store._families.values()}

    assert told("capacity") == {CACHE_BYTES}
    (used,) = told("usage")
    assert used > 300_000
    store.close()
