"""Compactions that meet damage: one refusal of writes, and after it the damage costs its own rows alone."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.queue.core.ages import NO_GAPS
from services.queue.core.effects import Write
from services.queue.core.records import (
    CLOCK_KEY,
    FAMILIES,
    META,
    PAYLOADS,
    RESULTS,
    STORE_ID_KEY,
    encode_clock,
    seq_key,
)
from services.queue.storage import spared as spared_module
from services.queue.storage.lives import Lives
from services.queue.storage.recovery import Recovery
from services.queue.storage.rocksdb_store import RocksdbStore
from services.queue.storage.spared import FAILURES_S, MOST_FAILURES, Spared
from services.queue.storage.store import StoreDamagedError, StoreError

MIB = 1 << 20
ROWS = 400
IN_TABLES, IN_BLOBS = 3000, 100_000
"""Bytes of a row, kept in table files or in blob files."""

PROBE = [Write(META, b"probe", b"")]


@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[Callable[[int], RocksdbStore]]:
    """Open a store of results of so many bytes, half of them deleted, a byte of one that lives altered."""
    made: list[RocksdbStore] = []

    def make(row_bytes: int) -> RocksdbStore:
        first = RocksdbStore(tmp_path)
        for n in range(0, ROWS, 20):
            first.write([Write(RESULTS, seq_key(k), os.urandom(row_bytes)) for k in range(n, n + 20)])
        first._families[RESULTS].flush(True)
        wanted = first.get(RESULTS, seq_key(1))
        first.close()
        assert wanted is not None
        alter(tmp_path, "*.sst" if row_bytes == IN_TABLES else "*.blob", wanted[100:200])
        store = RocksdbStore(tmp_path)
        store.write([Write(RESULTS, seq_key(n), None) for n in range(20, ROWS, 2)])
        made.append(store)
        return store

    yield make
    for store in made:
        store.close()


def alter(directory: Path, files: str, text: bytes) -> None:
    """Alter `text`, which is in one of the files."""
    for path in directory.glob(files):
        at = path.read_bytes().find(text)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes(len(text)))
            return
    raise AssertionError(f"none of {files} has it")


@pytest.mark.parametrize("row_bytes", [IN_TABLES, IN_BLOBS])
def test_writes_are_refused_once(damaged: Callable[[int], RocksdbStore], row_bytes: int) -> None:
    store = damaged(row_bytes)
    refused = 0
    for _ in range(6):
        try:
            store.reclaim(0, True)
            store.write(PROBE)
        except StoreError:
            refused += 1
            with pytest.raises(StoreError, match="Corruption"):
                store.write(PROBE)  # as who wants to know whether it writes again
            store.reopen()
    assert refused == 1
    with pytest.raises(StoreDamagedError):
        store.get(RESULTS, seq_key(1))
    assert store.get(RESULTS, seq_key(20)) is None
    assert store.get(RESULTS, seq_key(ROWS - 1)) is not None
    assert store._spared.families == ({RESULTS} if row_bytes == IN_TABLES else set())


def test_space_of_others_comes_back(damaged: Callable[[int], RocksdbStore], tmp_path: Path) -> None:
    store = damaged(IN_TABLES)
    store.reclaim(0, True)
    with pytest.raises(StoreError):
        store.write(PROBE)
    store.reopen()
    for keep in (bytes(IN_BLOBS), None):
        store.write([Write(PAYLOADS, seq_key(n), keep) for n in range(100)])
        store._families[PAYLOADS].flush(True)
    assert store.reclaim(0, True) > 5 * MIB


def test_a_compaction_that_failed_settles_nothing(damaged: Callable[[int], RocksdbStore]) -> None:
    store = damaged(IN_TABLES)
    assert store.reclaim(0, True) == 0
    assert store._space._settled[RESULTS] == 0
    assert store._space._errors() > 0


@pytest.fixture
def incomplete(tmp_path: Path) -> Iterator[RocksdbStore]:
    """Open a store of results of which a blob file is missing, half of them deleted."""
    store = RocksdbStore(tmp_path)
    store.write([Write(RESULTS, seq_key(n), os.urandom(IN_BLOBS)) for n in range(40)])
    store._families[RESULTS].flush(True)
    store.close()
    min(tmp_path.glob("*.blob")).unlink()
    store = RocksdbStore(tmp_path)
    store.write([Write(RESULTS, seq_key(n), None) for n in range(0, 40, 2)])
    yield store
    store.close()


def refusals(store: RocksdbStore, rounds: int) -> int:
    """Give space back and write so many times, as the queue does; return how often writes were refused."""
    refused = 0
    for _ in range(rounds):
        try:
            store.reclaim(0, True)
            store.write(PROBE)
        except StoreError:
            refused += 1
            store.reopen()
    return refused


def test_a_file_that_is_missing_is_damage(incomplete: RocksdbStore) -> None:
    assert refusals(incomplete, 8) == 1
    assert (incomplete._spared.families, incomplete._spared.blobs) == (set(), True)


def test_work_that_fails_again_and_again_is_left_undone_whatever_the_error(
    incomplete: RocksdbStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spared_module, "READING", re.compile("what no error says"))
    assert refusals(incomplete, MOST_FAILURES + 5) == MOST_FAILURES
    assert incomplete._spared.families == set(FAMILIES)
    assert caplog.text.count("a compaction met damage") == 1
    assert incomplete.get(RESULTS, seq_key(2)) is None


@pytest.mark.parametrize(
    "begin", [lambda store: Recovery(store).pass_numbers_over(), lambda store: Lives(store, 1 << 60)]
)
def test_damage_that_is_met_at_a_start_does_not_end_it(
    damaged: Callable[[int], RocksdbStore], begin: Callable[[RocksdbStore], object]
) -> None:
    store = damaged(IN_TABLES)
    store.write([Write(META, STORE_ID_KEY, b"store"), Write(META, CLOCK_KEY, encode_clock(1, NO_GAPS))])
    store.reclaim(0, True)
    begin(store)
    assert store._spared.families == {RESULTS}


class Tables:
    """A family with table files of these numbers."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers

    def property_value(self, _: str) -> str:
        return "--- level 0 --- version# 6 ---\n" + "".join(
            f" {n}:1052[1 .. 1]['61' seq:1](0)\n" for n in self._numbers
        )


def test_what_an_error_places_is_spared_and_else_blobs_and_then_everything() -> None:
    families = {RESULTS: Tables(19, 9), PAYLOADS: Tables(10)}
    spared = Spared()
    spared.note("Corruption: block checksum mismatch: in /data/000009.sst offset 3029046 size 6041", families)
    assert (spared.families, spared.blobs) == ({RESULTS}, False)
    spared.note("Corruption: Blob CRC mismatch", families)
    assert (spared.families, spared.blobs) == ({RESULTS}, True)
    spared.note("Corruption: in /data/000090.sst, which is gone", families)
    assert spared.families == {RESULTS, PAYLOADS}


PREAD = "IO error: While pread offset 0 len 3898: {}: Input/output error"


@pytest.mark.parametrize(
    ("error", "spares"),
    [
        (PREAD.format("/data/000010.sst"), ({PAYLOADS}, False)),
        (PREAD.format(".run/queue/000010.sst"), ({PAYLOADS}, False)),
        (PREAD.format("/data/000011.blob"), (set(), True)),
        ("IO error: No such file or directory: while stat a file for size: /data/000011.blob: No such", (set(), True)),
        ("IO error: While open a file for random read: /data/000019.sst: Input/output error", ({RESULTS}, False)),
        ("IO error: While open a file for random read: /data/000019.sst: Too many open files", (set(), False)),
        ("IO error: While pread offset 0 len 9: /data/000019.sst: Cannot allocate memory", (set(), False)),
        ("IO error: No space left on device: While appending to file: /data/000020.sst: No space", (set(), False)),
        ("IO error: While appending to file: /read/000020.sst: Input/output error", (set(), False)),
        ("IO error: While fsync: /data/000021.blob: Input/output error", (set(), False)),
    ],
)
def test_what_cannot_be_read_is_spared_and_what_cannot_be_written_is_not(
    error: str, spares: tuple[set[str], bool]
) -> None:
    spared = Spared()
    spared.note(error, {RESULTS: Tables(19, 9), PAYLOADS: Tables(10)})
    assert (spared.families, spared.blobs) == spares


@pytest.mark.parametrize(
    ("error", "between_s", "is_all"),
    [
        ("IO error: never heard of", FAILURES_S / MOST_FAILURES, True),
        ("IO error: never heard of", FAILURES_S, False),
        ("IO error: No space left on device: While appending to file: /data/000020.sst", 1.0, False),
    ],
)
def test_failures_far_apart_and_a_full_disk_do_not_end_all_compactions(
    error: str, between_s: float, is_all: bool
) -> None:
    times = (n * between_s for n in range(99))
    spared = Spared(lambda: next(times))
    families = {RESULTS: Tables(19), PAYLOADS: Tables(10)}
    for _ in range(MOST_FAILURES - 1):
        spared.note(error, families)
    assert not spared.families
    spared.note(error, families)
    assert spared.families == (set(families) if is_all else set())
