"""Batches driven against a whole queue service in memory: leases, two drivers at once, windows cut short."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock import submitting
from penstock.client import Client
from penstock.files.v1 import files_pb2
from penstock.scheduler.v1 import scheduler_pb2
from services.gateway import drive
from services.gateway.batch_lines import ask_of, read_lines, request_of
from services.gateway.batch_output import Output
from services.gateway.batch_records import BATCHES, OPEN, BatchRecords, ChangedError, Held, LostError, new_batch_id
from services.gateway.batches import cancelled
from services.gateway.core.batch import Batch, Counts, Event, Status
from services.gateway.drive import Drive
from services.gateway.driver import Driver
from services.gateway.metrics import GatewayMetrics
from services.gateway.served import Served
from services.gateway.shelf import Shelf
from services.queue.core.entry import DEFAULT_TENANT
from services.queue.core.messages import SetQuotas
from services.queue.core.quotas import Quota
from services.queue.service import Service
from services.telemetry import Telemetry
from tests.support.batch_lines import completion
from tests.support.serving import serving
from tests.support.waiting import wait_for_async

LINES = 25
URL = "/v1/completions"


async def no_fleet() -> scheduler_pb2.StatusResponse:
    return scheduler_pb2.StatusResponse()


@dataclass
class Rig:
    """A queue without workers, and what a gateway has of it."""

    client: Client
    shelf: Shelf
    records: BatchRecords
    service: Service

    async def batch(self, **fields: Any) -> Batch:
        content = "".join(json.dumps(completion(f"line-{n}", "hi")) + "\n" for n in range(LINES)).encode()
        await self.shelf.begin("file-1")
        await self.shelf.append("file-1", 0, content)
        await self.shelf.end(files_pb2.CloseFileRequest(file_id="file-1", bytes=len(content), purpose="batch"))
        now_s = int(time.time())
        batch = replace(Batch(new_batch_id(), URL, "file-1", "24h", now_s, now_s + 3600, "batch"), **fields)
        await self.records.add(batch)
        return batch

    async def take(self, batch: Batch, owner: str, ahead_s: float = 0.0) -> Held:
        held = await Held.take(self.records, batch.batch_id, owner, 10.0, lambda: time.time() + ahead_s)
        assert held is not None
        return held

    def drive(self, held: Held) -> Drive:
        metrics = GatewayMetrics(CollectorRegistry())
        served = Served(no_fleet, time.monotonic)
        return Drive(self.client, self.shelf, served, metrics, held, asyncio.Semaphore(1))

    def keys(self) -> list[str]:
        """Return the idempotency keys of every request that lives at the queue."""
        return sorted(entry.meta.idempotency_key for entry in self.service.committer.machine.book.entries.values())

    async def error_ids(self, batch: Batch) -> list[str]:
        lines = [json.loads(line) async for line in Output(self.client, self.shelf).lines(batch, errors=True)]
        return [line["custom_id"] for line in lines]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with serving(Telemetry(None)) as peer:
        address = f"127.0.0.1:{peer.port}"
        shelf = Shelf(address, 1.0)
        async with Client(address, retry_for_s=1.0) as client:
            yield Rig(client, shelf, BatchRecords(shelf), peer.service)
        await shelf.close()


async def test_a_batch_is_held_by_one_until_its_lease_ends(rig: Rig) -> None:
    batch = await rig.batch()
    first = await rig.take(batch, "first")
    assert await Held.take(rig.records, batch.batch_id, "second", 10.0) is None
    await first.save()
    second = await rig.take(batch, "second", ahead_s=11)
    with pytest.raises(LostError):
        await first.save()
    await second.give_back()
    assert (await rig.records.get(batch.batch_id))[0].lease.owner == ""
    assert await rig.take(batch, "third")


async def test_a_client_that_cancels_is_noticed_by_the_holder(rig: Rig) -> None:
    batch = await rig.batch()
    held = await rig.take(batch, "me")
    await rig.records.change(batch.batch_id, cancelled)
    with pytest.raises(ChangedError):
        await held.save(replace(held.batch, counts=Counts(7)))
    assert held.batch.status is Status.CANCELLING
    await held.save()


async def test_two_that_drive_one_batch_submit_each_line_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "WINDOW_LINES", 4)
    batch = await rig.batch()
    first = await rig.take(batch, "first")
    await first.save(replace(first.batch, counts=Counts(LINES)).moved(Event.VALID, 1))
    # The first one was stopped for longer than its lease, and does not know it.
    second = await rig.take(batch, "second", ahead_s=11)
    driving = asyncio.create_task(rig.drive(second).run())
    with pytest.raises(LostError):
        await rig.drive(first).run()

    async def all_there() -> bool:
        return len(rig.keys()) >= LINES

    await wait_for_async(all_there, "every line to be submitted")
    assert rig.keys() == sorted(f"{batch.batch_id}:{n + 1}" for n in range(LINES))
    assert (await rig.records.open_ids()) == {batch.batch_id: "file-1"}
    await rig.records.change(batch.batch_id, cancelled)
    await driving
    done, _ = await rig.records.get(batch.batch_id)
    assert (done.status, done.counts.failed) == (Status.CANCELLED, LINES)
    assert sorted(await rig.error_ids(done)) == sorted(f"line-{n}" for n in range(LINES))
    assert await rig.records.open_ids() == {}


async def test_a_window_cut_short_by_a_crash_leaves_each_line_in_one_place(rig: Rig) -> None:
    batch = await rig.batch()
    held = await rig.take(batch, "me")
    await held.save(replace(held.batch, counts=Counts(LINES)).moved(Event.VALID, 1))
    sent = [request_of(ask_of(raw, URL, ()), batch) async for raw in read_lines(rig.shelf, "file-1")][:7]
    assert len([ack async for ack in rig.client.submit_many(sent)]) == 7
    await rig.records.change(batch.batch_id, cancelled)
    with pytest.raises(ChangedError):
        await held.save()
    await rig.drive(held).run()
    done, _ = await rig.records.get(batch.batch_id)
    assert (done.status, done.counts.failed, done.progress.line) == (Status.CANCELLED, LINES, 7)
    assert sorted(await rig.error_ids(done)) == sorted(f"line-{n}" for n in range(LINES))
    view = await rig.shelf.file(str(done.error_file_id))
    content = [line async for line in Output(rig.client, rig.shelf).lines(done, errors=True)]
    assert view.bytes == sum(map(len, content))


async def test_a_window_that_is_over_before_it_begins(rig: Rig) -> None:
    batch = await rig.batch(expires_at=int(time.time()) - 1)
    await rig.drive(await rig.take(batch, "me")).run()
    done, _ = await rig.records.get(batch.batch_id)
    assert (done.status, done.counts.failed, rig.keys()) == (Status.EXPIRED, LINES, [])
    assert len(await rig.error_ids(done)) == LINES


async def test_an_input_that_is_gone_fails_the_batch(rig: Rig) -> None:
    batch = await rig.batch()
    assert await rig.shelf.delete("file-1")
    await rig.drive(await rig.take(batch, "me")).run()
    done, _ = await rig.records.get(batch.batch_id)
    assert (done.status, done.errors[0].code) == (Status.FAILED, "file_not_found")


async def test_a_line_the_queue_refuses_fails_the_batch_and_takes_the_others_back(rig: Rig) -> None:
    batch = await rig.batch(channel="nowhere")
    await rig.drive(await rig.take(batch, "me")).run()
    done, _ = await rig.records.get(batch.batch_id)
    assert (done.status, done.errors[0].line, rig.keys()) == (Status.FAILED, 1, [])


async def test_a_batch_that_cannot_be_read_does_not_stop_the_others(rig: Rig) -> None:
    for kind, value in ((BATCHES, b'{"newer": 1}'), (OPEN, b"file-1")):
        record = files_pb2.Record(kind=kind, record_id="batch_0", value=value)
        await rig.shelf.put([files_pb2.PutRecord(record=record)])
    batch = await rig.batch(expires_at=int(time.time()) - 1)
    metrics = GatewayMetrics(CollectorRegistry())
    driver = Driver(rig.client, rig.shelf, rig.records, Served(no_fleet, time.monotonic), metrics, 0.5)
    running = asyncio.create_task(driver.run())

    async def over() -> bool:
        return (await rig.records.get(batch.batch_id))[0].ended

    await wait_for_async(over, "the good batch to end")
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_lines_that_a_quota_does_not_let_in_wait_for_room(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submitting, "QUOTA_PAUSE_S", 0.02)
    rig.service.committer.post(SetQuotas({DEFAULT_TENANT: Quota(requests=4)}))
    batch = await rig.batch()
    driving = asyncio.create_task(rig.drive(await rig.take(batch, "me")).run())
    seen: set[str] = set()
    while len(seen) < LINES:
        entries = list(rig.service.committer.machine.book.entries.values())
        assert len(entries) <= 4
        seen.update(entry.meta.idempotency_key for entry in entries)
        if entries:
            await rig.client.cancel(entries[0].name)
        await asyncio.sleep(0)
    await rig.client.cancel(batch=batch.batch_id)
    await driving
    done, _ = await rig.records.get(batch.batch_id)
    assert (done.status, done.counts.failed) == (Status.COMPLETED, LINES)
    assert sorted(await rig.error_ids(done)) == sorted(f"line-{n}" for n in range(LINES))


async def test_a_batch_that_ends_with_holes_in_its_last_window_has_each_line_once(rig: Rig) -> None:
    """Room came and went while a window was being submitted: some of its later lines are in, some earlier are not."""
    batch = await rig.batch()
    held = await rig.take(batch, "me")
    await held.save(replace(held.batch, counts=Counts(LINES)).moved(Event.VALID, 1))
    asked = [request_of(ask_of(raw, URL, ()), batch) async for raw in read_lines(rig.shelf, "file-1")]
    sent = [asked[0], asked[3], asked[7]]
    assert len([ack async for ack in rig.client.submit_many(sent)]) == len(sent)
    await rig.records.change(batch.batch_id, cancelled)
    with pytest.raises(ChangedError):
        await held.save()
    await rig.drive(held).run()
    done, _ = await rig.records.get(batch.batch_id)
    assert (done.status, done.counts.failed) == (Status.CANCELLED, LINES)
    assert sorted(await rig.error_ids(done)) == sorted(f"line-{n}" for n in range(LINES))
