"""Lists pass over everybody's files and records a bounded number at a time, so that other reads get between."""

from __future__ import annotations

import asyncio
import threading

import pytest

from penstock.files.v1 import files_pb2 as pb
from services.clock import SystemClock
from services.queue.core import records as r
from services.queue.core.effects import Write
from services.queue.files.listing import FEW_RECORDS, LOOK_BYTES, LOOK_ROWS, Listing
from services.queue.files.rows import after_records, file_key, record_key
from services.queue.files.shelf import READ_THREADS, Shelf
from services.queue.storage.store import Row
from tests.support.memory_store import MemoryStore

FILES = 40 * LOOK_ROWS


class GatedStore(MemoryStore):
    """A store whose scans wait for `gate`, and that knows how many rows had been scanned when a row was first got."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.scanned_rows = self.scanned_bytes = 0
        self.scanned_at_get: int | None = None
        self._counting = threading.Lock()

    def get(self, family: str, key: bytes) -> bytes | None:
        if self.scanned_at_get is None:
            self.scanned_at_get = self.scanned_rows
        return super().get(family, key)

    def scan(self, family: str, start: bytes, end: bytes, limit: int) -> list[Row]:
        return self._counted(super().scan(family, start, end, limit))

    def scan_back(self, family: str, start: bytes, end: bytes, limit: int) -> list[Row]:
        return self._counted(super().scan_back(family, start, end, limit))

    def _counted(self, rows: list[Row]) -> list[Row]:
        assert self.gate.wait(30)
        with self._counting:
            self.scanned_rows += len(rows)
            self.scanned_bytes += sum(len(row) for _, row in rows)
        return rows


def put_files(store: MemoryStore, count: int, tenant: str) -> list[str]:
    names = [f"{tenant}-{number:06}" for number in range(count)]
    rows = [(file_key(name), pb.File(file_id=name, tenant=tenant).SerializeToString()) for name in names]
    store.write([Write(r.FILES, key, row) for key, row in rows])
    return names


async def test_a_file_is_read_between_lists_that_pass_over_all_of_another_tenants() -> None:
    store = GatedStore()
    names = put_files(store, FILES, "alice")
    shelf = Shelf(store, SystemClock(), lambda _: None)
    lists = [asyncio.create_task(shelf.files(pb.ListFilesRequest(), 1, "mallory")) for _ in range(4 * READ_THREADS)]
    file = asyncio.create_task(shelf.file(names[0], "alice"))
    for _ in range(3):
        await asyncio.sleep(0)  # each has queued what it reads first
    store.gate.set()
    found = await file
    assert found is not None
    assert found.file_id == names[0]
    assert store.scanned_at_get is not None
    assert store.scanned_at_get < FILES // 2
    assert await asyncio.gather(*lists) == [([], False)] * len(lists)
    assert store.scanned_rows == FILES * len(lists)


@pytest.mark.parametrize("ascending", [True, False])
async def test_a_list_finds_its_own_files_among_many_of_others(ascending: bool) -> None:
    store = GatedStore()
    store.gate.set()
    own = put_files(store, 3, "m") + put_files(store, 2, "zz")
    put_files(store, 3 * LOOK_ROWS, "alice")
    put_files(store, 3 * LOOK_ROWS, "n")
    store.write([Write(r.FILES, file_key(n), pb.File(file_id=n, tenant="mallory").SerializeToString()) for n in own])
    shelf = Shelf(store, SystemClock(), lambda _: None)
    found: list[str] = []
    more = True
    while more:
        request = pb.ListFilesRequest(after=found[-1] if found else "", ascending=ascending)
        page, more = await shelf.files(request, 2, "mallory")
        assert len(page) == min(2, len(own) - len(found))
        found += [file.file_id for file in page]
    assert found == sorted(own, reverse=not ascending)


def test_a_job_looks_at_so_many_bytes_of_large_records() -> None:
    store = GatedStore()
    store.gate.set()
    value = bytes(LOOK_BYTES)
    record = pb.Record(kind="batch", value=value, tenant="alice").SerializeToString()
    store.write([Write(r.RECORDS, record_key("batch", f"{number:02}"), record) for number in range(9)])
    bounds = (record_key("batch", ""), after_records("batch"))
    listing: Listing[bytes] = Listing(store, r.RECORDS, bounds, b"", True, 100, lambda _, __: None)
    looks = 0
    while not listing.look():
        looks += 1
        assert store.scanned_bytes <= looks * FEW_RECORDS * len(record)
    assert store.scanned_rows == 9
    assert looks == 3
