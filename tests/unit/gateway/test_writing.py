"""JSON of large results is made beside the event loop, one at a time and in parts, whatever wants it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.openai import jsontext, logprobs
from penstock.openai.answers import body_of
from penstock.openai.chunks import Chunks
from penstock.openai.jsontext import PART_ENTRIES, Rows, json_bytes
from penstock.openai.shape import Shape
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2 as pb
from services.gateway.batch import output
from services.gateway.batch.drive import Drive
from services.gateway.batch.lines import Reference, key_of
from services.gateway.batch.looks import Looks, ResultPage
from services.gateway.batch.output import Output, line_of
from services.gateway.batch.turns import Turns
from services.gateway.core.batch import Batch, Counts
from services.gateway.metrics import GatewayMetrics
from services.gateway.reply import LARGE_BYTES, Writing

BATCH = Batch("batch_1", "/v1/chat/completions", "file-1", "24h", 0, 3600, "batch")
SHAPE = Shape(chat=True, role="assistant", logprobs=1)
LOGPROB = pb.TokenLogprob(token_id=17, token="token", logprob=-0.1, rank=1)


def ended(line: int, text: str, tokens: int = 1) -> pb.Result:
    return pb.Result(
        request_id=f"r-{line}",
        idempotency_key=key_of(BATCH.batch_id, line),
        client_reference=Reference(line, f"c{line}", SHAPE).to_text(),
        outcome=pb.OUTCOME_COMPLETED,
        choices=[pb.Choice(text=text, logprobs=[LOGPROB] * tokens)],
    )


BESIDE = [False, True, False, True]
TEXTS = ["x" * LARGE_BYTES if large else "x" for large in BESIDE]
RESULTS = [queue_pb2.WatchResult(cursor=line, result=ended(line, text)) for line, text in enumerate(TEXTS, 1)]
SIZE_BYTES = sum(len(b"".join(line_of(one.result))) for one in RESULTS)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return of each line that was made whether that was beside the loop."""
    found: list[bool] = []

    def noted(result: pb.Result) -> Iterator[bytes]:
        found.append(threading.current_thread() is not threading.main_thread())
        return line_of(result)

    monkeypatch.setattr(output, "line_of", noted)
    return found


async def test_large_lines_are_counted_beside_the_loop(beside: list[bool]) -> None:
    nothing: Any = None
    held: Any = SimpleNamespace(batch=BATCH)
    drive = Drive(nothing, nothing, nothing, GatewayMetrics(CollectorRegistry()), held, Turns(), Looks())
    counts, cursor = await drive._tally_page(ResultPage(RESULTS, 0, True, 0), Counts(4), 0)
    assert (counts.completed, counts.output_bytes, cursor) == (4, SIZE_BYTES, 4)
    assert beside == BESIDE


async def test_large_lines_that_end_anew_are_counted_beside_the_loop(beside: list[bool]) -> None:
    async def wire_ended(_batch_id: str, _cursor: int) -> AsyncGenerator[queue_pb2.WatchEvent, None]:
        for one in RESULTS:
            yield queue_pb2.WatchEvent(result=one)

    client: Any = SimpleNamespace(wire_ended=wire_ended)
    nothing: Any = None
    batch = replace(BATCH, counts=Counts(4, failed=4, dead=4))
    batch, _ = await Output(client, nothing).reruns(batch)
    assert (batch.counts.completed, batch.counts.output_bytes) == (4, SIZE_BYTES)
    assert beside == BESIDE


async def test_one_large_result_is_written_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    running = most = 0

    async def to_thread(make: Callable[[], bytes]) -> bytes:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return make()

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    writing = Writing()
    assert await asyncio.gather(*(writing.of(lambda: (b"a", b"b"), LARGE_BYTES) for _ in range(5))) == [b"ab"] * 5
    assert most == 1


async def test_of_what_nobody_waits_for_no_more_is_made_and_the_next_begins_when_it_has_ended() -> None:
    told = asyncio.Event()
    loop, goes_on = asyncio.get_running_loop(), threading.Event()
    made: list[str] = []

    def parts() -> Iterator[bytes]:
        for number in range(5):
            made.append("unwanted")
            yield b"part"
            if number == 0:
                loop.call_soon_threadsafe(told.set)
                goes_on.wait(30)

    def next_parts() -> Iterator[bytes]:
        made.append("next")
        yield b"x"

    writing = Writing()
    unwanted = asyncio.create_task(writing.of(parts, LARGE_BYTES))
    await told.wait()
    following = asyncio.create_task(writing.of(next_parts, LARGE_BYTES))
    for _ in range(3):
        unwanted.cancel()
        await asyncio.sleep(0)
    assert (made, unwanted.done(), following.done()) == (["unwanted"], False, False)
    goes_on.set()
    assert await following == b"x"
    assert unwanted.cancelled()
    assert made == ["unwanted", "unwanted", "next"]


CASES: dict[str, Callable[[pb.Result], Iterable[Any]]] = {
    "line": line_of,
    "chat": lambda result: next(stream_of(SHAPE).last_lines(result)),
    "completion": lambda result: next(stream_of(replace(SHAPE, chat=False)).last_lines(result)),
}


def stream_of(shape: Shape) -> Chunks:
    stream = Chunks(shape, "r-1", 0, "tiny", 1, False)
    stream.opening()
    return stream


@pytest.mark.parametrize("name", CASES)
def test_a_line_is_made_in_parts(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    parts: list[int] = []
    encode = jsontext.encode

    def noted(value: Any) -> str:
        parts.append(jsontext._entries(value))
        return encode(value)

    def position(entry: pb.TokenLogprob, shape: Shape) -> dict[str, Any]:
        made.append(len(parts))
        return chat_position(entry, shape)

    made: list[int] = []
    chat_position = logprobs._chat_position
    result = ended(1, "x", tokens=PART_ENTRIES)
    monkeypatch.setattr(jsontext, "PART_ENTRIES", 10**9)
    whole = list(CASES[name](result))
    monkeypatch.undo()
    monkeypatch.setattr(jsontext, "encode", noted)
    monkeypatch.setattr(logprobs, "_chat_position", position)
    assert whole[0][:0].join(CASES[name](result)) == whole[0][:0].join(whole)
    assert name == "completion" or len(set(made)) > 3, "positions are made while those before them are written"
    assert max(parts) <= PART_ENTRIES < sum(parts)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, PART_ENTRIES])
def test_positions_that_are_made_while_they_are_written_are_those_of_the_body(chat: bool, tokens: int) -> None:
    shape = replace(SHAPE, chat=chat, prompt_logprobs=True)
    result = ended(1, "x", tokens)
    result.prompt_logprobs.extend([LOGPROB] * tokens)
    whole = json.dumps(body_of(shape, result), ensure_ascii=False, separators=(",", ":"))
    assert b"".join(json_bytes(body_of(shape, result, Rows))).decode() == whole
