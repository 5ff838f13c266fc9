"""An input that has no lines for long: reading it keeps neither the loop nor the turn from others."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from penstock.files.v1 import files_pb2
from penstock.queue.v1 import queue_pb2
from services.gateway.batch import output, submitting
from services.gateway.batch import turns as batch_turns
from services.gateway.batch.ending import Ending
from services.gateway.batch.errors import RefusedError
from services.gateway.batch.lines import PIECE_BYTES
from services.gateway.batch.output import Output
from services.gateway.batch.reading import count_lines
from services.gateway.batch.turns import Reader, Turn, Turns
from services.gateway.batches import cancelled
from services.gateway.core.batch import Batch, Counts, Progress, Status
from tests.support.batch_lines import completion
from tests.support.waiting import wait_for_async
from tests.unit.gateway.test_drive import Rig, _true_of, rig

__all__ = ["rig"]

PIECES, WINDOW_PIECES = 16, 2
BATCH = Batch("batch_1", "/v1/completions", "file-1", "24h", 0, 3600, "batch", counts=Counts(3))


class OneFile:
    """The part of a shelf that reads."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    async def content(self, _file_id: str, offset: int) -> AsyncGenerator[bytes, None]:
        yield self._content[offset:]


class OneAnswer:
    """The part of a client that looks for results."""

    async def wire_get(self, _request: queue_pb2.GetRequest) -> queue_pb2.GetResponse:
        return queue_pb2.GetResponse()

    async def wire_get_many(self, request: queue_pb2.GetManyRequest) -> queue_pb2.GetManyResponse:
        return queue_pb2.GetManyResponse(requests=[queue_pb2.GetResponse()] * len(request.keys))


CLIENT: Any = OneAnswer()


async def validated(shelf: Any, turns: Turns, turn: Turn) -> None:
    async with turn:
        with suppress(RefusedError):
            await count_lines(shelf, BATCH, (), turn)


async def named(shelf: Any, turns: Turns, turn: Turn) -> None:
    async for _ in Output(CLIENT, shelf, turns).unsubmitted(BATCH, False, turn):
        pass


async def unanswered(shelf: Any, turns: Turns, turn: Turn) -> None:
    batch = replace(BATCH, progress=Progress(PIECES * PIECE_BYTES + 1, submitted=True))
    await Output(CLIENT, shelf, turns).unanswered(batch, 3, turn)


async def scattered(shelf: Any, turns: Turns, turn: Turn) -> None:
    await Output(CLIENT, shelf, turns).scattered(BATCH)


async def settled(shelf: Any, turns: Turns, turn: Turn) -> None:
    await Ending(CLIENT, shelf, turns)._settled(BATCH, turn)


Read = Callable[[Any, Turns, Turn], Coroutine[Any, Any, None]]


@pytest.mark.parametrize("read", [validated, named, unanswered, scattered, settled])
@pytest.mark.parametrize("content", [b"\n", b" \t\r\n", b"x"], ids=["line breaks", "blank lines", "one long line"])
async def test_others_have_the_loop_after_each_piece_and_the_turn_after_each_window(
    read: Read, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (batch_turns, output):
        monkeypatch.setattr(module, "WINDOW_BYTES", WINDOW_PIECES * PIECE_BYTES)
    turns, had = Turns(), {"loop": 0, "turn": 0}

    async def loop() -> None:
        while True:
            had["loop"] += 1
            await asyncio.sleep(0)

    async def other() -> None:
        while True:
            async with turns.to_read(Reader("other", 0, lambda: None)):
                had["turn"] += 1
                await asyncio.sleep(0)

    others = [asyncio.create_task(loop()), asyncio.create_task(other())]
    shelf = OneFile(content * (PIECES * PIECE_BYTES // len(content)))
    await read(shelf, turns, turns.to_read(Reader("", 0, lambda: None)))
    for task in others:
        task.cancel()
    assert had["loop"] >= PIECES
    assert had["turn"] >= PIECES // WINDOW_PIECES - 1


async def _between_blanks(rig: Rig, **fields: Any) -> Batch:
    """Put a batch of two lines with windows of blank ones before, between and behind them."""
    blanks = b"\n" * (3 * PIECE_BYTES)
    first, second = (json.dumps(completion(name, "hi")).encode() for name in ("first", "second"))
    content = blanks + first + blanks + second + blanks
    await rig.shelf.begin("file-2")
    await rig.shelf.append("file-2", 0, content)
    await rig.shelf.end(files_pb2.CloseFileRequest(file_id="file-2", bytes=len(content), purpose="batch"))
    return await rig.batch(input_file_id="file-2", **fields)


NUMBERS = [3 * PIECE_BYTES + 1, 6 * PIECE_BYTES + 1]
"""Of the two lines."""


async def test_lines_between_blank_ones_are_submitted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submitting, "WINDOW_BYTES", PIECE_BYTES)
    batch = await _between_blanks(rig)
    driven = rig.drive(await rig.take(batch, "me"))
    passed = 0
    pass_on = Turn.pass_on

    async def noted(self: Turn) -> None:
        nonlocal passed
        passed += 1
        await pass_on(self)

    monkeypatch.setattr(Turn, "pass_on", noted)
    driving = asyncio.create_task(driven.run())
    await wait_for_async(lambda: _true_of(lambda: driven._batch.progress.submitted), "the submission")
    driving.cancel()
    await asyncio.gather(driving, return_exceptions=True)
    assert rig.keys() == [f"{batch.batch_id}:{number}" for number in NUMBERS]
    assert driven._batch.progress.line == NUMBERS[-1], "blank lines behind the last one are not submitted"
    assert passed >= 6, "once for each window of blank lines, where they are not cut by a line"


async def test_lines_between_blank_ones_are_named(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "WINDOW_BYTES", PIECE_BYTES)
    batch = await _between_blanks(rig)
    await rig.records.change(batch.batch_id, cancelled)
    await rig.drive(await rig.take(batch, "me")).run()
    done, _ = await rig.records.get(batch.batch_id)
    content = [json.loads(line) async for line in Output(rig.client, rig.shelf).lines(done, errors=True)]
    assert (done.status, done.counts.failed) == (Status.CANCELLED, 2)
    assert [line["custom_id"] for line in content] == ["first", "second"]
    assert [line["id"] for line in content] == [f"batch_req_{batch.batch_id}-{number}" for number in NUMBERS]


async def test_the_queue_is_asked_for_no_blank_line(rig: Rig) -> None:
    batch = replace(await _between_blanks(rig), progress=Progress(NUMBERS[-1], submitted=True), counts=Counts(2))
    asked: list[str] = []

    class NoAnswer:
        async def wire_get_many(self, request: queue_pb2.GetManyRequest) -> queue_pb2.GetManyResponse:
            asked.extend(request.keys)
            return queue_pb2.GetManyResponse(requests=[queue_pb2.GetResponse()] * len(request.keys))

    lines = Output(NoAnswer(), rig.shelf).lines(batch, False, input_order=True)  # type: ignore[arg-type]
    assert [line async for line in lines] == []
    assert asked == [f"{batch.batch_id}:{number}" for number in NUMBERS]


async def test_a_compressed_input_is_refused_as_such_and_not_line_by_line() -> None:
    shelf: Any = OneFile(gzip.compress(b"\n".join(str(number).encode() for number in range(4000))))
    with pytest.raises(RefusedError) as refused:
        async with Turns().to_read(Reader("", 0, lambda: None)) as turn:
            await count_lines(shelf, BATCH, (), turn)
    (error,) = refused.value.errors
    assert (error.code, error.param) == ("compressed_file", "input_file_id")
    assert "(gzip); unpack it" in error.message
