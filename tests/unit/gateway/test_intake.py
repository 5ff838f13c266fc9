"""Bodies within bounds, and a client that hangs up."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.types import Message

from services.gateway import intake
from services.gateway.hangup import until_hangup
from services.gateway.intake import ClientGoneError, Intake, parse_object
from services.gateway.limits import MAX_BODY_BYTES
from services.gateway.problem import Problem
from tests.support.json_depth import levels_around_the_limit

JSON = {"content-type": "application/json; charset=utf-8"}


class Sender:
    """ASGI's receive side: parts of a body, then silence or the end of the connection."""

    def __init__(self, *parts: bytes, last: bool = True, gone: bool = False) -> None:
        self.messages: list[Message] = [{"type": "http.request", "body": p, "more_body": True} for p in parts]
        if last:
            self.messages.append({"type": "http.request", "body": b""})
        if gone:
            self.messages.append({"type": "http.disconnect"})

    async def __call__(self) -> Message:
        if not self.messages:
            await asyncio.Event().wait()
        return self.messages.pop(0)


async def test_a_body_in_parts_is_one_body() -> None:
    assert await Intake(5).read(JSON, Sender(b'{"a"', b": 1}")) == {"a": 1}


@pytest.mark.parametrize(
    "data", [b"{", b"[]", b"1", b'{"a": NaN}', b"\xff", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"]
)
def test_what_is_not_a_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(Problem) as refused:
        parse_object(data)
    assert (refused.value.status, refused.value.error["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_a_byte_order_mark_is_no_part_of_a_body(kind: type[bytes | bytearray]) -> None:
    """Some writers of .NET begin with one, and vLLM's server takes it."""
    assert parse_object(kind(b'\xef\xbb\xbf{"a": "\xef\xbb\xbf"}')) == {"a": "\ufeff"}
    for more in (b"\xef\xbb\xbf" * 2 + b"{}", b"\xef\xbb{}", '{"a": 1}'.encode("utf-16")):
        with pytest.raises(Problem, match="not JSON"):
            parse_object(kind(more))


@pytest.mark.parametrize("filler", [b"[],", b'{"":0},', b'"ab",', b"7,"])
def test_what_would_be_too_many_objects_is_not_parsed(monkeypatch: pytest.MonkeyPatch, filler: bytes) -> None:
    monkeypatch.delattr("services.gateway.intake.json.loads")
    with pytest.raises(Problem, match="the body has more than") as refused:
        parse_object(b'{"metadata": [' + filler * (MAX_BODY_BYTES // len(filler)) + b"7]}")
    assert (refused.value.status, refused.value.error["code"]) == (413, "body_too_large")


def test_large_bodies_that_ask_for_something_are_taken() -> None:
    ids = list(range(100_000, 100_000 + 2**20))
    assert parse_object(json.dumps({"prompt": ids}).encode()) == {"prompt": ids}
    messages = [{"role": "user", "content": [{"type": "text", "text": f"[{n}, {n}]"}]} for n in range(20_000)]
    assert parse_object(json.dumps({"messages": messages}).encode()) == {"messages": messages}


async def refused(reader: Intake, sender: Sender, **headers: str) -> int:
    fields = JSON | {name.replace("_", "-"): value for name, value in headers.items()}
    with pytest.raises(Problem) as problem:
        await reader.read(fields, sender)
    assert not reader.held_bytes, "nothing is counted once it is over"
    return problem.value.status


@pytest.mark.parametrize("text", [r"\ud83d\ude00", r"\\ud83d", r"\uD83D\uDE00", "\N{GRINNING FACE}"])
def test_whole_characters_are_taken_however_they_are_spelt(text: str) -> None:
    assert parse_object(f'{{"a": "{text}"}}'.encode())["a"].encode()


@pytest.mark.parametrize("text", [r"\ud83d", r"\uDC00", r"\ude00\ud83d", r"\ud83d\\ude00"])
def test_half_a_character_is_refused_wherever_it_is(text: str) -> None:
    with pytest.raises(Problem, match="half a surrogate pair") as problem:
        parse_object(f'{{"model": "tiny", "metadata": {{"a": ["{text}"]}}}}'.encode())
    assert (problem.value.status, problem.value.error["param"]) == (400, "metadata")
    with pytest.raises(Problem, match="half a surrogate pair"):
        parse_object(f'{{"": "{text}"}}'.encode())


async def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MAX_BODY_BYTES", 10)
    assert await refused(Intake(5), Sender(), content_length="11") == 413
    assert await refused(Intake(5), Sender(), content_length="x") == 413
    assert await refused(Intake(5), Sender(b"123456", b"123456")) == 413
    assert await refused(Intake(5), Sender(), content_type="text/plain") == 415
    assert await refused(Intake(5), Sender(), content_encoding="gzip") == 415
    assert await refused(Intake(0.01), Sender(b"1", last=False)) == 408
    monkeypatch.setattr(intake, "MAX_BODIES_BYTES", 5)
    assert await refused(Intake(5), Sender(b"123456")) == 503
    with pytest.raises(ClientGoneError):
        await Intake(5).read(JSON, Sender(b"{", last=False, gone=True))


async def test_a_hangup_interrupts_what_is_awaited() -> None:
    with pytest.raises(ClientGoneError):
        async with until_hangup(Sender(last=False, gone=True)):
            await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()
    await asyncio.sleep(0)


async def test_somebody_elses_cancellation_stays_one() -> None:
    async def wait() -> None:
        async with until_hangup(Sender(last=False)):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_body_is_taken_or_refused_however_deep_it_is() -> None:
    outcomes = set()
    for levels in levels_around_the_limit():
        try:
            outcomes.add(type(parse_object(b'{"a": ' + b"[" * levels + rb'"\ud83d\ude00"' + b"]" * levels + b"}")))
        except Problem as problem:
            outcomes.add(problem.error["code"])
    assert outcomes == {dict, "invalid_json"}
