"""Reads a batch file of any size: an index of its lines in one pass, then one line at a time.

Nothing is kept of a line but where it is and a checksum, so that files far larger than memory work.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from penstock.openai.bodies import MODELS, BodyError, ChatBody, CompletionBody, parse_body
from penstock.openai.pieces import excess
from penstock.openai.speakable import UNSPEAKABLE, unspeakable_field

LINE_LIMIT_BYTES = 16 * 1024 * 1024
"""Longest line that is read: what one gRPC frame carries. A longer one is answered with an error, unread."""

CHUNK_BYTES = 1024 * 1024
"""Read size of the indexing pass."""

MARK = b"\xef\xbb\xbf"
"""UTF-8's byte order mark, with which Windows begins a file; it is no part of the first line."""

COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"\xfd7zXZ\x00": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
}
"""How a file begins that holds no lines yet, each of which would have an answer that says that it is no UTF-8."""

UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""How a file begins that Windows' PowerShell has written: likewise none of its lines is UTF-8."""

MOST_BEGINNING = max(map(len, COMPRESSED))

BLANK_LINES = re.compile(rb"[ \t\n\r\v\f]*\n")
"""As many as there are, of what `bytes.strip` takes away."""

AGAIN = "the same command without --fresh"
"""What goes on with a run, whichever way that was begun: the option would discard its answers."""

LINE_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class Ask:
    """A good line."""

    line: int
    custom_id: str
    url: str
    body: ChatBody | CompletionBody
    not_read: tuple[str, ...] = ()
    """Names of the fields that it has beside those of a line."""


@dataclass(frozen=True, slots=True)
class Passed:
    """A line that is over: of it no more is read than what others need, for none of them may have its custom_id."""

    line: int
    not_read: tuple[str, ...] = ()


class LineError(ValueError):
    """A line that cannot be asked: where, which field, and why."""

    def __init__(self, line: int, code: str, message: str, param: str = "", custom_id: str | None = None) -> None:
        """Say what is wrong with line `line`; `custom_id` is set if it could be read."""
        super().__init__(message)
        self.line = line
        self.code = code
        self.param = param
        self.custom_id = custom_id


class InputReadError(Exception):
    """A file that was indexed can no longer be read, or says something else now; the text says why."""


class InputFile:
    """An indexed batch file. Lines are named by their number in the file, from 1; blank ones do not count as lines."""

    def __init__(self, path: Path) -> None:
        """Index the file. Raises OSError if it cannot be read, or only once, as a pipe."""
        self._path = path
        self._numbers = array("q")
        self._starts = array("q")
        self._lengths = array("q")
        self._checksums = array("I")
        self._file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115 - closed by `close`
        digest = hashlib.sha256()
        try:
            if not self._file.seekable():
                raise OSError(errno.ESPIPE, "it can be read only once; write what it has to a file first")
            beginning = self._file.peek(MOST_BEGINNING)
            if how := compression(beginning):
                raise OSError(errno.EINVAL, f"it is compressed ({how}); unpack it and give the command what is in it")
            if beginning.startswith(UTF_16):
                raise OSError(errno.EINVAL, "it is UTF-16; write it as UTF-8")
            self._index(digest)
        except BaseException:
            self._file.close()
            raise
        self.sha256 = digest.hexdigest()

    def __len__(self) -> int:
        """Return the number of lines that get an answer."""
        return len(self._numbers)

    @property
    def lines(self) -> array[int]:
        """Numbers of the lines that get an answer, ascending."""
        return self._numbers

    def position(self, line: int) -> int | None:
        """Return where in `lines` line number `line` is; None if it is blank or beyond the end."""
        at = bisect_left(self._numbers, line)
        return at if at < len(self._numbers) and self._numbers[at] == line else None

    def ask(self, line: int) -> Ask:
        """Return line number `line`, as it was when it was indexed, checked by itself.

        Raises LineError, or InputReadError.
        """
        return parse_line(self._data(line), line, may_have_more=True)

    def passed(self, line: int, seen: CustomIds) -> Passed:
        """Return line number `line`, whose body is not looked at, and note the custom_id that its answer has.

        Raises InputReadError.
        """
        try:
            record = _record(self._data(line), line)
        except LineError:
            return Passed(line)
        if custom_id := _custom_id_in(record):
            seen.claim(custom_id, line)
        return Passed(line, _not_read(record))

    def _data(self, line: int) -> bytes:
        """Return what line number `line` says. Raises LineError, or InputReadError."""
        at = self.position(line)
        if at is None:
            raise LineError(line, "missing_line", f"line {line} is not in the file")
        if self._lengths[at] > LINE_LIMIT_BYTES:
            size, limit = self._lengths[at], LINE_LIMIT_BYTES // 2**20
            raise LineError(line, "line_too_long", f"line {line} has {size} bytes; the limit is {limit} MiB")
        try:
            self._file.seek(self._starts[at])
            data = self._file.read(self._lengths[at])
        except OSError as error:
            raise InputReadError(f"cannot read {self._path}: {error.strerror}") from None
        if zlib.crc32(data) != self._checksums[at]:
            raise InputReadError(
                f"line {line} of {self._path} has changed since the run began; as it was, {AGAIN} goes on"
            )
        return data

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _index(self, digest: hashlib._Hash) -> None:
        number, start, length, checksum, blank = 1, 0, 0, 0, True
        while chunk := self._file.read(CHUNK_BYTES):
            digest.update(chunk)
            for blank_lines, blank_bytes, piece, ends in pieces(chunk, length > 0):
                number += blank_lines
                start += blank_bytes
                blank = blank and is_blank(piece, start + length)
                length += len(piece)
                checksum = zlib.crc32(piece, checksum)
                if ends:
                    self._add(number, start, length, checksum, blank)
                    start += length + 1
                    number, length, checksum, blank = number + 1, 0, 0, True
        self._add(number, start, length, checksum, blank)

    def _add(self, number: int, start: int, length: int, checksum: int, blank: bool) -> None:
        if not blank:
            self._numbers.append(number)
            self._starts.append(start)
            self._lengths.append(length)
            self._checksums.append(checksum)


def compression(beginning: bytes) -> str:
    """Return how a file is compressed that begins so; empty if it is not."""
    return next((name for begins, name in COMPRESSED.items() if beginning.startswith(begins)), "")


def pieces(part: bytes, begun: bool) -> Iterator[tuple[int, int, bytes, bool]]:
    """Yield how many blank lines come first, and their bytes, then what there is of a line, and whether it ends there.

    `begun` says that the part before left a line that has not ended. Blank lines are not told one by one: a megabyte of
    line breaks has a million. One that is cut by the end of a part, or has the byte order mark, comes as a line.
    """
    start = 0
    while start < len(part):
        first, blanks = start, 0
        if not begun and (match := BLANK_LINES.match(part, start)):
            first = match.end()
            blanks = part.count(b"\n", start, first)
        end = part.find(b"\n", first)
        last = end if end >= 0 else len(part)
        yield blanks, first - start, part[first:last], end >= 0
        start, begun = last + 1, False


def is_blank(line: bytes | bytearray, offset: int) -> bool:
    """Whether there is nothing in a line, or a piece of one, that begins at `offset` of its file."""
    return not (line if offset else line.removeprefix(MARK)).strip()


def _open_at_once(path: str, flags: int) -> int:
    """Open `path` without waiting for anybody who writes to it, as a FIFO would."""
    return os.open(path, flags | os.O_NONBLOCK)


class CustomIds:
    """Finds repeated custom_ids while a file is read from its start; keeps digests, not texts."""

    def __init__(self) -> None:
        """Nothing seen yet."""
        self._first_line: dict[bytes, int] = {}

    def check(self, custom_id: str, line: int) -> None:
        """Note the line's custom_id; raises LineError if an earlier line has it."""
        first = self.claim(custom_id, line)
        if first != line:
            message = f"custom_id {custom_id!r} is already used in line {first}"
            raise LineError(line, "duplicate_custom_id", message, "custom_id", custom_id)

    def claim(self, custom_id: str, line: int) -> int:
        """Note the line's custom_id; return the first line that has it."""
        digest = hashlib.blake2b(custom_id.encode(), digest_size=12).digest()
        return self._first_line.setdefault(digest, line)


def parse_line(data: bytes, line: int, may_have_more: bool = False) -> Ask:
    """Return the checked line. Raises LineError naming the line and the field.

    Fields that a line does not have are refused, unless it `may_have_more`: to be told of, by who can tell.
    """
    record = _record(data, line)
    custom_id = record.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        _refuse(line, record, "custom_id", "must be a non-empty text")
    if not custom_id.isprintable() and not _encodable(custom_id):
        raise LineError(line, "invalid_field", f"custom_id: {UNSPEAKABLE}", "custom_id")
    _check_speakable(data, record, line)
    not_read = _not_read(record)
    if not_read and not may_have_more:
        _refuse(line, record, not_read[0], f"there is no such field; a line has {', '.join(LINE_FIELDS)}")
    if record.get("method") != "POST":
        _refuse(line, record, "method", f"must be POST (got {record.get('method')!r})")
    url = record.get("url")
    if not isinstance(url, str) or url not in MODELS:
        _refuse(line, record, "url", f"must be one of {', '.join(MODELS)} (got {url!r})")
    body = record.get("body")
    if not isinstance(body, dict):
        _refuse(line, record, "body", "must be an object")
    try:
        return Ask(line, custom_id, url, parse_body(url, body), not_read)
    except BodyError as error:
        raise LineError(line, error.code, str(error), f"body.{error.param}", custom_id) from None


def custom_id_of(data: bytes, line: int) -> str:
    """Return the custom_id of a line, empty if none can be told. Raises LineError if it is no JSON object."""
    return _custom_id_in(_record(data, line))


def _custom_id_in(record: dict[str, Any]) -> str:
    given = record.get("custom_id")
    return given if isinstance(given, str) and _encodable(given) else ""


def _not_read(record: dict[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in record if name not in LINE_FIELDS)


def _record(data: bytes, line: int) -> dict[str, Any]:
    if line == 1:
        data = data.removeprefix(MARK)
    if much := excess(data):
        raise LineError(line, "line_too_long", f"line {line} has {much}")
    try:
        record = json.loads(data.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        message = f"line {line} is not UTF-8 (byte {error.start})"
        raise LineError(line, "invalid_encoding", message) from None
    except json.JSONDecodeError as error:
        message = f"line {line} is not JSON: {error.msg} (column {error.colno})"
        raise LineError(line, "invalid_json_line", message) from None
    except (ValueError, RecursionError) as error:
        raise LineError(line, "invalid_json_line", f"line {line} is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise LineError(line, "invalid_json_line", f"line {line} is not a JSON object")
    return record


def _check_speakable(data: bytes, record: dict[str, Any], line: int) -> None:
    """Refuse a line with half a surrogate pair, and name the field, in the body too."""
    field = unspeakable_field(data, record)
    body = record.get("body")
    if field == "body" and isinstance(body, dict):
        field = f"body.{unspeakable_field(data, body)}"
    if field is None:
        return
    raise LineError(line, "invalid_field", f"{field}: {UNSPEAKABLE}", field, record["custom_id"])


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _refuse(line: int, record: dict[str, Any], field: str, problem: str) -> NoReturn:
    given = record.get("custom_id")
    custom_id = given if isinstance(given, str) and given else None
    code = "missing_field" if field not in record else "invalid_field"
    raise LineError(line, code, f"{field}: {problem}", field, custom_id)


def asks(source: InputFile, is_over: Callable[[int], bool] = lambda _line: False) -> Iterator[Ask | Passed | LineError]:
    """Yield every line of a file, checked against repeats; of one that `is_over` no more is read than that takes.

    Raises InputReadError.
    """
    seen = CustomIds()
    for line in source.lines:
        if is_over(line):
            yield source.passed(line, seen)
            continue
        try:
            ask = source.ask(line)
            seen.check(ask.custom_id, line)
            yield ask
        except LineError as error:
            if error.custom_id is not None:
                seen.claim(error.custom_id, line)  # its answer has the id, so that no other may
            yield error
