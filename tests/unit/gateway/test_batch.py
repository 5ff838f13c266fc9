"""What a batch is and how it moves; its lines, cut and checked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, product
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.batch.reader import LINE_LIMIT_BYTES, MARK
from penstock.batch.reader import LineError as WrongLine
from penstock.openai.shape import Shape
from penstock.request.v1 import request_pb2 as pb
from services.gateway.batch import lines
from services.gateway.batch.lines import LineSplitter, RawLine, Reference, ask_of, request_of
from services.gateway.batch.output import counted, line_of
from services.gateway.batches import cancelled
from services.gateway.core.batch import (
    ENDS,
    STAMPS,
    TABLE,
    Batch,
    Counts,
    Event,
    LineError,
    MoveError,
    Progress,
    Status,
)
from tests.support.batch_lines import chat, completion

URL = "/v1/completions"
BATCH = Batch("batch_1", URL, "file-1", "24h", 100, 86_500, "batch", -3, {"k": "ü"})


def raw(line: Any, number: int = 1) -> RawLine:
    data = json.dumps(line).encode()
    return RawLine(number, data, len(data))


@pytest.mark.parametrize(("status", "event"), list(product(Status, Event)))
def test_a_batch_moves_by_the_table_and_only_so(status: Status, event: Event) -> None:
    batch = replace(BATCH, status=status)
    if (status, event) not in TABLE:
        with pytest.raises(MoveError):
            batch.moved(event, 7.9)
        return
    moved = batch.moved(event, 7.9)
    assert moved.status is TABLE[status, event]
    assert moved.stamps == {STAMPS[moved.status]: 7}
    assert moved.to_object()[f"{moved.status}_at"] == 7


def test_every_status_is_reached_and_every_end_is_one() -> None:
    assert {*TABLE.values(), Status.VALIDATING} == set(Status)
    assert {status for status, _ in TABLE} == set(Status) - ENDS


def test_a_cancel_can_be_repeated_and_comes_too_late_for_what_has_ended() -> None:
    once = cancelled(BATCH)
    assert once.status is Status.CANCELLING
    assert cancelled(once) is once
    for status in (Status.COMPLETED, Status.FINALIZING, Status.EXPIRED, Status.FAILED):
        with pytest.raises(MoveError):
            cancelled(replace(BATCH, status=status))


def test_a_lease_keeps_others_away_until_it_ends() -> None:
    held = BATCH.leased("a", 10.0)
    assert (held.free_for("a", 5), held.free_for("b", 5), held.free_for("b", 10)) == (True, False, True)
    assert BATCH.free_for("b", 5)
    assert not BATCH.leased("a", 5 + 3600.0).free_for("b", 5), "whose clock is wrong is not to be seen from one look"
    assert not replace(BATCH, status=Status.COMPLETED).free_for("a", 5)


def test_a_record_is_read_as_it_was_written() -> None:
    batch = replace(
        BATCH.moved(Event.VALID, 5).leased("me", 9.5),
        counts=Counts(9, 3, 2, 1, 100, 50),
        progress=Progress(4, 400, submitted=True, cursor=8),
        errors=[LineError("c", "m", None, 3)],
    )
    assert Batch.from_row(batch.to_row()) == batch
    old = json.loads(batch.to_row())
    del old["progress"]["cut"], old["output_file_id"]
    assert Batch.from_row(json.dumps(old).encode()) == batch


def test_a_newer_gateway_gets_its_fields_back() -> None:
    newer = {**json.loads(BATCH.to_row()), "scattered": [4], "lines_of_next_year": {"a": [1]}}
    read = Batch.from_row(json.dumps(newer).encode())
    assert json.loads(read.moved(Event.VALID, 5).to_row())["lines_of_next_year"] == {"a": [1]}
    assert json.loads(read.to_row()) == newer


def test_a_newer_gateway_gets_its_fields_of_counts_and_progress_back() -> None:
    newer = json.loads(BATCH.to_row())
    for part in ("counts", "progress", "lease"):
        newer[part]["of_next_year"] = {"a": [1]}
    read = replace(Batch.from_row(json.dumps(newer).encode()).leased("me", 9.5), counts=Counts(9))
    written = json.loads(read.to_row())
    assert written["counts"] == {**newer["counts"], "total": 9}
    assert written["progress"] == newer["progress"]
    assert written["lease"] == {"owner": "me", "until": 9.5}, "the newer gateway said it of its own lease"
    assert Batch.from_row(read.to_row()) == read


BITS = [b"\n", b"\r", b" ", b"\v", b"\f", b"\x1c", b"\x85", MARK, MARK[:2], b"a", b"x" * 40, b"\n" * 30, b" \n" * 9]
CONTENT = st.lists(st.sampled_from(BITS) | st.binary(max_size=3), max_size=20).map(b"".join)
LIMIT, MOST_FED = 35, 30
"""Bytes of the longest line, and of what is fed at once."""


def one_by_one(content: bytes) -> Iterator[RawLine]:
    """Yield the lines of a content: what blank and too long is, in the simplest words."""
    offset = 0
    for number, line in enumerate(content.split(b"\n"), 1):
        end = min(offset + len(line) + 1, len(content))
        if len(line) > LIMIT:
            yield RawLine(number, None, end)
        elif (line if offset else line.removeprefix(MARK)).strip():
            yield RawLine(number, line, end)
        offset = end


@given(CONTENT, st.lists(st.integers(1, MOST_FED), min_size=1, max_size=6))
def test_lines_are_the_same_however_the_content_is_cut(content: bytes, sizes: list[int]) -> None:
    def read(line: int, offset: int) -> tuple[list[RawLine], list[RawLine]]:
        """Return lines and marks behind a line."""
        splitter, found, marks = LineSplitter(line, offset), list[RawLine](), list[RawLine]()
        rest = content[offset:]
        for size in cycle(sizes):
            found += splitter.feed(rest[:size])
            marks.append(splitter.mark())
            rest = rest[size:]
            assert (marks[-1].is_mark, marks[-1].read_to) == (True, len(content) - len(rest))
            if not rest:
                break
        return [*found, *splitter.finish()], marks

    with patch.object(lines, "LINE_LIMIT_BYTES", LIMIT):
        found, marks = read(0, 0)
        assert found == list(one_by_one(content))
        for place in (*found, *marks):
            rest, _ = read(place.number, place.end)
            assert rest == [line for line in found if line.number > place.number], "reading can go on there"


def test_a_line_that_is_too_long_is_not_held() -> None:
    splitter = LineSplitter()
    found: list[RawLine] = []
    for _ in range(LINE_LIMIT_BYTES // 2**20 + 2):
        found += splitter.feed(b"x" * 2**20)
        assert len(splitter._held) <= LINE_LIMIT_BYTES
    found += splitter.feed(b"\nnext\n")
    assert [(line.number, line.data) for line in found] == [(1, None), (2, b"next")]
    assert found[1].end == found[0].end + 5
    with pytest.raises(WrongLine, match="line 1 has more than 16 MiB"):
        ask_of(found[0], URL, ())


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (chat("a", "x"), "mismatched_endpoint"),
        (completion("a" * 513, "x"), "invalid_field"),
        (completion("a", "x", model="other"), "model_not_found"),
        (completion("a", "x", max_tokens=0), "invalid_value"),
        ({**completion("a", "x"), "metadata": {}}, "invalid_field"),
    ],
)
def test_a_wrong_line_is_named(line: Any, code: str) -> None:
    with pytest.raises(WrongLine) as error:
        ask_of(raw(line, 7), URL, {"tiny"})
    assert error.value.line == 7
    assert error.value.code == code


def test_a_line_becomes_one_request_for_ever() -> None:
    ask = ask_of(raw(completion("mine", "hello", logprobs=2), 5), URL, {"tiny"})
    request = request_of(ask, BATCH)
    assert request == request_of(ask, BATCH)
    assert (request.idempotency_key, request.batch, request.channel, request.priority) == (
        "batch_1:5", "batch_1", "batch", -3,
    )  # fmt: skip
    assert request.deadline_unix_ns == 86_500 * 10**9
    reference = Reference.from_text(request.client_reference)
    assert (reference.line, reference.custom_id, reference.shape.logprobs) == (5, "mine", 2)
    assert Shape.from_reference(request.client_reference) == reference.shape, "GET /v1/requests reads it too"


OUTCOMES = [
    (pb.OUTCOME_COMPLETED, 200, None),
    (pb.OUTCOME_REJECTED, 400, None),
    (pb.OUTCOME_DEAD, 500, None),
    (pb.OUTCOME_EXPIRED, None, "batch_expired"),
    (pb.OUTCOME_CANCELLED, None, "batch_cancelled"),
]


@pytest.mark.parametrize(("outcome", "status", "code"), OUTCOMES)
def test_an_end_is_a_line_of_one_of_the_files(outcome: Any, status: int | None, code: str | None) -> None:
    text = Reference(3, "mine", Shape()).to_text()
    result = pb.Result(outcome=outcome, request_id="r-1", client_reference=text, choices=[pb.Choice(text="ü\ud7ff")])
    written = b"".join(line_of(result))
    line = json.loads(written)
    assert (line["custom_id"], line["id"]) == ("mine", "batch_req_r-1")
    assert (line["response"] and line["response"]["status_code"]) == status
    assert (line["error"] and line["error"]["code"]) == code
    counts = counted(Counts(2), result, len(written))
    assert (counts.completed, counts.failed) == ((1, 0) if status == 200 else (0, 1))
    assert counts.output_bytes + counts.error_bytes == len(written)
    assert counts.expired == (code == "batch_expired")


@pytest.mark.parametrize("part_bytes", [1, 2, 100])
def test_a_byte_order_mark_begins_a_file_and_no_line(part_bytes: int) -> None:
    for first, numbers in ((b"\r\n{}\n{}", [2, 3]), (b"{}\n\xef\xbb\xbf\n{}", [1, 2, 3]), (b"", [])):
        data, splitter = b"\xef\xbb\xbf" + first, LineSplitter()
        parts = [data[at : at + part_bytes] for at in range(0, len(data), part_bytes)]
        found = [line for part in parts for line in splitter.feed(part)] + list(splitter.finish())
        assert [line.number for line in found] == numbers
        assert not found or found[-1].end == len(data)
