"""The search for batches nobody drives: what is wrong with one of them does not stop it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from penstock.files.v1 import files_pb2
from services.gateway.batch_records import BATCHES, OPEN
from services.gateway.core.batch import Batch
from services.gateway.driver import Driver
from services.gateway.metrics import GatewayMetrics
from services.gateway.served import Served
from services.queue.file_rows import record_key
from services.queue.memory_store import MemoryStore
from services.queue.store import StoreDamagedError
from tests.support.waiting import wait_for_async
from tests.unit.gateway.test_drive import Rig, no_fleet, rig

__all__ = ["rig"]


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


async def test_an_error_nobody_expected_does_not_end_the_search(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = await rig.batch(expires_at=int(time.time()) - 1)
    found, failures = rig.records.open_ids, [RuntimeError("unexpected")]

    async def open_ids() -> dict[str, str]:
        if failures:
            raise failures.pop()
        return await found()

    monkeypatch.setattr(rig.records, "open_ids", open_ids)
    async with searching(rig):
        await until_ended(rig, batch)
