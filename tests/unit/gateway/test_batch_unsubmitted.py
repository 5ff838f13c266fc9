"""Lines of a batch that were never submitted: named in its error file, a window of the input in a turn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import NotFound
from penstock.files.v1 import files_pb2
from services.gateway.batch import lines as batch_lines
from services.gateway.batch import output as batch_output
from services.gateway.batch.lines import RawLine, read_lines
from services.gateway.batch.output import Output
from services.gateway.batch.turns import Reader
from services.gateway.batches import cancelled
from services.gateway.core.batch import Counts, Status
from services.gateway.files import FILES_URL
from services.gateway.problem import Problem
from tests.support.asgi import get
from tests.support.waiting import wait_for_async
from tests.unit.gateway.test_batch_ends import driven_after_a_cancel
from tests.unit.gateway.test_drive import LINES, Rig, _true_of, rig
from tests.unit.gateway.test_files import app_of

__all__ = ["rig"]


async def test_a_batch_cancelled_before_its_input_was_read_has_each_line_in_its_error_file(rig: Rig) -> None:
    batch = await rig.batch()
    done = await driven_after_a_cancel(rig, batch)
    assert (done.counts.total, rig.keys()) == (LINES, [])
    content = [line async for line in Output(rig.client, rig.shelf).lines(done, errors=True)]
    assert [json.loads(line)["custom_id"] for line in content] == [f"line-{n}" for n in range(LINES)]
    assert (await rig.shelf.file(done.error_file_name)).bytes == sum(len(line) for line in content)


async def test_what_was_never_submitted_is_read_in_its_turn(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many batches may be cancelled, or late, at once."""
    batch = await rig.batch()
    await rig.records.change(batch.batch_id, cancelled)
    driven = rig.drive(await rig.take(batch, "me"))
    read = asyncio.Event()

    def noted(*args: Any) -> AsyncGenerator[RawLine, None]:
        read.set()
        return read_lines(*args)

    monkeypatch.setattr(batch_output, "read_lines", noted)
    async with driven._turns.to_read(Reader("another", 1, lambda: None)):
        driving = asyncio.create_task(driven.run())
        await wait_for_async(lambda: _true_of(lambda: driven._turns._reading.is_wanted), "its turn to be waited for")
        assert not read.is_set()
    await driving
    assert read.is_set()


async def test_who_takes_the_lines_slowly_has_no_turn(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_output, "WINDOW_LINES", 4)
    done = await driven_after_a_cancel(rig, await rig.batch())
    open_inputs: set[int] = set()

    async def noted(*args: Any) -> AsyncGenerator[RawLine, None]:
        open_inputs.add(id(args))
        try:
            async for raw in read_lines(*args):
                assert len(open_inputs) == 1
                yield raw
        finally:
            open_inputs.discard(id(args))

    monkeypatch.setattr(batch_output, "read_lines", noted)
    output = Output(rig.client, rig.shelf)
    slow = [output.lines(done, errors=True) for _ in range(3)]
    first = [await anext(lines) for lines in slow]
    assert not open_inputs
    whole = [line async for line in output.lines(done, errors=True)]
    assert [json.loads(line)["custom_id"] for line in whole] == [f"line-{n}" for n in range(LINES)]
    rests = await asyncio.gather(*(_all(lines) for lines in slow))
    assert [[one, *rest] for one, rest in zip(first, rests, strict=True)] == [whole] * 3


async def _all(lines: AsyncGenerator[bytes, None]) -> list[bytes]:
    return [line async for line in lines]


@pytest.mark.parametrize("input_order", [False, True])
async def test_what_of_an_ended_batch_was_submitted_is_not_asked_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, input_order: bool
) -> None:
    batch = await rig.batch(status=Status.IN_PROGRESS, counts=Counts(LINES))
    done = await driven_after_a_cancel(rig, batch)
    asked = 0

    async def noted(*_: object) -> None:
        nonlocal asked
        asked += 1
        raise NotFound("it is unknown")

    monkeypatch.setattr(rig.client, "wire_get_many", noted)
    content = await _all(Output(rig.client, rig.shelf).lines(done, True, input_order))
    assert (len(content), asked) == (LINES, 0)


async def test_an_input_that_was_never_read_may_have_wrong_lines_and_too_many(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b'{"custom_id": "a", "method": "GET"}\n{torn\n' + b"[]\n" * 10
    await rig.shelf.begin("file-2")
    await rig.shelf.append("file-2", 0, content)
    await rig.shelf.end(files_pb2.CloseFileRequest(file_id="file-2", bytes=len(content), purpose="batch"))
    monkeypatch.setattr(batch_output, "MAX_LINES", LINES - 20)
    batch = await rig.batch(input_file_id="file-2")
    await rig.records.change(batch.batch_id, cancelled)
    await rig.drive(await rig.take(batch, "me")).run()
    done, _ = await rig.records.get(batch.batch_id)
    assert (done.status, done.counts.total, done.counts.failed) == (Status.CANCELLED, LINES - 20, LINES - 20)
    assert await rig.error_ids(done) == ["a", "", "", "", ""]


async def test_a_line_that_a_defect_keeps_from_being_understood_is_told_of_in_the_log(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batch = await rig.batch()
    await rig.records.change(batch.batch_id, cancelled)

    def defective(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(batch_lines, "custom_id_of", defective)
    await rig.drive(await rig.take(batch, "me")).run()
    done, _ = await rig.records.get(batch.batch_id)
    assert (done.status, done.counts.failed) == (Status.CANCELLED, LINES)
    assert "line 1 cannot be understood" in caplog.text


async def test_an_error_file_fails_once_its_lines_cannot_be_read_any_more(rig: Rig) -> None:
    """And not one whose lines were all submitted, or have all been told."""
    done = await driven_after_a_cancel(rig, await rig.batch())
    output = Output(rig.client, rig.shelf)
    await rig.shelf.delete(done.input_file_id)
    for input_order in (False, True):
        with pytest.raises(Problem) as problem:
            await _all(output.lines(done, True, input_order, whole=True))
        assert (problem.value.status, problem.value.error["code"]) == (404, "file_not_found")
        assert done.input_file_id in problem.value.error["message"]
    content = await get(app_of(rig), f"{FILES_URL}/{done.error_file_name}/content").whole()
    assert (content.status, content.json()["error"]["code"]) == (404, "file_not_found")
    assert await output.size(done, errors=True) == (0, 0), "what is counted of a batch is what there is"
    submitted = replace(done, progress=replace(done.progress, submitted=True))
    told = replace(done, counts=replace(done.counts, failed=0))
    for batch in (submitted, told):
        assert await _all(output.lines(batch, errors=True, whole=True)) == []
    assert await _all(output.lines(done, errors=False, whole=True)) == []
