"""Whatever a batch file holds: each line is asked, or refused with its number and the field at fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.batch.reader import COMPRESSED, UTF_16, Ask, InputFile, LineError, asks, parse_line
from penstock.errors import InvalidRequest
from penstock.openai.convert import to_request
from tests.support.arbitrary import fuzzed
from tests.support.batch_lines import chat, completion

values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([2**63, 1e308, -1]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
BODY_FIELDS = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "stop", "seed",
    "logprobs", "top_logprobs", "logit_bias", "echo", "stream", "response_format", "presence_penalty", "user", "tools",
    "stop_token_ids", "min_tokens", "priority", "structured_outputs", "extra_args", "best_of", "suffix",
)  # fmt: skip


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """Draw a good line of which some fields of line and body were replaced."""
    record = draw(st.booleans().map(lambda talk: chat("c", "hello") if talk else completion("c", "hello")))
    record["body"].update(draw(st.dictionaries(st.sampled_from(BODY_FIELDS), values, max_size=3)))
    record.update(
        draw(st.dictionaries(st.sampled_from(["custom_id", "method", "url", "body", "x"]), values, max_size=1))
    )
    return json.dumps(record).encode()


def ask_or_refuse(data: bytes, line: int) -> None:
    try:
        ask = parse_line(data, line)
    except LineError as error:
        assert (error.line, bool(error.code), bool(str(error))) == (line, True, True)
        return
    try:
        to_request(ask.body).SerializeToString()
    except InvalidRequest as error:
        assert error.param


@fuzzed
@given(st.binary(max_size=80), st.integers(1, 3))
def test_any_bytes(data: bytes, line: int) -> None:
    ask_or_refuse(data.replace(b"\n", b""), line)


@fuzzed
@given(lines(), st.integers(1, 3))
def test_lines_with_wrong_values(data: bytes, line: int) -> None:
    ask_or_refuse(data, line)


@settings(fuzzed, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=20) | lines() | st.sampled_from([b"", b" ", b"\r", b"\xef\xbb\xbf"]), max_size=6))
@example([bytes([0x1F, 0x8B])])
@example([bytes([0xFF, 0xFE])])
def test_files(tmp_path: Path, parts: list[bytes]) -> None:
    path = tmp_path / "in.jsonl"
    data = b"\n".join(parts)
    path.write_bytes(data)
    if data.startswith((*COMPRESSED, *UTF_16)):
        with pytest.raises(OSError, match=r"it is (compressed|UTF-16)"):
            InputFile(path)
        return
    source = InputFile(path)
    try:
        found = list(asks(source))
    finally:
        source.close()
    lines_given = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    numbers = [number for number, line in enumerate(lines_given, 1) if line.strip()]
    assert [ask.line for ask in found] == numbers, "every line that is not blank, once, in order"
    assert all(isinstance(ask, Ask | LineError) for ask in found)
