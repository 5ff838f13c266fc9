"""Batches driven against a whole queue service in memory: leases, two drivers at once, windows cut short."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.client import Client
from penstock.files.v1 import files_pb2
from penstock.scheduler.v1 import scheduler_pb2
from services.gateway.batch import drive, reading, submitting
from services.gateway.batch.drive import Drive
from services.gateway.batch.lines import ask_of, read_lines, request_of
from services.gateway.batch.looks import Looks
from services.gateway.batch.output import Output
from services.gateway.batch.records import (
    BatchRecords,
    ChangedError,
    Held,
    LeaseLostError,
    new_batch_id,
)
from services.gateway.batch.turns import Turns
from services.gateway.batches import cancelled
from services.gateway.core.batch import Batch, Counts, Event, Status
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

    def drive(self, held: Held, served: Served | None = None) -> Drive:
        metrics = GatewayMetrics(CollectorRegistry())
        served = served or Served(no_fleet, time.monotonic)
        return Drive(self.client, self.shelf, served, metrics, held, Turns(), Looks())

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
    with pytest.raises(LeaseLostError):
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
    monkeypatch.setattr(submitting, "WINDOW_LINES", 4)
    batch = await rig.batch()
    first = await rig.take(batch, "first")
    await first.save(replace(first.batch, counts=Counts(LINES)).moved(Event.VALID, 1))
    # The first one was stopped for longer than its lease, and does not know it.
    second = await rig.take(batch, "second", ahead_s=11)
    driving = asyncio.create_task(rig.drive(second).run())
    with pytest.raises(LeaseLostError):
        await rig.drive(first).run()

    async def all_there() -> bool:
        return len(rig.keys()) >= LINES

    await wait_for_async(all_there, "every line to be submitted")
    assert rig.keys() == sorted(f"{batch.batch_id}:{n + 1}" for n in range(LINES))
    assert (await rig.records.users_of("file-1"), await rig.records.users_of("file-2")) == ([batch.batch_id], [])
    await rig.records.change(batch.batch_id, cancelled)
    await driving
    done, _ = await rig.records.get(batch.batch_id)
    assert (done.status, done.counts.failed) == (Status.CANCELLED, LINES)
    assert sorted(await rig.error_ids(done)) == sorted(f"line-{n}" for n in range(LINES))
    assert await rig.records.open_ids() == []


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


def refuse_lines(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Have the queue refuse lines that the gateway passes."""

    def request(ask: Any, batch: Batch) -> Any:
        made = request_of(ask, batch)
        if ask.line in numbers:
            made.channel = "nowhere"
        return made

    monkeypatch.setattr(reading, "request_of", request)


async def test_a_line_the_queue_refuses_is_in_the_error_file_and_the_others_go_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submitting, "WINDOW_LINES", 10)
    refuse_lines(monkeypatch, 3, 17)
    batch = await rig.batch()
    driving = asyncio.create_task(rig.drive(await rig.take(batch, "me")).run())

    async def submitted() -> bool:
        return (await rig.records.get(batch.batch_id))[0].progress.submitted

    await wait_for_async(submitted, "the submission")
    assert len(rig.keys()) == LINES - 2
    await rig.client.cancel(batch=batch.batch_id)
    await driving
    done, _ = await rig.records.get(batch.batch_id)
    assert (done.status, done.counts.failed, done.errors) == (Status.COMPLETED, LINES, [])
    lines = [json.loads(line) async for line in Output(rig.client, rig.shelf).lines(done, errors=True)]
    assert sorted(line["custom_id"] for line in lines) == sorted(f"line-{n}" for n in range(LINES))
    refused = {line["custom_id"]: line["response"] for line in lines if line["response"]}
    assert set(refused) == {"line-2", "line-16"}
    assert refused["line-2"]["status_code"] == 400
    assert refused["line-2"]["body"]["error"]["param"] == "channel"
    size = sum([len(line) async for line in Output(rig.client, rig.shelf).lines(done, errors=True)])
    assert done.counts.error_bytes == size


async def test_a_refused_line_counts_once_and_does_not_hide_those_after_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window is submitted again after a crash; the batch is then cancelled before it is whole."""
    monkeypatch.setattr(submitting, "WINDOW_LINES", 10)
    refuse_lines(monkeypatch, 3)
    batch = await rig.batch(status=Status.IN_PROGRESS, counts=Counts(LINES))
    held = await rig.take(batch, "me")
    driven = rig.drive(held)
    for _ in range(2):
        async for window, _ in driven._submitting.windows():
            async with Turns().to_read(await driven._reader()) as turn:
                await driven._submitting.send(window, turn)
            break
    assert [one.line for one in held.batch.refusals] == [3]
    await rig.records.change(batch.batch_id, cancelled)
    await driven.run()
    done, _ = await rig.records.get(batch.batch_id)
    assert (done.status, done.counts.failed) == (Status.CANCELLED, LINES)
    assert sorted(await rig.error_ids(done)) == sorted(f"line-{n}" for n in range(LINES))


async def test_a_queue_that_refuses_line_after_line_fails_the_batch(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submitting, "WINDOW_LINES", 10)
    monkeypatch.setattr(submitting, "MAX_REFUSALS", LINES - 1)
    batch = await rig.batch(channel="nowhere")
    await rig.drive(await rig.take(batch, "me")).run()
    done, _ = await rig.records.get(batch.batch_id)
    assert (done.status, done.errors[0].line, rig.keys()) == (Status.FAILED, 1, [])
    assert done.refusals == [], "the record has room for the errors"


async def test_refusals_that_outgrow_the_record_fail_the_batch(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = await rig.batch(channel="nowhere")
    monkeypatch.setattr(submitting, "MAX_ROW_BYTES", len(batch.to_row()) + 2000)
    await rig.drive(await rig.take(batch, "me")).run()
    done, _ = await rig.records.get(batch.batch_id)
    assert (done.status, done.errors[0].line, done.refusals) == (Status.FAILED, 1, [])


async def test_the_name_of_a_wrong_field_may_be_as_long_as_the_line(rig: Rig) -> None:
    content = json.dumps(completion("a", "hi", **{"x" * 2**21: 1})).encode() + b"\n"
    await rig.shelf.begin("file-2")
    for at in range(0, len(content), 2**20):
        await rig.shelf.append("file-2", at, content[at : at + 2**20])
    await rig.shelf.end(files_pb2.CloseFileRequest(file_id="file-2", bytes=len(content), purpose="batch"))
    batch = await rig.batch(input_file_id="file-2")
    await rig.drive(await rig.take(batch, "me")).run()
    done, _ = await rig.records.get(batch.batch_id)
    assert (done.status, done.errors[0].line, done.errors[0].param) == (Status.FAILED, 1, f"body.{'x' * 495}")


async def test_a_model_that_has_just_come_is_served(rig: Rig) -> None:
    now_s, worker = 100.0, scheduler_pb2.WorkerStatus(worker_id="a", model="gone", connected=True)

    async def fleet() -> scheduler_pb2.StatusResponse:
        return scheduler_pb2.StatusResponse(workers=[worker])

    served = Served(fleet, lambda: now_s)
    await served.view()
    worker.model, now_s = completion("", "")["body"]["model"], now_s + 1
    batch = await rig.batch()
    driving = asyncio.create_task(rig.drive(await rig.take(batch, "me"), served).run())

    async def validated() -> bool:
        return (await rig.records.get(batch.batch_id))[0].status is not Status.VALIDATING

    await wait_for_async(validated, "the validation")
    assert (await rig.records.get(batch.batch_id))[0].errors == []
    driving.cancel()


@pytest.mark.parametrize(("up_ns", "refused"), [(1, set()), (0, {"model_not_found"})])
async def test_a_model_whose_worker_may_not_be_back_yet_is_not_refused(rig: Rig, up_ns: int, refused: set[str]) -> None:
    other = scheduler_pb2.WorkerStatus(worker_id="a", model="other", connected=True)

    async def fleet() -> scheduler_pb2.StatusResponse:
        return scheduler_pb2.StatusResponse(workers=[other], up_ns=up_ns)

    batch = await rig.batch()
    driving = asyncio.create_task(rig.drive(await rig.take(batch, "me"), Served(fleet, time.monotonic)).run())

    async def validated() -> bool:
        return (await rig.records.get(batch.batch_id))[0].status is not Status.VALIDATING

    await wait_for_async(validated, "the validation")
    errors = (await rig.records.get(batch.batch_id))[0].errors
    assert {error.code for error in errors} == refused
    driving.cancel()


@pytest.mark.parametrize("status", [Status.VALIDATING, Status.IN_PROGRESS])
async def test_an_error_nobody_expected_in_a_line_fails_the_batch(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, status: Status
) -> None:
    def fail_at_3(ask: Any, batch: Batch) -> Any:
        if ask.line == 3:
            raise RuntimeError("a defect")
        return request_of(ask, batch)

    monkeypatch.setattr(reading, "request_of", fail_at_3)
    batch = await rig.batch(status=status, counts=Counts(LINES))
    await rig.drive(await rig.take(batch, "me")).run()
    done, _ = await rig.records.get(batch.batch_id)
    assert done.status is Status.FAILED
    assert [(one.line, one.code) for one in done.errors] == [(3, "internal_error")]
    assert [record.exc_text for record in caplog.records if "a defect" in str(record.exc_text)]
    assert f"{batch.batch_id}: line 3 cannot be understood" in caplog.messages


async def test_counts_grow_while_lines_are_still_submitted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submitting, "WINDOW_LINES", 10)
    monkeypatch.setattr(drive, "SAVE_S", 0.0)
    go_on = asyncio.Event()
    progress = Held.progress

    async def wait(self: Held, **fields: Any) -> None:
        await progress(self, **fields)
        await go_on.wait()

    monkeypatch.setattr(Held, "progress", wait)
    batch = await rig.batch()
    driving = asyncio.create_task(rig.drive(await rig.take(batch, "me")).run())
    await wait_for_async(lambda: _true_of(lambda: len(rig.keys()) == 10), "the first window")
    await rig.client.cancel(batch=batch.batch_id)

    async def seen() -> bool:
        found, _ = await rig.records.get(batch.batch_id)
        assert not found.progress.submitted
        return found.counts.failed == 10

    await wait_for_async(seen, "the counts of what has ended")
    go_on.set()

    async def submitted() -> bool:
        return (await rig.records.get(batch.batch_id))[0].progress.submitted

    await wait_for_async(submitted, "the rest")
    await rig.client.cancel(batch=batch.batch_id)
    await driving
    done, _ = await rig.records.get(batch.batch_id)
    assert (done.status, done.counts.failed, done.progress.line) == (Status.COMPLETED, LINES, LINES)


async def _true_of(fact: Callable[[], bool]) -> bool:
    return fact()


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


async def test_lines_that_find_no_room_until_the_time_is_over_are_not_submitted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submitting, "QUOTA_PAUSE_S", 0.02)
    rig.service.committer.post(SetQuotas({DEFAULT_TENANT: Quota(requests=4)}))
    batch = await rig.batch()
    driving = asyncio.create_task(rig.drive(held := await rig.take(batch, "me")).run())
    await wait_for_async(lambda: _true_of(lambda: len(rig.keys()) == 4), "the lines for which there is room")
    rig.service._clock._offset_ns += 3_600 * 10**9  # the queue's time and the gateway's: it is over
    held.now_s = lambda: float(batch.expires_at)
    await driving
    done, _ = await rig.records.get(batch.batch_id)
    assert (done.status, done.counts.failed, done.progress.cut) == (Status.EXPIRED, LINES, True)


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
    output = Output(rig.client, rig.shelf)
    lines = [json.loads(line) async for line in output.lines(done, errors=True, input_order=True)]
    ids = [line["custom_id"] for line in lines]
    assert sorted(ids) == sorted(f"line-{n}" for n in range(LINES))
    assert ids[:3] == ["line-0", "line-3", "line-7"], "in the order of the input too"
