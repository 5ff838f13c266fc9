"""Whatever bytes a batch file holds, every line is either asked or refused by number, and nothing else happens."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.batch import reader
from penstock.batch.reader import MARK, InputFile, LineError, asks, custom_id_of, parse_line
from penstock.errors import InvalidRequest
from penstock.openai.bodies import CHAT_URL, COMPLETIONS_URL, ChatBody, CompletionBody
from penstock.openai.convert import to_request

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(sorted({*ChatBody.model_fields, *CompletionBody.model_fields, "stream", "shiny"}))
BODIES = st.dictionaries(NAMES, JSON, max_size=5).map(lambda body: {"prompt": "p", **body}) | st.dictionaries(
    NAMES, JSON, max_size=5
).map(lambda body: {"messages": [{"role": "user", "content": "x"}], **body})


@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_line_or_an_error(data: bytes) -> None:
    with suppress(LineError):
        parse_line(data, 3)


IDS = JSON | st.sampled_from(["\ud83d", "\ud83da", "c"])
FIELDS = {"custom_id": IDS, "body": BODIES | JSON, "user": IDS}


@given(line=st.fixed_dictionaries({}, optional=FIELDS).map(lambda record: json.dumps(record).encode()) | st.binary())
def test_the_custom_id_is_the_same_whether_a_line_is_checked_or_not(line: bytes) -> None:
    try:
        checked = parse_line(line, 3).custom_id
    except LineError as error:
        checked = error.custom_id or ""
    unchecked = ""
    with suppress(LineError):
        unchecked = custom_id_of(line, 3)
    assert unchecked == checked


@given(body=BODIES, url=st.sampled_from([CHAT_URL, COMPLETIONS_URL]))
def test_any_body_is_a_request_or_an_error_that_names_a_field(body: dict[str, Any], url: str) -> None:
    line = json.dumps({"custom_id": "c", "method": "POST", "url": url, "body": body}).encode()
    blamed, size = "", 0
    try:
        size = to_request(parse_line(line, 3).body).ByteSize()
    except LineError as error:
        blamed = error.param.removeprefix("body.")
    except InvalidRequest as error:
        blamed = error.param
    assert bool(blamed) != bool(size)


BITS = [b"\n", b" ", b"\r\n", b"a", b"{}", b"\xff", b"xyz" * 50, b"\n" * 20, b" \n\n"]


@given(start=st.sampled_from([b"", MARK]), bits=st.lists(st.sampled_from(BITS)), chunk_bytes=st.integers(3, 40))
def test_the_index_finds_the_lines_that_splitting_finds(
    tmp_path_factory: pytest.TempPathFactory, start: bytes, bits: list[bytes], chunk_bytes: int
) -> None:
    data = b"".join(bits)
    path = _file(tmp_path_factory, start + data)
    with patch.object(reader, "CHUNK_BYTES", chunk_bytes):
        source = InputFile(path)
    expected = [number for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    assert list(source.lines) == expected
    assert [item.line for item in asks(source)] == expected
    source.close()


def _file(factory: pytest.TempPathFactory, data: bytes) -> Path:
    path = factory.mktemp("input") / "in.jsonl"
    path.write_bytes(data)
    return path
