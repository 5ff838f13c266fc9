"""The journal: torn anywhere, it is read back whole up to the tear."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.batch.journal import Header, Journal, JournalError, WriteStoppedError, journal_path, write_output
from penstock.batch.reader import InputFile

HEADER = Header("key", "rb-1", "store", "sha")


@pytest.fixture
def source(tmp_path: Path) -> InputFile:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"{}\n\n{}\n{}\n")
    return InputFile(path)


def test_what_is_written_is_read_back(tmp_path: Path, source: InputFile) -> None:
    path = journal_path(tmp_path / "out.jsonl")
    journal = Journal(path, source)
    journal.start(HEADER)
    journal.add(3, 5, {"a": "é"})
    journal.add(1, 0, {"b": 1})
    journal.add(3, 9, {"a": "again"})
    journal.add(2, 10, {"blank": True})
    journal.close()
    again = Journal(path, source)
    again.start(HEADER)
    assert (again.answered, again.cursor) == (2, 5)
    assert again.out(3) == {"a": "é"}
    assert again.is_answered(1)
    assert not again.is_answered(4)
    with pytest.raises(KeyError):
        again.out(4)
    again.add(4, 11, {"c": 2})
    again.close()
    assert json.loads(path.read_text().splitlines()[-1]) == {"line": 4, "cursor": 11, "out": {"c": 2}}


@given(cut=st.integers(0, 400))
def test_a_torn_journal_keeps_what_is_whole(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    directory = tmp_path_factory.mktemp("journal")
    (directory / "in").write_bytes(b"{}\n" * 5)
    source = InputFile(directory / "in")
    path = directory / "out.partial"
    journal = Journal(path, source)
    journal.start(HEADER)
    for line in range(1, 6):
        journal.add(line, line * 10, {"text": "x" * line})
    journal.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    torn = Journal(path, source)
    expected = max(whole[:cut].count(b"\n") - 1, 0)
    assert torn.answered == expected
    assert torn.cursor == expected * 10
    torn.start(HEADER)
    for line in range(1, 6):
        torn.add(line, line * 10, {"text": "x" * line})
    torn.close()
    assert path.read_bytes() == whole
    source.close()


def test_a_run_in_another_store_is_no_news_of_the_store_that_the_header_names(
    tmp_path: Path, source: InputFile
) -> None:
    other = Header("key", "rb-1", "other store", "sha")
    cursors = []
    for header, answer in [(HEADER, (1, 7)), (other, (3, 2**60)), (other, (1, 9)), (HEADER, (4, 8))]:
        journal = Journal(tmp_path / "j", source)
        journal.start(header)
        cursors.append(journal.cursor)
        journal.add(*answer, {})
        journal.close()
    assert cursors == [0, 0, 0, 7]
    journal = Journal(tmp_path / "j", source)
    assert (journal.cursor, journal.answered) == (8, 3)
    journal.close()


def test_another_store_starts_the_watch_over(tmp_path: Path, source: InputFile) -> None:
    path = tmp_path / "j"
    journal = Journal(path, source)
    journal.start(HEADER)
    journal.add(1, 7, {})
    journal.close()
    again = Journal(path, source)
    again.start(Header("key", "rb-1", "other store", "sha"))
    assert (again.cursor, again.answered) == (0, 1)
    again.close()


def test_the_journal_of_another_input_is_refused(tmp_path: Path, source: InputFile) -> None:
    path = tmp_path / "j"
    journal = Journal(path, source)
    journal.start(HEADER)
    journal.close()
    again = Journal(path, source)
    with pytest.raises(JournalError, match=r"another run: the input file has changed since; --fresh"):
        again.start(Header("other", "rb-2", "store", "another sha"))
    with pytest.raises(JournalError, match=r"another run of this input file: .* another --model, .* another name"):
        again.start(Header("other", "rb-2", "store", "sha"))
    again.close()


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(
    "content",
    [
        b'{"something": "else"}\n',
        b'{"key": "of something else"}',
        b'{"key": "is no JSON\n{}\n',
        b"half of a download\n\x00\xff",
        b"no line at all",
        b"[" * 100_000 + b"\n",
        b'["key", "batch", "version"]\n',
    ],
)
def test_a_file_that_is_no_journal_is_refused_and_kept(
    tmp_path: Path, source: InputFile, content: bytes, fresh: bool
) -> None:
    path = tmp_path / "j"
    path.write_bytes(content)
    with pytest.raises(JournalError, match=f"^{path} is not a journal"):
        Journal(path, source, fresh=fresh)
    assert path.read_bytes() == content


@pytest.mark.parametrize("difference", [b'"version": 2', b'"version": 1, "more": true'])
def test_the_journal_of_another_version_is_kept_until_a_fresh_run_begins(
    tmp_path: Path, source: InputFile, difference: bytes
) -> None:
    path = tmp_path / "j"
    content = b'{"key": "key", "batch": "rb-1", %b}\n{"line": 1}\n' % difference
    path.write_bytes(content)
    with pytest.raises(JournalError, match="of another version; --fresh discards it") as refused:
        Journal(path, source)
    assert path.read_bytes() == content
    journal = Journal(path, source, fresh=True)
    assert refused.tb is not None, "the lock is free while the error keeps the frames"
    assert (journal.header, journal.answered, journal.is_empty) == (None, 0, False)
    assert path.read_bytes() == content
    journal.start(HEADER)
    journal.close()
    again = Journal(path, source)
    assert again.header == HEADER
    again.close()


@pytest.mark.parametrize(
    "odd",
    [
        b'{"line": "2", "cursor": 1, "out": {}}',
        b'{"line": [1], "cursor": 1, "out": {}}',
        b'{"line": true, "cursor": 1, "out": {}}',
        b'{"line": 3, "cursor": "1", "out": {}}',
        b'{"line": 3, "cursor": null, "out": {}}',
        b'{"line": 3, "cursor": -1, "out": {}}',
        b'{"line": 3, "cursor": 18446744073709551616, "out": {}}',
        b'{"line": 3, "cursor": 1, "out": [1]}',
        b'{"line": 3, "cursor": 1}',
        b"3",
        b'{"key": "key", "batch": "rb-1", "store_id": "store", "input_sha256": "sha", "version": 1}',
    ],
)
def test_a_whole_line_that_is_none_of_a_journals_is_named_and_kept(
    tmp_path: Path, source: InputFile, odd: bytes
) -> None:
    path = tmp_path / "j"
    journal = Journal(path, source)
    journal.start(HEADER)
    journal.add(1, 7, {})
    journal.close()
    content = path.read_bytes() + odd + b"\n" + b'{"line": 4, "cursor": 9, "out": {}}\n'
    path.write_bytes(content)
    with pytest.raises(JournalError, match=f"^{path}:3: .*--fresh") as refused:
        Journal(path, source)
    assert path.read_bytes() == content
    assert refused.tb is not None, "the lock is free while the error keeps the frames"
    Journal(path, source, fresh=True).close()


@pytest.mark.parametrize(
    ("name", "value"),
    [("key", "1"), ("batch", "null"), ("store_id", "[]"), ("input_sha256", "{}")],
)
def test_a_header_of_wrong_types_is_named(tmp_path: Path, source: InputFile, name: str, value: str) -> None:
    path = tmp_path / "j"
    header = json.dumps(asdict(HEADER) | {name: "WRONG"}).replace('"WRONG"', value) + "\n"
    path.write_text(header)
    with pytest.raises(JournalError, match=f"^{path}:1: "):
        Journal(path, source)
    assert path.read_text() == header


def test_a_whole_line_that_is_no_json_is_the_end_like_a_torn_one(tmp_path: Path, source: InputFile) -> None:
    path = tmp_path / "j"
    journal = Journal(path, source)
    journal.start(HEADER)
    journal.add(1, 7, {})
    journal.close()
    content = path.read_bytes()
    for damage in (b"\x00\x00\n", b"[" * 100_000 + b"\n", b"\xff\n"):
        path.write_bytes(content + damage)
        again = Journal(path, source)
        assert again.answered == 1
        again.close()
        assert path.read_bytes() == content


def test_a_fresh_run_takes_nothing_from_the_journal(tmp_path: Path, source: InputFile) -> None:
    path = tmp_path / "j"
    journal = Journal(path, source)
    assert journal.is_empty
    journal.start(HEADER)
    journal.add(1, 7, {})
    journal.close()
    fresh = Journal(path, source, fresh=True)
    assert (fresh.header, fresh.answered, fresh.cursor) == (None, 0, 0)
    fresh.start(Header("other", "rb-2", "store", "sha"))
    fresh.add(3, 1, {"b": 2})
    assert fresh.out(3) == {"b": 2}
    fresh.close()
    assert len(path.read_text().splitlines()) == 2


def test_two_runs_cannot_write_one_journal(tmp_path: Path, source: InputFile) -> None:
    journal = Journal(tmp_path / "j", source)
    with pytest.raises(JournalError, match="another run"):
        Journal(tmp_path / "j", source)
    journal.close()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EINTR])
def test_a_lock_that_cannot_be_had_for_another_reason_is_told_as_it_is(
    tmp_path: Path, source: InputFile, number: int
) -> None:
    with patch("fcntl.flock", side_effect=failing(number)), pytest.raises(OSError, match=os.strerror(number)) as told:
        Journal(tmp_path / "j", source)
    assert told.value.errno == number


@pytest.mark.parametrize("begun_anew", [False, True])
def test_a_journal_that_its_run_removes_while_it_is_opened_is_not_taken(
    tmp_path: Path, source: InputFile, begun_anew: bool
) -> None:
    path = tmp_path / "j"
    ended = Journal(path, source)
    ended.start(HEADER)
    lock = fcntl.flock

    def end_and_lock(file: BinaryIO, how: int) -> None:
        if not ended.removed:
            ended.remove()
            ended.close()
            if begun_anew:
                path.touch()
        lock(file, how)

    with patch("fcntl.flock", end_and_lock):
        journal = Journal(path, source)
    journal.start(HEADER)
    assert path.read_bytes()
    with pytest.raises(JournalError, match="another run"):
        Journal(path, source)
    journal.close()


def test_the_output_is_in_input_order_and_the_journal_goes(tmp_path: Path, source: InputFile) -> None:
    output = tmp_path / "out.jsonl"
    journal = Journal(journal_path(output), source)
    journal.start(HEADER)
    for line in (4, 1, 3):
        journal.add(line, line, {"line": line, "text": "ü"})
    write_output(journal, source, output)
    assert [json.loads(text)["line"] for text in output.read_text().splitlines()] == [1, 3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    journal.close()


def finished(directory: Path, source: InputFile) -> tuple[Journal, Path]:
    """Return a journal that has every answer, and where the output is to be."""
    output = directory / "out.jsonl"
    journal = Journal(journal_path(output), source)
    journal.start(HEADER)
    for line in source.lines:
        journal.add(line, line, {"line": line})
    return journal, output


def failing(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def test_an_output_that_cannot_be_written_leaves_the_old_one_and_the_journal(tmp_path: Path, source: InputFile) -> None:
    journal, output = finished(tmp_path, source)
    output.write_text("old")
    with patch("os.fsync", side_effect=failing(errno.ENOSPC)), pytest.raises(OSError, match="No space left"):
        write_output(journal, source, output)
    assert output.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.partial"]
    write_output(journal, source, output)
    assert len(output.read_text().splitlines()) == 3
    journal.close()


def test_a_writing_that_is_stopped_leaves_the_journal_alone(tmp_path: Path, source: InputFile) -> None:
    journal, output = finished(tmp_path, source)
    wanted = iter([False, True])
    with pytest.raises(WriteStoppedError):
        write_output(journal, source, output, lambda: next(wanted))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl.partial"]
    assert not journal.removed
    journal.close()


def test_an_output_keeps_the_mode_of_the_one_it_replaces(tmp_path: Path, source: InputFile) -> None:
    journal, output = finished(tmp_path, source)
    output.write_text("old")
    for mode in (0o600, 0o640):
        output.chmod(mode)
        write_output(journal, source, output)
        assert (stat.S_IMODE(output.stat().st_mode), len(output.read_text().splitlines())) == (mode, 3)
    journal.close()


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o444])
def test_a_journal_has_the_mode_of_the_output_that_it_is_to_replace(
    tmp_path: Path, source: InputFile, mode: int
) -> None:
    output, path = tmp_path / "out.jsonl", journal_path(tmp_path / "out.jsonl")
    Journal(path, source, output=output).close()
    unasked = stat.S_IMODE(path.stat().st_mode)
    output.write_text("old")
    assert unasked == stat.S_IMODE(output.stat().st_mode), "without an output it has that of any new file"
    output.chmod(mode)
    for _ in ("found", "made"):
        Journal(path, source, output=output).close()
        assert stat.S_IMODE(path.stat().st_mode) == mode & unasked | 0o600, "the next run writes to it"
        path.unlink()


def test_a_journal_whose_mode_cannot_be_set_is_used_as_it_is(tmp_path: Path, source: InputFile) -> None:
    output = tmp_path / "out.jsonl"
    output.touch(0o600)
    with patch("os.fchmod", side_effect=failing(errno.EPERM)):
        Journal(journal_path(output), source, output=output).close()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_directory_that_cannot_be_synced_fails_no_run(tmp_path: Path, source: InputFile, number: int) -> None:
    journal, output = finished(tmp_path, source)
    sync = os.fsync

    def sync_files(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise failing(number)
        sync(handle)

    with patch("os.fsync", sync_files):
        if number == errno.EIO:
            with pytest.raises(OSError, match="Input/output error"):
                write_output(journal, source, output)
        else:
            write_output(journal, source, output)
    assert len(output.read_text().splitlines()) == 3
    assert journal.removed == (number != errno.EIO), "a disk that fails may not have the output"
    journal.close()


def test_an_answer_takes_the_place_of_an_error(tmp_path: Path, source: InputFile) -> None:
    path = journal_path(tmp_path / "out.jsonl")
    journal = Journal(path, source)
    journal.start(HEADER)
    journal.add(1, 1, {"error": {"code": "a"}})
    journal.add(3, 2, {"error": {"code": "b"}})
    journal.add(1, 3, {"error": None})
    journal.add(1, 4, {"error": {"code": "late"}})
    assert (journal.answered, journal.errors) == (2, 1)
    journal.take_errors_back()
    assert (journal.answered, journal.errors, journal.is_answered(3), journal.is_settled(1)) == (1, 0, False, True)
    journal.close()
    again = Journal(path, source)
    assert (again.answered, again.errors, again.is_answered(3), again.is_settled(3)) == (2, 1, True, False)
    assert (again.out(1), again.out(3)) == ({"error": None}, {"error": {"code": "b"}})
    again.close()
