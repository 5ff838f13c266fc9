"""The reader: every wrong line is named with its number and field, however large the file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from penstock.batch.reader import (
    CHUNK_BYTES,
    LINE_LIMIT_BYTES,
    Ask,
    InputFile,
    InputReadError,
    LineError,
    Passed,
    asks,
    parse_line,
    pieces,
)
from penstock.openai.bodies import CHAT_URL
from tests.support.batch_lines import chat, completion
from tests.support.json_depth import levels_around_the_limit


def read(path: Path, data: bytes) -> list[Ask | LineError]:
    path.write_bytes(data)
    source = InputFile(path)
    try:
        return [item for item in asks(source) if not isinstance(item, Passed)]
    finally:
        source.close()


def encoded(record: object) -> bytes:
    return json.dumps(record).encode()


def test_good_lines_blank_lines_and_a_last_line_without_an_end(tmp_path: Path) -> None:
    data = b"\n" + encoded(completion("a", "x")) + b"\r\n   \n\t\n" + encoded(chat("b", "y"))
    found = read(tmp_path / "in", data)
    assert [(a.line, a.custom_id) for a in found if isinstance(a, Ask)] == [(2, "a"), (5, "b")]


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    found = read(tmp_path / "in", b"\xef\xbb\xbf" + encoded(completion("a", "x")))
    assert isinstance(found[0], Ask)


@pytest.mark.parametrize("blank", [b"", b"\n", b" \t\r\n"])
def test_a_first_line_of_a_byte_order_mark_alone_is_blank(tmp_path: Path, blank: bytes) -> None:
    assert read(tmp_path / "in", b"\xef\xbb\xbf" + blank) == []
    found = read(tmp_path / "in", b"\xef\xbb\xbf\n" + blank + encoded(completion("a", "x")))
    assert [isinstance(item, Ask) for item in found] == [True]
    found = read(tmp_path / "in", b"\n\xef\xbb\xbf" + blank)
    assert [item.line for item in found] == [2], "elsewhere it is no space"


def test_blank_lines_are_passed_over_at_once() -> None:
    """A megabyte has a million of them."""
    assert list(pieces(b"\n" * 1000 + b" \r\n", False)) == [(1001, 1003, b"", False)]
    assert list(pieces(b"\n\nx\n\n y", True)) == [(0, 0, b"", True), (1, 1, b"x", True), (1, 1, b" y", False)]


@pytest.mark.parametrize(
    ("line", "code", "param", "text"),
    [
        (b'{"custom_id": "x", "method": ', "invalid_json_line", "", "not JSON"),
        (b"[1]", "invalid_json_line", "", "not a JSON object"),
        (b'{"custom_id": NaN}', "invalid_json_line", "", "NaN"),
        (b'{"a": ' + b"[" * 100_000 + b"}", "invalid_json_line", "", "not JSON"),
        (b'{"custom_id": ' + b"9" * 5000 + b"}", "invalid_json_line", "", "not JSON"),
        (b'{"custom_id": "\xff"}', "invalid_encoding", "", "not UTF-8"),
        (encoded({**completion("x", "p"), "custom_id": ""}), "invalid_field", "custom_id", "non-empty"),
        (b'{"custom_id": "\\ud800", "method": "POST"}', "invalid_field", "custom_id", "surrogate"),
        (encoded({"method": "POST"}), "missing_field", "custom_id", "custom_id"),
        (encoded({**completion("x", "p"), "extra": 1}), "invalid_field", "extra", "no such field"),
        (encoded({**completion("x", "p"), "method": "GET"}), "invalid_field", "method", "POST"),
        (encoded({**completion("x", "p"), "url": "/v1/embeddings"}), "invalid_field", "url", "/v1/embeddings"),
        (encoded({**completion("x", "p"), "url": ["/v1/completions"]}), "invalid_field", "url", "must be one of"),
        (encoded({**completion("x", "p"), "body": []}), "invalid_field", "body", "object"),
        (encoded(completion("x", "p", max_tokens=-1)), "invalid_value", "body.max_tokens", "max_tokens"),
        (encoded(chat("x", "p", shiny=1)), "unknown_parameter", "body.shiny", "shiny"),
        (encoded(completion("x", "\ud83d")), "invalid_field", "body.prompt", "surrogate"),
        (encoded(chat("x", "p", tools=[{"\udc00": 1}])), "invalid_field", "body.tools", "surrogate"),
        (encoded(chat("x", "p", **{"\ud83d": 1})), "invalid_field", r"body.\ud83d", "surrogate"),
        (encoded({**completion("x", "p"), "\ud83d": 1}), "invalid_field", r"\ud83d", "surrogate"),
    ],
)
def test_a_wrong_line_is_named(line: bytes, code: str, param: str, text: str) -> None:
    with pytest.raises(LineError, match=text) as refused:
        parse_line(line, 7)
    assert (refused.value.line, refused.value.code, refused.value.param) == (7, code, param)


def test_a_repeated_custom_id_names_the_first_line(tmp_path: Path) -> None:
    lines = [completion("a", "x"), completion("b", "y"), completion("a", "z")]
    found = read(tmp_path / "in", b"\n".join(encoded(line) for line in lines))
    assert isinstance(found[2], LineError)
    assert (found[2].custom_id, found[2].code) == ("a", "duplicate_custom_id")
    assert "line 1" in str(found[2])


def test_a_wrong_line_has_its_custom_id_for_itself(tmp_path: Path) -> None:
    lines = [completion("a", "x", shiny=1), completion("a", "y"), completion("a", "z", max_tokens=-1)]
    found = read(tmp_path / "in", b"\n".join(encoded(line) for line in lines))
    assert [(error.code, error.custom_id) for error in found if isinstance(error, LineError)] == [
        ("unknown_parameter", "a"), ("duplicate_custom_id", "a"), ("invalid_value", "a"),
    ]  # fmt: skip


def test_a_line_over_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "in"
    with path.open("wb") as out:
        out.write(encoded(completion("a", "x")) + b"\n")
        for _ in range(LINE_LIMIT_BYTES // 2**20 + 1):
            out.write(b"x" * 2**20)
        out.write(b"\n" + encoded(completion("b", "y")) + b"\n")
    source = InputFile(path)
    first, second, third = asks(source)
    assert isinstance(first, Ask)
    assert isinstance(third, Ask)
    assert isinstance(second, LineError)
    assert (second.line, second.code) == (2, "line_too_long")
    assert "16 MiB" in str(second)
    source.close()


def test_a_line_that_would_be_too_many_objects_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = encoded(completion("a", "x", metadata=[[]] * 500_000))
    monkeypatch.delattr("penstock.batch.reader.json.loads")
    (error,) = read(tmp_path / "in", line)
    assert isinstance(error, LineError)
    assert (error.line, error.code, error.custom_id) == (1, "line_too_long", None)
    assert str(error) == "line 1 has more than 262144 strings and opening brackets"


def test_lines_are_found_by_number(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"\n".join(encoded(completion(f"c{i}", "x")) + b"\n" for i in range(100)))
    source = InputFile(path)
    assert len(source) == 100
    assert source.ask(199).custom_id == "c99"
    assert source.position(2) is None
    with pytest.raises(LineError):
        source.ask(2)
    source.close()


def test_a_line_that_changes_after_it_was_indexed_is_not_asked(tmp_path: Path) -> None:
    path = tmp_path / "in"
    # A line over a boundary of the chunks, and more between the lines than what is read ahead of one.
    lines = [encoded(completion(name, name * CHUNK_BYTES)) + b"\n" for name in "abc"]
    path.write_bytes(b"".join(lines))
    source = InputFile(path)
    with path.open("ab") as file:
        file.write(encoded(completion("d", "later")))
    assert [source.ask(line).custom_id for line in (1, 2, 3)] == ["a", "b", "c"]
    with path.open("r+b") as file:
        file.seek(len(lines[0]) + len(lines[1]) // 2)
        file.write(b"x")
    with pytest.raises(InputReadError, match=f"line 2 of {path} has changed"):
        source.ask(2)
    assert source.ask(1).custom_id == "a"
    os.truncate(path, len(lines[0]) // 2)
    with pytest.raises(InputReadError, match=f"line 1 of {path} has changed"):
        source.ask(1)
    path.write_bytes(b"".join(lines))
    assert [ask.custom_id for ask in asks(source) if isinstance(ask, Ask)] == ["a", "b", "c"]
    source.close()


def test_an_empty_file_has_no_lines(tmp_path: Path) -> None:
    assert read(tmp_path / "in", b"") == []
    assert read(tmp_path / "in", b"\n \n") == []


def nested(levels: int) -> str:
    return "[" * levels + r'"\ud83d\ude00"' + "]" * levels


@pytest.mark.parametrize("field", ["tools", "shiny"])
def test_a_line_is_taken_or_refused_however_deep_it_is(field: str) -> None:
    outcomes = set()
    for levels in levels_around_the_limit():
        body = f'{{"model": "tiny", "messages": [{{"role": "user", "content": "x"}}], "{field}": {nested(levels)}}}'
        with pytest.raises(LineError) as refused:
            parse_line(f'{{"custom_id": "x", "method": "POST", "url": "{CHAT_URL}", "body": {body}}}'.encode(), 7)
        outcomes.add((refused.value.code, refused.value.custom_id and "named"))
    assert {code == "invalid_json_line" for code, _ in outcomes} == {True, False}


@pytest.mark.parametrize(
    ("begins", "name"),
    [(b"\x1f\x8b\x08", "gzip"), (b"\x28\xb5\x2f\xfd", "Zstandard"), (b"BZh91AY", "bzip2"), (b"PK\x03\x04", "zip")],
)
def test_a_compressed_file_is_refused_as_a_whole(tmp_path: Path, begins: bytes, name: str) -> None:
    (tmp_path / "in").write_bytes(begins + b"\n" * 99)
    with pytest.raises(OSError, match=f"it is compressed \\({name}\\)"):
        InputFile(tmp_path / "in")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_a_file_in_utf_16_is_refused_as_a_whole(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "in").write_bytes("\ufeff{}\r\n".encode(encoding))
    with pytest.raises(OSError, match="it is UTF-16; write it as UTF-8"):
        InputFile(tmp_path / "in")
