"""Whose turn it is to read: a batch that waits for its tenant's quota keeps nobody else waiting."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from penstock.client import Client
from penstock.credentials import Credentials, acting_for
from penstock.files.v1 import files_pb2
from penstock.tls import Access, TlsFiles
from services.gateway.batch import submitting
from services.gateway.batch.driver import Driver
from services.gateway.batch.records import BatchRecords, new_batch_id
from services.gateway.batch.turns import Turns
from services.gateway.batches import cancelled
from services.gateway.core.batch import Batch, Status
from services.gateway.metrics import GatewayMetrics
from services.gateway.served import Served
from services.gateway.shelf import Shelf
from services.telemetry import Telemetry
from tests.support.batch_lines import completion
from tests.support.keyed import Keyfile
from tests.support.memory_store import MemoryStore
from tests.support.serving import Peer, serving
from tests.support.waiting import wait_for_async
from tests.unit.gateway.test_drive import URL, no_fleet

LINES = 25
QUOTA = 2


@dataclass
class Fleet:
    """A queue with tenants, and a gateway that drives their batches."""

    peer: Peer
    shelf: Shelf
    records: BatchRecords

    async def batch(self, tenant: str) -> Batch:
        content = "".join(json.dumps(completion(f"line-{n}", "hi")) + "\n" for n in range(LINES)).encode()
        batch_id = new_batch_id()
        file_id = f"file-{batch_id}"
        now_s = int(time.time())
        batch = Batch(batch_id, URL, file_id, "24h", now_s, now_s + 3600, "batch", tenant=tenant)
        with acting_for(tenant):
            await self.shelf.begin(file_id)
            await self.shelf.append(file_id, 0, content)
            await self.shelf.end(files_pb2.CloseFileRequest(file_id=file_id, bytes=len(content), purpose="batch"))
            await self.records.add(batch)
        return batch

    def waiting(self, batch: Batch) -> int:
        entries = self.peer.service.committer.machine.book.entries.values()
        return sum(entry.meta.batch == batch.batch_id for entry in entries)

    async def until(self, batch: Batch, status: Status, waiting: int) -> None:
        async def so() -> bool:
            found, _ = await self.records.get(batch.batch_id)
            return found.status is status and self.waiting(batch) == waiting

        with acting_for(batch.tenant):
            await wait_for_async(so, f"{batch.batch_id} to be {status} with {waiting} lines submitted")


@pytest.fixture
async def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(submitting, "QUOTA_PAUSE_S", 0.02)
    keyfile = Keyfile(tmp_path / "keys.toml", head=f"[tenants.small]\nmax_waiting_requests = {QUOTA}\n\n")
    key = keyfile.put("service", 'role = "service"')
    keyfile.write()
    async with serving(Telemetry(None), MemoryStore(), keyfile.path) as peer:
        address = f"127.0.0.1:{peer.port}"
        shelf = Shelf(address, 1.0, Access(TlsFiles(), Credentials(key)))
        records = BatchRecords(shelf)
        async with Client(address, retry_for_s=1.0, api_key=key) as client:
            metrics = GatewayMetrics(CollectorRegistry())
            driver = Driver(client, shelf, records, Served(no_fleet, time.monotonic), metrics, 0.5)
            running = asyncio.create_task(driver.run())
            yield Fleet(peer, shelf, records)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await shelf.close()


async def test_a_batch_that_waits_for_its_quota_holds_nobody_else_up(fleet: Fleet) -> None:
    first = await fleet.batch("small")
    await fleet.until(first, Status.IN_PROGRESS, QUOTA)
    other = await fleet.batch("other")
    await fleet.until(other, Status.IN_PROGRESS, LINES)
    next_one = await fleet.batch("small")
    await fleet.until(next_one, Status.IN_PROGRESS, 0)
    await fleet.until(first, Status.IN_PROGRESS, QUOTA)
    with acting_for("small"):
        await fleet.records.change(first.batch_id, cancelled)
    await fleet.until(first, Status.CANCELLED, 0)
    await fleet.until(next_one, Status.IN_PROGRESS, QUOTA)


async def test_one_has_the_turn_at_a_time_and_another_in_its_pauses_but_none_of_its_tenant() -> None:
    turns = Turns()
    had: list[str] = []

    async def submit(tenant: str) -> None:
        async with turns.to_submit(tenant):
            had.append(tenant)
            await asyncio.sleep(0)
            had.append(tenant)

    async with turns.to_submit("a") as turn:
        others = [asyncio.create_task(submit(tenant)) for tenant in "abc"]
        await asyncio.sleep(0)
        assert had == []
        await turn.pause(0)
        assert had == ["b", "b", "c", "c"]
    await asyncio.gather(*others)
    assert had[4:] == ["a", "a"]


async def test_a_tenant_that_submits_nothing_more_leaves_nothing() -> None:
    turns = Turns()
    for number in range(100):
        async with turns.to_submit(f"tenant-{number}"):
            assert [*turns._submitting] == [f"tenant-{number}"]
    assert not turns._submitting


async def test_whoever_is_stopped_in_a_pause_gives_no_turn_that_is_anothers() -> None:
    turns = Turns()
    paused = asyncio.Event()

    async def pause() -> None:
        async with turns.to_submit("t") as turn:
            asyncio.get_running_loop().call_soon(paused.set)
            await turn.pause(3600)

    pausing = asyncio.create_task(pause())
    await paused.wait()
    async with turns.to_read():
        pausing.cancel()
        await asyncio.gather(pausing, return_exceptions=True)
        third = asyncio.create_task(turns.to_read().__aenter__())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not third.done()
    await third
