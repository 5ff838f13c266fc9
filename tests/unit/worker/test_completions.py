"""Completions that wait for the queue: bounded in memory and in the file, complete on disk, none dropped."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.completions import Completions
from services.worker.pages import PAGE_BYTES
from tests.support.effort import examples

MOST = 100
LOST = partial(bytes, b"lost")
"""Makes what is sent for a completion that the disk does not give back."""


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.binary(min_size=1, max_size=60))))
def test_what_is_kept_is_read_and_memory_is_bounded(steps: list[tuple[bool, int, bytes]]) -> None:
    completions, model = Completions(MOST), dict[str, bytes]()
    for ends, number, content in steps:
        run_id = str(number)
        if ends:
            completions.forget(run_id)
            model.pop(run_id, None)
        elif run_id not in model:
            completions.keep(run_id, content, LOST)
            model[run_id] = content
        assert completions.kept_bytes <= MOST
        assert {name: completions.read(name) for name in model} == model
        assert all(name in completions for name in model)
        assert (run_id in completions) is (run_id in model)
    for run_id in model:
        completions.forget(run_id)
    assert (completions.kept_bytes, file_bytes(completions)) == (0, 0)


def file_bytes(completions: Completions) -> int:
    """Return how large the file is."""
    return 0 if completions._file is None else os.fstat(completions._file.fileno()).st_size


def in_pages(content: bytes) -> int:
    """Return what a completion takes of a file."""
    return -(-len(content) // PAGE_BYTES) * PAGE_BYTES


SIZES = st.sampled_from([90, PAGE_BYTES - 7, PAGE_BYTES, 2 * PAGE_BYTES, 3 * PAGE_BYTES - 1])
CONTENT = st.builds(lambda byte, size: bytes([byte]) * size, st.integers(0, 255), SIZES)


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4), CONTENT), max_size=60))
def test_the_file_is_no_larger_than_what_was_in_it_at_once(steps: list[tuple[bool, int, bytes]]) -> None:
    completions, model, most = Completions(0), dict[str, bytes](), 0
    for ends, number, content in steps:
        run_id = str(number)
        if ends:
            completions.forget(run_id)
            model.pop(run_id, None)
        elif run_id not in model:
            completions.keep(run_id, content, LOST)
            model[run_id] = content
        most = max(most, sum(map(in_pages, model.values())))
        assert file_bytes(completions) <= most
        assert {name: completions.read(name) for name in model} == model
    for run_id in model:
        completions.forget(run_id)
    assert file_bytes(completions) == 0


def test_a_backlog_that_never_ends_keeps_the_file_as_small_as_the_backlog() -> None:
    # A stream of results that the queue records as fast as they come, always some behind.
    completions, backlog, size = Completions(MOST), 5, 3 * PAGE_BYTES
    for number in range(500):
        completions.keep(str(number), bytes([number % 256]) * (size - number % 7), LOST)
        completions.forget(str(number - backlog))
        assert file_bytes(completions) <= (backlog + 1) * size
    waiting = range(500 - backlog, 500)
    assert [completions.read(str(n)) for n in waiting] == [bytes([n % 256]) * (size - n % 7) for n in waiting]


def test_the_file_starts_over_when_everything_in_it_was_recorded() -> None:
    completions = Completions(MOST)
    for _ in range(50):
        for number in range(4):
            completions.keep(str(number), b"x" * 90, LOST)
        assert file_bytes(completions) == 2 * PAGE_BYTES + 90
        for number in range(4):
            completions.forget(str(number))
        assert file_bytes(completions) == 0


def test_a_disk_that_takes_nothing_costs_memory_and_no_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    completions = Completions(MOST)
    for number in range(5):
        completions.keep(str(number), bytes([number]) * 90, LOST)
    assert [completions.read(str(number)) for number in range(5)] == [bytes([number]) * 90 for number in range(5)]


def test_a_file_that_takes_half_counts_as_one_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    completions = Completions(MOST)
    completions.keep("a", b"a" * 90, LOST)
    monkeypatch.setattr(os, "pwrite", lambda *_: 10)
    completions.keep("b", b"b" * 90, LOST)
    assert completions.read("b") == b"b" * 90
    assert completions.kept_bytes == 180


def test_a_disk_that_becomes_full_keeps_nothing_of_what_it_took_half_of(monkeypatch: pytest.MonkeyPatch) -> None:
    completions, write, room = Completions(0), os.pwrite, PAGE_BYTES + 100

    def write_what_fits(file: int, content: bytes, offset: int) -> int:
        return write(file, content[: max(room - offset, 0)], offset)

    monkeypatch.setattr(os, "pwrite", write_what_fits)
    for name in "ab":
        completions.keep(name, name.encode() * 200, LOST)
    assert (completions.kept_bytes, file_bytes(completions)) == (200, PAGE_BYTES)
    completions.forget("a")
    completions.keep("c", b"c" * 200, LOST)
    assert (completions.kept_bytes, file_bytes(completions)) == (200, 200)
    assert [completions.read(name) for name in "bc"] == [b"b" * 200, b"c" * 200]


def test_a_file_that_cannot_be_cut_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "ftruncate", refuse)
    completions = Completions(0)
    for number in range(20):
        completions.keep(str(number), bytes([number]) * 90, LOST)
        assert completions.read(str(number)) == bytes([number]) * 90
        completions.forget(str(number))
    assert file_bytes(completions) == 90


def test_a_forgotten_run_has_no_completion() -> None:
    completions = Completions(MOST)
    assert completions.read("gone") == b""
    completions.forget("gone")


def test_a_completion_that_the_disk_does_not_give_back_is_reported_as_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    completions = Completions(MOST)
    completions.keep("kept", b"a" * 90, LOST)
    completions.keep("spilled", b"b" * 90, LOST)

    def broken(*_: Any) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", broken)
    assert [completions.read("kept"), completions.read("spilled")] == [b"a" * 90, b"lost"]
    assert "spilled: its completion cannot be read back" in caplog.text
    assert "Input/output error" in caplog.text
    monkeypatch.setattr(os, "pread", lambda *_: b"b" * 89)
    assert completions.read("spilled") == b"lost"
