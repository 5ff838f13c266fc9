"""The journal beside the output file: which lines are answered, and where to go on watching.

One JSON object a line: a header, then `{"line", "cursor", "out"}` per answered
input line. It may end anywhere; what is not whole at its end is dropped.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

from penstock.batch.reader import InputFile
from penstock.limits import MAX_CURSOR

VERSION = 1
"""Of the journal's format: a journal of another is not read."""

IN_EVERY_VERSION = {"key", "batch", "version"}
"""What the header has in a journal of any version, by which one is known."""

BEGINNING = b'{"key": "'
"""How a header that is torn begins."""

HEADER_LIMIT_BYTES = 64 * 1024
"""Most that is read of the first line of a file that may be anything; a header has a few hundred bytes."""

CANNOT_BE_SYNCED = {errno.EINVAL, errno.ENOTSUP, errno.EACCES}
"""What a directory says whose file system has no way to sync it, or that may be written but not read."""

OF_ANSWERED: dict[str, Any] = {"line": 0, "cursor": 0, "out": {}}
"""Says in a journal that its run had ended before: no answer, for no line has this number, and passed over as one for
no line by versions that do not know it."""

READ_AND_WRITTEN = stat.S_IRUSR | stat.S_IWUSR
"""What the mode of a journal has whatever that of its output: the next run opens it again."""

NOT_ANSWERED = -1
"""In the place of the offset of an answer."""


class JournalError(Exception):
    """The journal cannot be used; the text says why and what to do."""


class JournalWriteError(JournalError):
    """The disk does not take what the journal has to note."""


class WriteStoppedError(Exception):
    """The output was not written because somebody did not want it any more; the journal is kept."""


@dataclass(frozen=True, slots=True)
class Header:
    """Whose journal it is."""

    key: str
    """What is answered: output path, input content and model, as one name."""
    batch: str
    """Under which name: the key, unless the run was begun afresh."""
    store_id: str
    """In which store the cursor counts."""
    input_sha256: str
    version: int = VERSION


HEADER_FIELDS = {field.name for field in fields(Header)}


def journal_path(output: Path) -> Path:
    """Return where the journal of `output` is."""
    return output.with_name(output.name + ".partial")


def writing_path(output: Path) -> Path:
    """Return where `output` is while it is being written; it takes its name when it is whole."""
    return output.with_name(output.name + ".writing")


class Journal:
    """An open, locked journal. `cursor` is where to go on watching; 0 is the beginning."""

    def __init__(self, path: Path, source: InputFile, fresh: bool = False, output: Path | None = None) -> None:
        """Open the journal at `path`, made if missing; with `fresh` nothing is taken from it, and `start` begins anew.

        What there is at `output` hands on its mode, for what the journal has is to be there.
        Raises JournalError, the file being as it was, if another process has it or if it is no journal or, where
        something is to be taken from it, of another version or with a line that is none of a journal's. Raises OSError.
        """
        self.path = path
        self.header: Header | None = None
        self.cursor = 0
        self._cursor_of_header: int | None = None
        """In another store than the header's: what is noted in place of its cursors, for a run in that one again."""
        self.answered = 0
        self.removed = False
        self.of_answered = False
        """Whether the run had ended before: each line had its answer once, which may be an error."""
        self.discards = ""
        """The batch whose journal `start` discards, unread, for a fresh run; empty if it is none's."""
        self._source = source
        self._offsets = array("q", [NOT_ANSWERED]) * len(source)
        self._errors = bytearray(len(source))
        """1 for each line whose answer is an error, which a later answer replaces."""
        self._file = _locked(path)
        self._end = 0
        try:
            batch = self._check()
            if fresh:
                self.discards = batch
            else:
                self._load()
            if output is not None:
                # One that somebody else has made says itself who may read it.
                with suppress(PermissionError):
                    _keep_mode(self._file, output, READ_AND_WRITTEN)
        except BaseException:
            self._file.close()
            raise

    def start(self, header: Header, of_answered: bool = False) -> None:
        """Begin, or go on, with this header. Raises JournalError if the journal is of another run, JournalWriteError.

        A journal that begins here notes whether it is `of_answered` lines.

        In another store the cursor means nothing: watching starts over, and what is answered stays answered. The file
        goes on to say how far the store of its header was watched.
        """
        found = self.header
        if found is None:
            self.forget()
            self.of_answered = of_answered
            self._write(asdict(header), *([OF_ANSWERED] if of_answered else []))
        elif (found.key, found.batch) != (header.key, header.batch):
            raise JournalError(f"{self.path} is of {_difference(found, header)}; --fresh discards it")
        elif found.store_id != header.store_id:
            self._cursor_of_header, self.cursor = self.cursor, 0
        self.header = header

    @property
    def is_empty(self) -> bool:
        """Whether the file holds nothing, so that nothing is to be gone on with."""
        return os.fstat(self._file.fileno()).st_size == 0

    def forget(self) -> None:
        """Become empty: there is nothing that could be gone on with. Raises JournalWriteError."""
        with self._changing():
            self._file.truncate(0)
        self._end = 0

    def is_answered(self, line: int) -> bool:
        """Whether input line number `line` has its answer."""
        at = self._source.position(line)
        return at is not None and self._offsets[at] != NOT_ANSWERED

    def is_settled(self, line: int) -> bool:
        """Whether line number `line` has an answer that is no error: no other will take its place."""
        at = self._source.position(line)
        return at is not None and self._offsets[at] != NOT_ANSWERED and not self._errors[at]

    @property
    def errors(self) -> int:
        """How many lines have an answer that is an error."""
        return self._errors.count(True)

    def take_errors_back(self) -> None:
        """Count the lines whose answers are errors as not answered.

        The file keeps these answers, for a run to go on with that does not want others.
        """
        for at in [at for at, is_error in enumerate(self._errors) if is_error]:
            self._offsets[at] = NOT_ANSWERED
            self._errors[at] = False
            self.answered -= 1

    def add(self, line: int, cursor: int, out: dict[str, Any]) -> None:
        """Note the answer of line number `line`. Raises JournalWriteError.

        A second answer of a line takes the place of one that is an error, and is ignored beside one that is none.
        """
        self.cursor = max(self.cursor, cursor)
        if not self._place(line, out):
            return
        noted = self.cursor if self._cursor_of_header is None else self._cursor_of_header
        self._write({"line": line, "cursor": noted, "out": out})

    def out(self, line: int) -> dict[str, Any]:
        """Return the answer of line number `line`; raises KeyError if it has none."""
        at = self._source.position(line)
        if at is None or self._offsets[at] == NOT_ANSWERED:
            raise KeyError(line)
        self._file.seek(self._offsets[at])
        found: dict[str, Any] = json.loads(self._file.readline())["out"]
        return found

    def close(self) -> None:
        """Close the file and let others have it."""
        # Closing tries once more to write what could not be written, which has been said.
        with suppress(OSError):
            self._file.close()

    def remove(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)
        self.removed = True

    def _write(self, *records: dict[str, Any]) -> None:
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        data = text.encode("utf-8", "surrogatepass")
        with self._changing():
            self._file.write(data)
            # To the page cache at once, so that a killed command loses at most the line it was writing.
            self._file.flush()
        self._end += len(data)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise JournalWriteError(f"cannot write {self.path}: {error.strerror}") from None

    def _check(self) -> str:
        """Return the batch whose journal the file is, empty if that cannot be told.

        Raises JournalError if it is a file that no version of this module has written.
        """
        self._file.seek(0)
        batch = _batch_in(self._file.readline(HEADER_LIMIT_BYTES))
        if batch is None:
            raise JournalError(f"{self.path} is not a journal; move it away or name another output file")
        return batch

    def _load(self) -> None:
        self._file.seek(0)
        for number, data in enumerate(self._file, 1):
            try:
                record = _whole(data)
            except ValueError:
                break
            if self.header is None:
                self.header = self._header_of(record)
            elif _is_answer(record):
                self._take(record)
            else:
                raise self._odd(number)
            self._end += len(data)
        self._file.truncate(self._end)

    def _header_of(self, record: dict[str, Any]) -> Header:
        """Return the header that the first line is, which is known to be that of some version."""
        if record["version"] != VERSION or record.keys() != HEADER_FIELDS:
            raise JournalError(f"{self.path} is a journal of another version; --fresh discards it")
        header = Header(**record)
        if not all(isinstance(text, str) for text in (header.key, header.batch, header.store_id, header.input_sha256)):
            raise self._odd(1)
        return header

    def _take(self, record: dict[str, Any]) -> None:
        """Note what an answer says."""
        self.of_answered |= record["line"] == 0
        self._place(record["line"], record["out"])
        self.cursor = max(self.cursor, record["cursor"])

    def _place(self, line: int, out: dict[str, Any]) -> bool:
        """Have the answer of a line stand where the file ends now; return whether it counts."""
        at = self._source.position(line)
        if at is None or (self._offsets[at] != NOT_ANSWERED and not self._errors[at]):
            return False
        self.answered += self._offsets[at] == NOT_ANSWERED
        self._offsets[at] = self._end
        self._errors[at] = out.get("error") is not None
        return True

    def _odd(self, number: int) -> JournalError:
        """Return the error about line `number`, which is whole and yet none that this module writes."""
        return JournalError(f"{self.path}:{number}: no line of a journal; --fresh discards the whole file")


def _difference(found: Header, wanted: Header) -> str:
    """Return whose journal it is that has the header `found` in place of `wanted`, as far as that can be known."""
    if found.input_sha256 != wanted.input_sha256:
        return "another run: the input file has changed since"
    # The key is a digest of the input, the output's path and the model: that one of the latter differs, not which.
    return (
        "another run of this input file: one with another --model, or whose output had another name or was in another "
        "directory; with what it had, it goes on"
    )


def _locked(path: Path) -> BinaryIO:
    """Return the file at `path`, made if missing, with its lock.

    Raises JournalError if another process has it. Raises OSError.
    """
    while True:
        file = path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            if isinstance(error, BlockingIOError):
                raise JournalError(f"another run is writing {path}") from None
            raise
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        # A run that ended has removed it after it was opened here; its lock would keep nobody away.
        file.close()


def _batch_in(data: bytes) -> str | None:
    """Return the batch that a journal's first line names, empty for what is there of a torn one; None if it is none."""
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        return "" if not data.endswith(b"\n") and data[: len(BEGINNING)] == BEGINNING[: len(data)] else None
    return str(record["batch"]) if isinstance(record, dict) and record.keys() >= IN_EVERY_VERSION else None


def _whole(data: bytes) -> Any:
    """Return what a line says. Raises ValueError if it is what is there of a line that was being written."""
    if not data.endswith(b"\n"):
        raise ValueError("torn")
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def _is_answer(record: Any) -> bool:
    """Whether `record` is an answer as `Journal.add` writes it."""
    if not isinstance(record, dict) or not record.keys() >= {"line", "cursor", "out"}:
        return False
    line, cursor = record["line"], record["cursor"]
    return type(line) is type(cursor) is int and 0 <= cursor <= MAX_CURSOR and isinstance(record["out"], dict)


def write_output(
    journal: Journal, source: InputFile, output: Path, stopped: Callable[[], bool] = lambda: False
) -> None:
    """Write every line's answer in input order, all or nothing, then remove the journal.

    What was at `output` hands on its mode. Raises OSError, and WriteStoppedError if `stopped` says so before the last
    line.
    """
    beside = writing_path(output)
    with beside.open("wb") as file:
        try:
            _keep_mode(file, output)
            for line in source.lines:
                if stopped():
                    raise WriteStoppedError
                text = json.dumps(journal.out(line), ensure_ascii=False)
                file.write(text.encode("utf-8", "backslashreplace") + b"\n")
            file.flush()
            os.fsync(file.fileno())
            beside.rename(output)
        except BaseException:
            # Nobody reads half an output, and a disk that is full has no room for one.
            with suppress(OSError):
                beside.unlink()
            raise
    _sync_directory(output.parent)
    journal.remove()


def _sync_directory(path: Path) -> None:
    """Have a rename outlast a loss of power, where that can be had."""
    try:
        directory = os.open(path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        if error.errno not in CANNOT_BE_SYNCED:
            raise


def _keep_mode(file: BinaryIO, replaced: Path, at_least: int = 0) -> None:
    """Let nobody read `file` who may not read what it replaces; called before anything is in it.

    With `at_least` the file has been here before: it keeps these bits, and gets no others that it has not.
    """
    with suppress(FileNotFoundError):
        mode, has = stat.S_IMODE(replaced.stat().st_mode) & 0o777, stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if at_least:
            mode = mode & has | at_least
        # Asked first, for there are file systems with one mode for all files, on which none can be set.
        if mode != has:
            os.fchmod(file.fileno(), mode)
