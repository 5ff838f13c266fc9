"""Compactions that meet damage: one refusal of writes, and after it the damage costs its own rows alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.queue.core.effects import Write
from services.queue.core.records import META, PAYLOADS, RESULTS, seq_key
from services.queue.storage.rocksdb_store import RocksdbStore
from services.queue.storage.spared import Spared
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
