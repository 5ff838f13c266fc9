"""How batches end when something else happens at the same time: each line in one place, each end in its time."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import aclosing
from typing import Any

import pytest

from penstock.queue.v1.queue_pb2 import GetRequest, IdempotencyKey
from penstock.request.v1 import request_pb2
from penstock.request.v1.request_pb2 import Request
from services.gateway.batch import ending, submitting
from services.gateway.batch import output as batch_output
from services.gateway.batch.drive import Drive
from services.gateway.batch.lines import ask_of, key_of, read_lines, request_of
from services.gateway.batch.output import Output
from services.gateway.batch.records import ChangedError, LeaseLostError
from services.gateway.batch.submitting import Submitting
from services.gateway.batch.turns import Reader
from services.gateway.batches import cancelled
from services.gateway.core.batch import Batch, Counts, Refusal, Status
from services.gateway.shelf import Shelf
from services.queue import wire
from services.queue.core.effects import Write
from services.queue.core.entry import DEFAULT_TENANT, LeaseRef
from services.queue.core.lifecycle import Outcome
from services.queue.core.messages import Claim, Complete, SetQuotas, WorkerOpened
from services.queue.core.quotas import Quota
from services.queue.core.records import PARTS
from services.queue.files.rows import part_key
from tests.support.batch_lines import completion
from tests.support.waiting import wait_for_async
from tests.unit.gateway import test_drive
from tests.unit.gateway.test_drive import LINES, URL, Rig, _true_of, rig

__all__ = ["rig"]


async def test_a_cancel_that_is_repeated_does_not_hold_up_the_end(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    tallied = 0
    tally = Drive._tally

    async def repeat(self: Drive, follow: bool) -> None:
        nonlocal tallied
        tallied += 1
        await tally(self, follow)
        await rig.records.change(self._batch.batch_id, cancelled)

    monkeypatch.setattr(Drive, "_tally", repeat)
    batch = await rig.batch(status=Status.IN_PROGRESS, counts=Counts(LINES))
    held = await rig.take(batch, "me")
    await rig.records.change(batch.batch_id, cancelled)
    with pytest.raises(ChangedError):
        await held.save()
    async with asyncio.timeout(30):
        await rig.drive(held).run()
    assert tallied == 1
    _, revision = await rig.records.get(batch.batch_id)
    await rig.records.change(batch.batch_id, cancelled)
    assert (await rig.records.get(batch.batch_id))[1] == revision


@pytest.mark.parametrize(
    "fields", [{}, {"status": Status.IN_PROGRESS, "counts": Counts(LINES)}], ids=["validating", "in_progress"]
)
async def test_a_batch_whose_time_is_over_before_its_turn_ends(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    ending_begun = asyncio.Event()
    end = ending.Ending.of

    def noted(*args: Any) -> Any:
        ending_begun.set()
        return end(*args)

    monkeypatch.setattr(ending.Ending, "of", noted)
    batch = await rig.batch(expires_at=int(time.time()) + 1, **fields)
    driven = rig.drive(await rig.take(batch, "me"))
    async with driven._turns.to_submit(Reader(batch.tenant, 1, lambda: None)):
        driving = asyncio.create_task(driven.run())
        await wait_for_async(lambda: _true_of(ending_begun.is_set), "its end to begin")
    await driving
    done, _ = await rig.records.get(batch.batch_id)
    assert (done.status, done.counts.total, done.counts.failed, rig.keys()) == (Status.EXPIRED, LINES, LINES, [])
    lines = [line async for line in Output(rig.client, rig.shelf).lines(done, errors=True)]
    names = [json.loads(line)["custom_id"] for line in lines]
    assert names == [f"line-{n}" for n in range(LINES)]
    assert (await rig.shelf.file(done.error_file_name)).bytes == sum(len(line) for line in lines)


async def test_a_cancel_in_the_moment_of_the_end_leaves_files_of_the_size_they_say(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of an expired batch are there, and a client cancels before the batch says so."""
    put = batch_output.put_view

    async def put_and_cancel(shelf: Shelf, batch: Batch, file_id: str, kind: str, size_bytes: int) -> None:
        await put(shelf, batch, file_id, kind, size_bytes)
        await rig.records.change(batch.batch_id, cancelled)

    monkeypatch.setattr(ending, "put_view", put_and_cancel)
    now_s = int(time.time())
    batch = await rig.batch(status=Status.IN_PROGRESS, counts=Counts(LINES), expires_at=now_s - 1)
    async with asyncio.timeout(30):
        await rig.drive(await rig.take(batch, "me")).run()
    done, _ = await rig.records.get(batch.batch_id)
    assert (done.status, done.counts.failed) == (Status.CANCELLED, LINES)
    content = b"".join([line async for line in Output(rig.client, rig.shelf).lines(done, errors=True)])
    assert (await rig.shelf.file(done.error_file_name)).bytes == len(content) == done.counts.error_bytes


async def test_a_batch_whose_time_is_over_ends_though_its_input_is_damaged(rig: Rig) -> None:
    batch = await rig.batch(status=Status.IN_PROGRESS, counts=Counts(LINES), expires_at=int(time.time()) - 1)
    rig.service._shelf._store.write([Write(PARTS, part_key("file-1", 0), None)])
    async with asyncio.timeout(30):
        await rig.drive(await rig.take(batch, "me")).run()
    assert (await rig.records.get(batch.batch_id))[0].status is Status.EXPIRED


@pytest.mark.parametrize("status", [Status.VALIDATING, Status.IN_PROGRESS, Status.CANCELLING])
async def test_a_batch_whose_input_is_damaged_ends_and_says_so(rig: Rig, status: Status) -> None:
    batch = await rig.batch(status=status, counts=Counts(LINES))
    rig.service._shelf._store.write([Write(PARTS, part_key("file-1", 0), None)])
    async with asyncio.timeout(30):
        await rig.drive(await rig.take(batch, "me")).run()
    done, _ = await rig.records.get(batch.batch_id)
    if status is Status.CANCELLING:
        assert done.status is Status.CANCELLED
    else:
        assert (done.status, done.errors[0].code) == (Status.FAILED, "file_damaged")


async def test_what_ended_twice_is_in_the_sizes_once(rig: Rig) -> None:
    """A line became a dead letter, was counted, and requeued."""
    counts = Counts(LINES, failed=1, error_bytes=1000)
    batch = await rig.batch(status=Status.IN_PROGRESS, counts=counts, expires_at=int(time.time()) - 1)
    async with asyncio.timeout(30):
        await rig.drive(await rig.take(batch, "me")).run()
    done, _ = await rig.records.get(batch.batch_id)
    lines = [line async for line in Output(rig.client, rig.shelf).lines(done, errors=True)]
    assert (done.status, done.counts.failed, len(lines)) == (Status.EXPIRED, LINES, LINES)
    size = sum(len(line) for line in lines)
    assert (await rig.shelf.file(done.error_file_name)).bytes == size == done.counts.error_bytes


async def driven_after_a_cancel(rig: Rig, batch: Batch) -> Batch:
    """Cancel a batch and drive it to its end, in which every line is in the error file; return it."""
    await rig.records.change(batch.batch_id, cancelled)
    async with asyncio.timeout(30):
        await rig.drive(await rig.take(batch, "me")).run()
    done, _ = await rig.records.get(batch.batch_id)
    assert (done.status, done.counts.failed) == (Status.CANCELLED, LINES)
    return done


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"client_reference": "mine"},
        {"client_reference": 'x\n[2, "line-1"]'},
        {"client_reference": "x\n2"},
        {"client_reference": "x\n" + "[" * 4000},
    ],
    ids=["none", "another", "a-line's", "a-number", "nested"],
)
async def test_what_a_client_submits_under_the_name_of_a_batch_is_not_of_its_lines(
    rig: Rig, fields: dict[str, Any]
) -> None:
    batch = await rig.batch(status=Status.IN_PROGRESS, counts=Counts(LINES))
    lines = [raw async for raw in read_lines(rig.shelf, batch.input_file_id)]
    line = request_of(ask_of(lines[0], batch.endpoint, ()), batch)
    foreign = Request(text="hi", batch=batch.batch_id, idempotency_key="mine", channel="batch", **fields)
    async with aclosing(rig.client.submit_many([foreign, line])) as acks:
        assert [ack.error async for ack in acks] == [None, None]
    done = await driven_after_a_cancel(rig, batch)
    for input_order in (False, True):
        content = [one async for one in Output(rig.client, rig.shelf).lines(done, True, input_order)]
        names = [json.loads(one)["custom_id"] for one in content]
        assert sorted(names) == sorted(f"line-{n}" for n in range(LINES))
        assert sum(len(one) for one in content) == done.counts.error_bytes
    await Output(rig.client, rig.shelf).delete(done, errors=True)
    assert (await rig.client.wire_get(GetRequest(idempotency_key=IdempotencyKey(key="mine")))).HasField("result")


@pytest.mark.parametrize("frozen", ["before its window", "in its window"])
async def test_a_gateway_that_was_frozen_leaves_nothing_behind_in_a_cancelled_batch(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, frozen: str
) -> None:
    """It goes on when another gateway has taken its batch and ended it; what it was about to submit is not wanted."""
    batch = await rig.batch(status=Status.IN_PROGRESS, counts=Counts(LINES))
    first = await rig.take(batch, "first")
    name = "send" if frozen == "before its window" else "_send_once"
    send, submitted = getattr(Submitting, name), 0

    async def freeze(self: Submitting, *args: Any) -> Any:
        nonlocal submitted
        monkeypatch.setattr(Submitting, name, send)
        await rig.records.change(batch.batch_id, cancelled)
        await rig.drive(await rig.take(batch, "second", ahead_s=11)).run()
        first.now_s = lambda: time.time() + 11
        try:
            return await send(self, *args)
        finally:
            submitted = len(rig.keys())

    monkeypatch.setattr(Submitting, name, freeze)
    with pytest.raises(LeaseLostError):
        await rig.drive(first).run()
    assert submitted == (0 if frozen == "before its window" else LINES)
    assert rig.keys() == []
    assert (await rig.records.get(batch.batch_id))[0].status is Status.CANCELLED


async def test_what_was_refused_once_is_not_submitted_later(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line is larger than its quota; the gateway dies while others wait for room, and the quota is lifted."""
    monkeypatch.setattr(submitting, "QUOTA_PAUSE_S", 0.05)

    def line(name: str, text: str) -> dict[str, Any]:
        return completion(name, "x" * 2000 if name == "line-0" else text)

    monkeypatch.setattr(test_drive, "completion", line)
    rig.service.committer.post(SetQuotas({DEFAULT_TENANT: Quota(requests=3, bytes=1500)}))
    batch = await rig.batch(status=Status.IN_PROGRESS, counts=Counts(LINES))
    first = asyncio.create_task(rig.drive(await rig.take(batch, "first")).run())

    async def refused() -> bool:
        return bool((await rig.records.get(batch.batch_id))[0].refusals)

    await wait_for_async(refused, "the refusal")
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    rig.service.committer.post(SetQuotas({}))
    second = asyncio.create_task(rig.drive(await rig.take(batch, "second", ahead_s=11)).run())

    async def submitted() -> bool:
        return (await rig.records.get(batch.batch_id))[0].progress.submitted

    await wait_for_async(submitted, "the submission")
    await rig.records.change(batch.batch_id, cancelled)
    await second
    done, _ = await rig.records.get(batch.batch_id)
    assert sorted(await rig.error_ids(done)) == sorted(f"line-{n}" for n in range(LINES))
    assert done.counts.failed == LINES


async def test_a_window_may_lie_behind_what_was_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lines are refused, and of the two behind them, which are a window, a quota lets in the second alone."""
    monkeypatch.setattr(batch_output, "WINDOW_LINES", 2)
    refusals = [Refusal(number, f"line-{number - 1}", "invalid_request", "no") for number in (1, 2)]
    batch = await rig.batch(status=Status.IN_PROGRESS, counts=Counts(LINES), refusals=refusals)
    lines = [raw async for raw in read_lines(rig.shelf, batch.input_file_id)]
    request = request_of(ask_of(lines[3], batch.endpoint, ()), batch)
    async with aclosing(rig.client.submit_many([request])) as acks:
        assert [ack.error async for ack in acks] == [None]
    done = await driven_after_a_cancel(rig, batch)
    for input_order in (False, True):
        content = Output(rig.client, rig.shelf).lines(done, errors=True, input_order=input_order)
        names = [json.loads(line)["custom_id"] async for line in content]
        assert sorted(names) == sorted(f"line-{n}" for n in range(LINES))


async def test_a_line_whose_result_was_deleted_is_not_told_as_one_that_was_never_run(rig: Rig) -> None:
    """Deleting the output file of a batch that ended with such holes leaves its error file as it was."""
    batch = await rig.batch(status=Status.IN_PROGRESS, counts=Counts(LINES))
    held = await rig.take(batch, "me")
    asked = [request_of(ask_of(raw, URL, ()), batch) async for raw in read_lines(rig.shelf, "file-1")]
    names = [ack.request_id async for ack in rig.client.submit_many([asked[0], asked[1], asked[3]])]
    committer = rig.service.committer
    committer.post(WorkerOpened(9, "w", "i", ()))
    result = request_pb2.Result(choices=[request_pb2.Choice(text="ok")], outcome=request_pb2.OUTCOME_COMPLETED)
    for token, name in enumerate(names, 1):
        committer.post(Claim(9, name))
        committer.post(Complete(9, LeaseRef(name, 1, token), Outcome.COMPLETED, None, wire.RunResult(result)))
    await wait_for_async(lambda: _true_of(lambda: not committer.machine.book.entries), "their ends")
    await rig.records.change(batch.batch_id, cancelled)
    with pytest.raises(ChangedError):
        await held.save()
    await rig.drive(held).run()
    done, _ = await rig.records.get(batch.batch_id)
    assert (done.counts.completed, done.counts.failed, done.progress.line) == (3, LINES - 3, 2)
    before = await rig.error_ids(done)
    assert "line-3" not in before
    await Output(rig.client, rig.shelf).delete(done, errors=False)
    assert await rig.error_ids(done) == before


async def check_whole(rig: Rig, batch: Batch, without_result: list[str]) -> None:
    """Check that each line is in the error file of a batch of which nothing was answered, these with an error of it."""
    assert (batch.counts.total, batch.counts.failed) == (LINES, LINES)
    for input_order in (False, True):
        content = [one async for one in Output(rig.client, rig.shelf).lines(batch, True, input_order)]
        lines = {line["custom_id"]: line["response"] for line in map(json.loads, content)}
        assert (sorted(lines), len(content)) == (sorted(f"line-{n}" for n in range(LINES)), LINES)
        told = [name for name, response in lines.items() if response]
        assert sorted(told) == without_result
        assert {lines[name]["body"]["error"]["code"] for name in told} == {"no_result"}
        assert sum(len(one) for one in content) == batch.counts.error_bytes


@pytest.mark.parametrize("cut", [False, True], ids=["completed", "cancelled"])
async def test_a_line_whose_key_is_another_requests_is_in_the_error_file(rig: Rig, cut: bool) -> None:
    batch = await rig.batch(status=Status.IN_PROGRESS, counts=Counts(LINES))
    others = [Request(text="hi", idempotency_key=key_of(batch.batch_id, line), channel="batch") for line in (3, 7)]
    taken = [ack.request_id async for ack in rig.client.submit_many(others)]
    if cut:
        done = await driven_after_a_cancel(rig, batch)
    else:
        driving = asyncio.create_task(rig.drive(await rig.take(batch, "me")).run())
        await wait_for_async(lambda: _true_of(lambda: len(rig.keys()) == LINES), "the submission")
        await rig.client.cancel(*taken)
        await rig.client.cancel(batch=batch.batch_id)
        async with asyncio.timeout(30):
            await driving
        done, _ = await rig.records.get(batch.batch_id)
        assert done.status is Status.COMPLETED
    await check_whole(rig, done, ["line-2", "line-6"])


async def test_a_line_whose_result_was_deleted_before_it_was_counted_is_in_the_error_file(rig: Rig) -> None:
    batch = await rig.batch(status=Status.IN_PROGRESS, counts=Counts(LINES))
    lines = [raw async for raw in read_lines(rig.shelf, "file-1")]
    asked = [request_of(ask_of(raw, URL, ()), batch) for raw in lines]
    names = [ack.request_id async for ack in rig.client.submit_many(asked)]
    held = await rig.take(batch, "me")
    await held.progress(submitted=True, line=lines[-1].number, offset=lines[-1].end)
    await rig.client.cancel(batch=batch.batch_id)
    assert await rig.client.delete(names[4]) == 1
    async with asyncio.timeout(30):
        await rig.drive(held).run()
    done, _ = await rig.records.get(batch.batch_id)
    assert done.status is Status.COMPLETED
    await check_whole(rig, done, ["line-4"])


async def test_a_record_has_room_for_so_many_lines_without_result() -> None:
    batch = Batch("batch_1", URL, "file-1", "24h", 1, 2, "batch")
    few, many = ([Refusal(n, name * 512, *batch_output.NO_RESULT) for n in range(2000)] for name in ("a", "\x01"))
    assert len(ending.with_as_many(batch, few).refusals) == submitting.MAX_REFUSALS
    row = ending.with_as_many(batch, many).to_row()
    assert submitting.MAX_ROW_BYTES / 3 < len(row) <= submitting.MAX_ROW_BYTES
