"""The search for batches nobody drives: what is wrong with one of them does not stop it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.files.v1 import files_pb2
from services.gateway.batch.driver import Driver
from services.gateway.batch.records import BATCHES, OPEN
from services.gateway.core.batch import Batch
from services.gateway.metrics import GatewayMetrics
from services.gateway.served import Served
from services.gateway.shelf import UnreadableError
from services.queue.core.effects import Write
from services.queue.core.records import RECORDS
from services.queue.files.rows import record_key
from services.queue.storage.store import Row, Store, StoreDamagedError
from tests.support.memory_store import MemoryStore
from tests.support.waiting import wait_for_async
from tests.unit.gateway.test_drive import Rig, no_fleet, rig

__all__ = ["rig"]


@pytest.fixture
def store(rig: Rig) -> Store:
    return rig.service._store


@asynccontextmanager
async def searching(rig: Rig) -> AsyncIterator[asyncio.Task[None]]:
    """Have a driver look for batches."""
    metrics = GatewayMetrics(CollectorRegistry())
    driver = Driver(rig.client, rig.shelf, rig.records, Served(no_fleet, time.monotonic), metrics, 0.5)
    running = asyncio.create_task(driver.run())
    try:
        yield running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def until_ended(rig: Rig, batch: Batch) -> None:
    async def over() -> bool:
        return (await rig.records.get(batch.batch_id))[0].ended

    await wait_for_async(over, f"{batch.batch_id} to end")


async def test_a_batch_that_cannot_be_read_does_not_stop_the_others(rig: Rig) -> None:
    for kind, value in ((BATCHES, b'{"newer": 1}'), (OPEN, b"file-1")):
        record = files_pb2.Record(kind=kind, record_id="batch_0", value=value)
        await rig.shelf.put([files_pb2.PutRecord(record=record)])
    batch = await rig.batch(expires_at=int(time.time()) - 1)
    async with searching(rig) as running:
        await until_ended(rig, batch)
        assert not running.done()


async def test_nor_does_one_whose_row_fails_its_checksum(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = files_pb2.Record(kind=OPEN, record_id="batch_0", value=b"file-1")
    await rig.shelf.put([files_pb2.PutRecord(record=marker)])
    batch = await rig.batch(expires_at=int(time.time()) - 1)
    read, damaged = MemoryStore.get, []

    def get(store: MemoryStore, family: str, key: bytes) -> bytes | None:
        if key == record_key(BATCHES, "batch_0"):
            damaged.append(key)
            raise StoreDamagedError("Corruption: block checksum mismatch")
        return read(store, family, key)

    monkeypatch.setattr(MemoryStore, "get", get)
    async with searching(rig):
        await until_ended(rig, batch)
    assert damaged


async def until_logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    async def there() -> bool:
        return text in caplog.text

    await wait_for_async(there, text)


async def test_nor_does_a_marker_that_is_no_record(rig: Rig, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.write([Write(RECORDS, record_key(OPEN, "batch_0"), b"\xff")])
    batch = await rig.batch(expires_at=int(time.time()) - 1)
    async with searching(rig):
        await until_ended(rig, batch)
        await until_logged(caplog, "batch_0 rests: its marker of kind open-batch cannot be read")
    assert store.get(RECORDS, record_key(OPEN, "batch_0")) == b"\xff"


async def test_a_marker_with_a_damaged_value_is_enough_to_drive_its_batch(rig: Rig, store: Store) -> None:
    batch = await rig.batch(expires_at=int(time.time()) - 1)
    marker = files_pb2.Record(kind=OPEN, record_id=batch.batch_id, revision=1, value=b"file-\xff")
    store.write([Write(RECORDS, record_key(OPEN, batch.batch_id), marker.SerializeToString())])
    assert await rig.records.users_of("file-1") == [batch.batch_id]
    async with searching(rig):
        await until_ended(rig, batch)


async def test_markers_before_and_behind_one_that_fails_its_checksum_are_found(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"batch_{number:02}" for number in range(40)]
    for name in names:
        marker = files_pb2.Record(kind=OPEN, record_id=name, value=b"file-1")
        await rig.shelf.put([files_pb2.PutRecord(record=marker)])
    damaged = record_key(OPEN, names[21])
    for scan in ("scan", "scan_back"):
        monkeypatch.setattr(MemoryStore, scan, failing(getattr(MemoryStore, scan), damaged))
    assert await rig.records.open_ids() == names[:21] + names[22:]
    assert "cannot be read between batch_20 and batch_22" in caplog.text
    with pytest.raises(UnreadableError):  # whether its batch needs the file is unknown
        await rig.records.users_of("file-2")


def failing(scan: Callable[..., list[Row]], damaged: bytes) -> Callable[..., list[Row]]:
    def checked(*args: Any) -> list[Row]:
        rows = scan(*args)
        if any(key == damaged for key, _ in rows):
            raise StoreDamagedError("Corruption: block checksum mismatch")
        return rows

    return checked


async def test_an_error_nobody_expected_does_not_end_the_search(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = await rig.batch(expires_at=int(time.time()) - 1)
    found, failures = rig.records.open_ids, [RuntimeError("unexpected")]

    async def open_ids() -> list[str]:
        if failures:
            raise failures.pop()
        return await found()

    monkeypatch.setattr(rig.records, "open_ids", open_ids)
    async with searching(rig):
        await until_ended(rig, batch)
