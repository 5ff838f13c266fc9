"""Lines of a batch that has ended, requeued by an operator: each in one file, and what is said of the files true."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2
from services.gateway.batch.lines import Numbers, ask_of, read_lines, request_of
from services.gateway.batch.output import Output
from services.gateway.batches import BATCHES_URL
from services.gateway.console.lookout import _summary
from services.gateway.core.batch import Batch, Counts, Status
from services.gateway.files import FILES_URL
from services.gateway.intake import ClientGoneError
from services.gateway.limits import MAX_COUNTING
from services.queue import wire
from services.queue.core.entry import Failure, LeaseRef
from services.queue.core.lifecycle import Outcome
from services.queue.core.messages import Claim, Complete, WorkerOpened
from tests.support.asgi import get, post
from tests.support.waiting import wait_for_async
from tests.unit.gateway.test_drive import LINES, URL, Rig, _true_of, rig
from tests.unit.gateway.test_files import app_of

__all__ = ["rig"]

WORKER = 9
ATTEMPTS = 2
"""Of a request, as the rig's queue has it."""


@dataclass
class Ended:
    """A batch that has ended, of whose lines some are dead letters, and the one worker there is."""

    rig: Rig
    batch: Batch
    names: list[str]
    """Of the requests, by line."""
    leases: dict[str, int] = field(default_factory=dict)
    """Attempts of each."""
    token: int = 0

    @classmethod
    async def with_dead(cls, rig: Rig, dead: int) -> Ended:
        batch = await rig.batch(status=Status.IN_PROGRESS, counts=Counts(LINES))
        requests = [request_of(ask_of(raw, URL, ()), batch) async for raw in read_lines(rig.shelf, "file-1")]
        ended = cls(rig, batch, [ack.request_id async for ack in rig.client.submit_many(requests)])
        rig.service.committer.post(WorkerOpened(WORKER, "w", "i", ()))
        for number, name in enumerate(ended.names):
            ended.kill(name) if number < dead else ended.answer(name)
        await ended.all_ended(dead)
        await rig.drive(await rig.take(batch, "me")).run()
        return ended

    def _lease(self, name: str) -> LeaseRef:
        self.token += 1
        self.leases[name] = self.leases.get(name, 0) + 1
        self.rig.service.committer.post(Claim(WORKER, name))
        return LeaseRef(name, self.leases[name], self.token)

    def answer(self, name: str) -> None:
        choice = request_pb2.Choice(text="ok")
        result = request_pb2.Result(choices=[choice], outcome=request_pb2.OUTCOME_COMPLETED)
        lease = self._lease(name)
        self.rig.service.committer.post(Complete(WORKER, lease, Outcome.COMPLETED, None, wire.RunResult(result)))

    def kill(self, name: str) -> None:
        for _ in range(ATTEMPTS):
            failure = Failure("engine_error", "it broke")
            self.rig.service.committer.post(Complete(WORKER, self._lease(name), None, failure, None))

    async def all_ended(self, dead: int) -> None:
        book = self.rig.service.committer.machine.book
        await wait_for_async(lambda: _true_of(lambda: len(book.dead) == len(book.entries) == dead), "the ends")

    async def shown(self) -> dict[str, Any]:
        return dict((await get(app_of(self.rig), f"{BATCHES_URL}/{self.batch.batch_id}").whole()).json())

    async def counts(self) -> tuple[int, int]:
        counts = (await self.shown())["request_counts"]
        assert counts["total"] == LINES
        return counts["completed"], counts["failed"]

    async def file(self, file_id: str, order: str = "completion") -> dict[str, Any]:
        """Return the lines of a file by custom_id; it has as many bytes as is said of it."""
        content = await get(app_of(self.rig), f"{FILES_URL}/{file_id}/content?order={order}").whole()
        said = (await get(app_of(self.rig), f"{FILES_URL}/{file_id}").whole()).json()
        assert (content.status, said["bytes"]) == (200, len(content.body))
        lines = [json.loads(line) for line in content.body.splitlines()]
        assert len({line["custom_id"] for line in lines}) == len(lines)
        return {line["custom_id"]: line for line in lines}


async def test_a_requeued_line_is_an_error_until_it_is_answered_and_an_answer_then(rig: Rig) -> None:
    ended = await Ended.with_dead(rig, 3)
    errors, output = ended.batch.error_file_name, ended.batch.output_file_name
    assert set(await ended.file(errors)) == {"line-0", "line-1", "line-2"}
    first, second, _ = ended.names[:3]
    assert (await rig.client.requeue(first, second)).requeued == 2
    for order in ("completion", "input"):
        found = await ended.file(errors, order)
        assert set(found) == {"line-0", "line-1", "line-2"}
        assert [found[f"line-{n}"]["response"] for n in range(2)] == [None, None]
        assert found["line-0"]["error"]["code"] == "requeued"
        assert found["line-2"]["response"]["status_code"] == 500
        assert len(await ended.file(output, order)) == LINES - 3
    assert await ended.counts() == (LINES - 3, 3)
    ended.answer(first)
    ended.kill(second)
    await ended.all_ended(2)
    assert await ended.counts() == (LINES - 2, 2)
    for order in ("completion", "input"):
        assert set(await ended.file(errors, order)) == {"line-1", "line-2"}
        assert len(await ended.file(output, order)) == LINES - 2
    assert await ended.counts() == (LINES - 2, 2), "told again, counted once"
    listed = {one["id"]: one["bytes"] for one in (await get(app_of(rig), FILES_URL).whole()).json()["data"]}
    done, _ = await rig.records.get(ended.batch.batch_id)
    assert (listed[errors], listed[output]) == (done.counts.error_bytes, done.counts.output_bytes)


async def test_a_line_requeued_before_the_log_is_read_stays_in_the_error_file(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = await Ended.with_dead(rig, 3)
    real = rig.client.wire_ended

    async def wire_ended(*asked: Any) -> AsyncGenerator[queue_pb2.WatchEvent, None]:
        """Say what the queue does if that happens when it has looked at what is under way, and not yet at the log."""
        before = [event async for event in real(*asked) if event.HasField("progress")]
        await rig.client.requeue(ended.names[0])
        for event in before:
            yield event
        async for event in real(*asked):
            if not event.HasField("progress"):
                yield event

    done, _ = await rig.records.get(ended.batch.batch_id)
    monkeypatch.setattr(rig.client, "wire_ended", wire_ended)
    assert sorted(await rig.error_ids(done)) == ["line-0", "line-1", "line-2"]


@pytest.mark.parametrize("errors", [True, False])
async def test_a_line_that_is_requeued_and_ends_again_while_a_file_is_sent_is_in_it_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, errors: bool
) -> None:
    ended = await Ended.with_dead(rig, 3)
    real = rig.client.wire_ended

    async def wire_ended(*asked: Any) -> AsyncGenerator[queue_pb2.WatchEvent, None]:
        """Say what the queue does if all that happens between two pages of the log."""
        cursor = 0
        async for event in real(*asked):
            cursor = max(cursor, event.result.cursor)
            yield event
        await rig.client.requeue(*ended.names[:2])
        ended.kill(ended.names[0])
        ended.answer(ended.names[1])
        await ended.all_ended(2)
        async for event in real(ended.batch.batch_id, cursor):
            yield event

    done, _ = await rig.records.get(ended.batch.batch_id)
    monkeypatch.setattr(rig.client, "wire_ended", wire_ended)
    lines = [json.loads(line)["custom_id"] async for line in Output(rig.client, rig.shelf).lines(done, errors)]
    answered = [f"line-{n}" for n in (1, *range(3, LINES))]
    assert sorted(lines) == sorted(["line-0", "line-1", "line-2"] if errors else answered)


async def test_what_the_output_file_is_written_from_is_not_remembered(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = await Ended.with_dead(rig, 3)
    done, _ = await rig.records.get(ended.batch.batch_id)
    remembered: list[int] = []
    monkeypatch.setattr(Numbers, "add", lambda _numbers, line: remembered.append(line))
    lines = [line async for line in Output(rig.client, rig.shelf).lines(done, errors=False)]
    assert (len(lines), remembered) == (LINES - 3, [])
    await rig.error_ids(done)
    assert sorted(remembered) == list(range(1, LINES + 1))


async def test_only_lines_whose_end_the_log_does_not_have_are_looked_up(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = await Ended.with_dead(rig, 3)
    real = rig.client.wire_get_many
    asked: list[str] = []

    async def wire_get_many(request: queue_pb2.GetManyRequest) -> queue_pb2.GetManyResponse:
        asked.extend(request.keys)
        return await real(request)

    done, _ = await rig.records.get(ended.batch.batch_id)
    monkeypatch.setattr(rig.client, "wire_get_many", wire_get_many)
    await rig.client.requeue(ended.names[1])
    assert len(await rig.error_ids(done)) == 3
    assert asked == [f"{ended.batch.batch_id}:2"]
    ended.kill(ended.names[1])
    await ended.all_ended(3)
    await Output(rig.client, rig.shelf).delete(done, errors=False)
    asked.clear()
    assert len(await rig.error_ids(done)) == 3
    assert asked == [], "what is gone from the output is not looked for"


async def test_an_output_file_that_was_deleted_stays_so(rig: Rig) -> None:
    ended = await Ended.with_dead(rig, 3)
    app, output = app_of(rig), f"{FILES_URL}/{ended.batch.output_file_name}"
    assert (await get(app, output, method="DELETE").whole()).json()["deleted"]
    await rig.client.requeue(ended.names[0])
    ended.answer(ended.names[0])
    await ended.all_ended(2)
    assert await ended.counts() == (LINES - 2, 2)
    assert (await get(app, output).whole()).status == 404
    assert set(await ended.file(ended.batch.error_file_name)) == {"line-1", "line-2"}


async def test_the_answers_of_a_batch_all_of_which_was_dead_have_a_file(rig: Rig) -> None:
    ended = await Ended.with_dead(rig, LINES)
    shown = await ended.shown()
    assert (shown["output_file_id"], shown["error_file_id"]) == (None, ended.batch.error_file_name)
    assert (await rig.client.requeue(all_dead=True)).requeued == LINES
    for name in ended.names:
        ended.answer(name)
    await ended.all_ended(0)
    (shown,) = (await get(app_of(rig), BATCHES_URL).whole()).json()["data"]
    assert (shown["output_file_id"], shown["error_file_id"]) == (ended.batch.output_file_name, None)
    assert await ended.counts() == (LINES, 0)
    assert len(await ended.file(ended.batch.output_file_name)) == LINES
    assert await ended.file(ended.batch.error_file_name) == {}


async def test_however_many_ask_few_batches_are_counted_again_at_once_and_for_nobody_who_has_hung_up(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes a watch, and everybody's batches and downloads share those of the gateway."""
    ended = await Ended.with_dead(rig, 1)
    real, gate = rig.client.wire_ended, asyncio.Event()
    asked = under_way = most = 0

    async def wire_ended(*args: Any) -> AsyncGenerator[queue_pb2.WatchEvent, None]:
        nonlocal asked, under_way, most
        asked, under_way = asked + 1, under_way + 1
        most = max(most, under_way)
        try:
            await gate.wait()
            async for event in real(*args):
                yield event
        finally:
            under_way -= 1

    monkeypatch.setattr(rig.client, "wire_ended", wire_ended)
    app = app_of(rig)
    paths = (BATCHES_URL, f"{BATCHES_URL}/{ended.batch.batch_id}", f"{FILES_URL}/{ended.batch.output_file_name}")
    visits = [get(app, path) for path in paths for _ in range(6)]
    gone = [get(app, path) for path in paths for _ in range(6)]
    await wait_for_async(lambda: _true_of(lambda: under_way == MAX_COUNTING - 1), "all that one tenant may have")
    for visit in gone:
        visit.leave()
    ends = await asyncio.gather(*[visit.task for visit in gone], return_exceptions=True)
    assert {type(end) for end in ends} == {ClientGoneError, type(None)}
    assert {visit.answer.status for visit in gone[:6]} == {0}, "nothing of a list"
    gate.set()
    assert {(await visit.whole()).status for visit in visits} == {200}
    assert (most, asked) == (MAX_COUNTING - 1, len(visits))


async def test_a_cancel_of_a_batch_that_ended_otherwise_is_refused_and_one_said_twice_answered(rig: Rig) -> None:
    ended = await Ended.with_dead(rig, 0)
    path = f"{BATCHES_URL}/{ended.batch.batch_id}/cancel"
    refused = await post(app_of(rig), path, {}).whole()
    assert (refused.status, refused.json()["error"]["code"]) == (409, "batch_not_cancellable")
    await rig.shelf.delete("file-1")
    batch = await rig.batch(status=Status.CANCELLED, stamps={"cancelled_at": 1})
    again = await post(app_of(rig), f"{BATCHES_URL}/{batch.batch_id}/cancel", {}).whole()
    assert (again.status, again.json()["status"]) == (200, "cancelled")


def test_counts_of_a_batch_that_runs_are_never_more_than_its_lines() -> None:
    batch = Batch("batch_a", URL, "file-1", "24h", 0, 1, "batch", counts=Counts(100, completed=85, failed=77))
    assert batch.to_object()["request_counts"] == {"total": 100, "completed": 85, "failed": 15}
    summary = _summary(batch)
    assert (summary["total"], summary["completed"], summary["failed"]) == (100, 85, 15)


def test_a_record_that_says_nothing_of_dead_letters_may_have_some() -> None:
    batch = Batch("batch_a", URL, "file-1", "24h", 0, 1, "batch", counts=Counts(100, completed=85, failed=15))
    row = json.loads(batch.to_row())
    del row["counts"]["dead"]
    assert Batch.from_row(json.dumps(row).encode()).counts.dead == 15
