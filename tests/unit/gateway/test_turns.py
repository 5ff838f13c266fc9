"""Whose turn it is to read: a batch that waits for its tenant's quota keeps nobody else waiting."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.client import Client
from penstock.credentials import Credentials, acting_for
from penstock.files.v1 import files_pb2
from penstock.tls import Access, TlsFiles
from services.gateway.batch import reading, submitting
from services.gateway.batch import turns as batch_turns
from services.gateway.batch.driver import Driver
from services.gateway.batch.lines import RawLine
from services.gateway.batch.records import BatchRecords, new_batch_id
from services.gateway.batch.turns import Reader, TooLateError, Turn, Turns
from services.gateway.batches import cancelled
from services.gateway.core.batch import Batch, Counts, Status
from services.gateway.metrics import GatewayMetrics
from services.gateway.served import Served
from services.gateway.shelf import Shelf
from services.telemetry import Telemetry
from tests.support.batch_lines import completion
from tests.support.keyed import Keyfile
from tests.support.memory_store import MemoryStore
from tests.support.serving import Peer, serving
from tests.support.waiting import wait_for_async
from tests.unit.gateway.test_drive import URL, Rig, _true_of, no_fleet, rig

__all__ = ["rig"]

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


def reader(tenant: str = "t", size_bytes: int = 0, left_s: float = 60.0) -> Reader:
    return Reader(tenant, size_bytes, lambda: left_s)


async def test_one_has_the_turn_at_a_time_and_another_in_its_pauses_but_none_of_its_tenant() -> None:
    turns = Turns()
    had: list[str] = []

    async def submit(tenant: str) -> None:
        async with turns.to_submit(reader(tenant)):
            had.append(tenant)
            await asyncio.sleep(0)
            had.append(tenant)

    async with turns.to_submit(reader("a")) as turn:
        others = [asyncio.create_task(submit(tenant)) for tenant in "abc"]
        await asyncio.sleep(0)
        assert had == []
        await turn.pause(0)
        assert had == ["b", "b", "c", "c"]
    await asyncio.gather(*others)
    assert had[4:] == ["a", "a"]


async def test_tenants_take_turns_and_of_a_tenant_the_shortest_and_then_the_first() -> None:
    turns = Turns()
    had: list[str] = []
    wanted = ["a5", "a7", "a5", "b9", "a1", "b9", "c3"]

    async def read(number: int, name: str) -> None:
        async with turns.to_read(reader(name[0], int(name[1]))):
            had.append(f"{name}.{number}")

    async with turns.to_read(reader("a")):
        tasks = [asyncio.create_task(read(number, name)) for number, name in enumerate(wanted)]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert had == ["a1.4", "b9.3", "c3.6", "a5.0", "b9.5", "a5.2", "a7.1"]


async def test_a_turn_is_passed_on_after_a_window_of_lines_or_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_turns, "WINDOW_LINES", 3)
    monkeypatch.setattr(batch_turns, "WINDOW_BYTES", 10)
    turns = Turns()
    had: list[str] = []

    async def read(name: str, *sizes: int) -> None:
        async with turns.to_read(reader(name)) as turn:
            for size in sizes:
                had.append(name)
                await turn.read(size)

    async with turns.to_read(reader("c")):
        both = asyncio.gather(read("a", 1, 1, 1, 10, 1), read("b", 1, 9, 1))
        await asyncio.sleep(0)
    await both
    assert "".join(had) == "aaabbaba"


async def test_whose_time_is_over_waits_no_longer_and_keeps_nothing() -> None:
    turns = Turns()
    async with turns.to_read(reader()):
        with pytest.raises(TooLateError):
            await turns.to_submit(reader("late", left_s=0)).__aenter__()
        assert not turns._reading.is_wanted
    async with turns.to_submit(reader("late")):
        pass


async def test_a_tenant_that_submits_nothing_more_leaves_nothing() -> None:
    turns = Turns()
    for number in range(100):
        async with turns.to_submit(reader(f"tenant-{number}")):
            assert [*turns._submitting] == [f"tenant-{number}"]
    assert not turns._submitting


async def test_whoever_is_stopped_in_a_pause_gives_no_turn_that_is_anothers() -> None:
    turns = Turns()
    paused = asyncio.Event()

    async def pause() -> None:
        async with turns.to_submit(reader()) as turn:
            asyncio.get_running_loop().call_soon(paused.set)
            await turn.pause(3600)

    pausing = asyncio.create_task(pause())
    await paused.wait()
    async with turns.to_read(reader()):
        pausing.cancel()
        await asyncio.gather(pausing, return_exceptions=True)
        third = asyncio.create_task(turns.to_read(reader()).__aenter__())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not third.done()
    await third


@pytest.mark.parametrize("given", [False, True])
async def test_whoever_is_stopped_while_waiting_leaves_the_turn_to_the_next(given: bool) -> None:
    """Also if it was given in the moment in which it was stopped, or taken away before it had left the line."""
    turns = Turns()
    first = turns.to_read(reader())
    await first.__aenter__()
    stopped = asyncio.create_task(turns.to_read(reader()).__aenter__())
    third = asyncio.create_task(turns.to_read(reader()).__aenter__())
    await asyncio.sleep(0)
    if given:
        await first.__aexit__()
    stopped.cancel()
    if not given:
        await first.__aexit__()
    async with asyncio.timeout(30):
        await third
    assert stopped.cancelled()


@pytest.mark.parametrize("status", [Status.VALIDATING, Status.IN_PROGRESS])
async def test_a_short_batch_passes_a_long_one_of_its_tenant(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, status: Status
) -> None:
    """The turns of the long one begin when the short one has come to wait for its own."""
    for module in (batch_turns, submitting):
        monkeypatch.setattr(module, "WINDOW_LINES", 10)
    short_input = json.dumps(completion("short", "hi")).encode() + b"\n"
    await rig.shelf.begin("file-short")
    await rig.shelf.append("file-short", 0, short_input)
    end = files_pb2.CloseFileRequest(file_id="file-short", bytes=len(short_input), purpose="batch")
    await rig.shelf.end(end)
    fields = {"status": status, "counts": Counts(LINES if status is Status.IN_PROGRESS else 0)}
    batch = await rig.batch(**fields)
    short = replace(batch, batch_id=new_batch_id(), input_file_id="file-short")
    await rig.records.add(short)
    long_one = rig.drive(await rig.take(batch, "me"))
    other = rig.drive(await rig.take(short, "me"))
    turns = other._turns = long_one._turns
    tasks: list[asyncio.Task[None]] = []
    order: list[str] = []
    understood = reading.understood

    def noted(raw: RawLine, batch: Batch, *models: Any) -> Any:
        order.append(batch.batch_id)
        return understood(raw, batch, *models)

    take = Turn.__aenter__

    async def wait_for_short(self: Turn) -> Turn:
        turn = await take(self)
        if len(tasks) == 1:
            tasks.append(asyncio.create_task(other.run()))
            lines = [turns._reading, *turns._submitting.values()]
            await wait_for_async(lambda: _true_of(lambda: any(line.is_wanted for line in lines)), "the short one")
        return turn

    for module in (reading, submitting):
        monkeypatch.setattr(module, "understood", noted)
    monkeypatch.setattr(Turn, "__aenter__", wait_for_short)
    tasks.append(asyncio.create_task(long_one.run()))

    async def done() -> bool:
        found = [(await rig.records.get(one.batch_id))[0] for one in (batch, short)]
        return all(one.progress.submitted for one in found)

    await wait_for_async(done, "both to be submitted")
    assert order[:11] == [batch.batch_id] * 10 + [short.batch_id]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
