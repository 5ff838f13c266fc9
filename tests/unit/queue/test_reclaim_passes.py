"""How a family is compacted: in pieces that fit into what is free, to its end, and what came meanwhile after that."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from services.queue.core.effects import Write
from services.queue.core.records import PARTS, PAYLOADS, RESULTS, seq_key
from services.queue.storage import reclaim, reserve, rocksdb_store, space
from services.queue.storage.reclaim import Room, Step
from services.queue.storage.reserve import RESERVE_BYTES, Reserve
from services.queue.storage.rocksdb_store import RocksdbStore
from tests.support.compactions import Pieces

MIB = 1 << 20
PLENTY = 1 << 40
BODY = os.urandom(200_000)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RocksdbStore]:
    made = RocksdbStore(tmp_path)
    yield made
    made.close()


@pytest.fixture
def tables(store: RocksdbStore, monkeypatch: pytest.MonkeyPatch) -> RocksdbStore:
    """A store with 4000 rows in table files of a MiB that are compacted two at a time."""
    family = store._families[PAYLOADS]
    family.set_options({"target_file_size_base": str(MIB)})
    for first in (0, 1):  # two files that overlap
        store.write([Write(PAYLOADS, seq_key(n), os.urandom(2000)) for n in range(first, 4000, 2)])
        family.flush(True)
    family.compact_range(None, None)
    family.set_options({"disable_auto_compactions": "true"})
    monkeypatch.setattr(space, "PIECE_BYTES", 2 * MIB)
    return store


def assert_adjoin(pieces: Pieces) -> None:
    starts, ends = [start for start, _ in pieces.ranges], [end for _, end in pieces.ranges]
    assert starts[0] is None
    assert starts[1:] == [end + b"\0" for end in ends[:-1] if end]


def test_tables_are_compacted_in_ranges(tables: RocksdbStore, tmp_path: Path) -> None:
    tables.write([Write(PAYLOADS, seq_key(n), None) for n in range(0, 4000, 2)])
    pieces = tables._families[PAYLOADS] = Pieces(tables._families[PAYLOADS], tmp_path)
    assert tables.reclaim(0, True) > 3 * MIB
    assert len(pieces.ranges) >= 3
    assert pieces.ranges[-1][1] is None
    assert_adjoin(pieces)
    assert [tables.get(PAYLOADS, seq_key(n)) is None for n in range(4000)] == [n % 2 == 0 for n in range(4000)]


def test_what_lies_above_others_is_compacted_with_them(tables: RocksdbStore) -> None:
    def upper_bytes() -> int:
        return tables._space._upper_bytes(PAYLOADS)

    assert upper_bytes() == 0
    all_bytes = tables._space._usage(PAYLOADS).table_bytes
    tables.write([Write(PAYLOADS, seq_key(3999), None)])
    tables._families[PAYLOADS].flush(True)
    assert 0 < upper_bytes() < all_bytes / 3, "with the last of them"
    tables.write([Write(PAYLOADS, seq_key(0), None)])
    tables._families[PAYLOADS].flush(True)
    assert upper_bytes() == tables._space._usage(PAYLOADS).table_bytes > all_bytes
    tables._families[PAYLOADS].set_options({"max_bytes_for_level_base": str(MIB)})
    tables.write([Write(PAYLOADS, seq_key(n), None) for n in (0, 3999)])
    tables._families[PAYLOADS].flush(True)
    assert 0 < upper_bytes() < MIB, "where it goes there is nothing yet"


@pytest.mark.parametrize("option", [f"max_compaction_bytes={32 * MIB}", f"max_bytes_for_level_base={64 * MIB}"])
def test_a_compaction_of_bodies_is_small(tmp_path: Path, option: str) -> None:
    RocksdbStore(tmp_path).close()
    families = max(tmp_path.glob("OPTIONS-*")).read_text().split("[CFOptions ")
    small = {text.split('"')[1] for text in families if f"  {option}\n" in text}
    assert small == {PAYLOADS, RESULTS, PARTS}


def have_free(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(rocksdb_store, "free_bytes", lambda _: free_bytes)


def test_what_does_not_fit_does_not_begin(
    tables: RocksdbStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tables.write([Write(PAYLOADS, seq_key(n), None) for n in range(0, 4000, 2)])
    pieces = tables._families[PAYLOADS] = Pieces(tables._families[PAYLOADS], tmp_path)
    have_free(monkeypatch, 5 * MIB)  # half of 8 MiB live
    for _ in range(3):
        tables.reclaim(0, True)
    assert pieces.ranges == []
    assert [record.getMessage()[:8] for record in caplog.records] == ["payloads"], "once, not at each look"
    have_free(monkeypatch, 6 * MIB)
    assert tables.reclaim(0, True) > 3 * MIB


@pytest.mark.parametrize(("step", "gives_up"), [(2, True), (8, False)])
def test_what_fits_only_into_the_reserve_has_it_given_up_if_that_is_worth_it(
    tables: RocksdbStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, gives_up: bool
) -> None:
    monkeypatch.setattr(reclaim, "WORTH_THE_RESERVE_BYTES", 3 * MIB)
    monkeypatch.setattr(reserve, "free_bytes", lambda _: 300 * MIB)
    tables._reserve = Reserve(tmp_path)
    tables.keep_reserve()
    kept_meanwhile = list[bool]()

    def keep() -> None:
        tables.keep_reserve()
        kept_meanwhile.append(not tables.is_reserve_given_up())

    pieces = tables._families[PAYLOADS] = Pieces(tables._families[PAYLOADS], tmp_path, keep)
    have_free(monkeypatch, 3 * MIB)
    tables.write([Write(PAYLOADS, seq_key(n), None) for n in range(0, 4000, step)])
    freed = tables.reclaim(0, True, 256 * MIB)
    assert ((freed > 3 * MIB), tables.is_reserve_given_up(), bool(pieces.ranges)) == (gives_up,) * 3
    assert not any(kept_meanwhile), "not beside what it was given up for"
    tables.keep_reserve()
    assert not tables.is_reserve_given_up()
    have_free(monkeypatch, 20 * MIB)
    tables.write([Write(PAYLOADS, seq_key(n), None) for n in range(1, 4000, 2)])
    assert tables.reclaim(0, True, 256 * MIB) > 2 * MIB
    assert not tables.is_reserve_given_up(), "it fits without"


def test_the_reserve_is_left_where_it_is_as_long_as_anything_fits_without(
    tables: RocksdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_it = {False: Step.COMPACT, True: Step.RELOCATE}
    monkeypatch.setattr(space, "step_for", lambda _usage, _bound, part, _rested: with_it[part.is_lent])
    usage, room = tables._space._usage(PAYLOADS), Room(20 * MIB, True, True, reserve_bytes=RESERVE_BYTES)
    assert tables._space._choose(PAYLOADS, usage, 0, room) == (Step.COMPACT, room)


def test_what_is_dead_as_a_whole_needs_no_room(tables: RocksdbStore, monkeypatch: pytest.MonkeyPatch) -> None:
    tables.write([Write(PAYLOADS, seq_key(n), None) for n in range(4000)])
    have_free(monkeypatch, 1)
    assert tables.reclaim(0, True) > 7 * MIB


def test_blobs_are_moved_below_the_watermark_though_rows_end_between_two_looks(
    store: RocksdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write([Write(PAYLOADS, seq_key(n), BODY) for n in range(40)])  # one file of 8 MiB
    store.write([Write(PAYLOADS, seq_key(n), os.urandom(2000)) for n in range(100, 1100)])
    store._families[PAYLOADS].flush(True)
    store.write([Write(PAYLOADS, seq_key(n), None) for n in range(40) if n % 5])
    have_free(monkeypatch, 300 * MIB)
    freed = 0
    for look in range(3):
        store.write([Write(PAYLOADS, seq_key(100 + 50 * look + n), None) for n in range(50)])
        freed += store.reclaim(0, True, 294 * MIB)  # what is above is room for the tables alone
    assert freed > 5 * MIB


def test_level_0_is_compacted_first_where_it_is_in_the_way_of_moving_blobs(
    tables: RocksdbStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = tables._families[PAYLOADS]
    family.set_options({"blob_file_size": str(2 * MIB)})
    tables.write([Write(PAYLOADS, seq_key(4000 + n), BODY) for n in range(100)])
    family.flush(True)
    tables.write([Write(PAYLOADS, seq_key(4000 + n), None) for n in range(100) if n % 5])
    family.flush(True)
    family.compact_range(None, None)
    garbage_bytes = tables._space._usage(PAYLOADS).garbage_bytes
    monkeypatch.setattr(reclaim, "PIECE_BYTES", MIB)
    have_free(monkeypatch, 11 * MIB)
    for n in range(12):
        tables.write([Write(PAYLOADS, seq_key(at), None) for at in (n, 3999 - n)])
        tables.reclaim(MIB, True)
    assert tables._space._usage(PAYLOADS).garbage_bytes < MIB < garbage_bytes


@pytest.mark.parametrize("is_low", [False, True])
def test_rocksdb_compacts_nothing_beside_it_while_room_is_short(monkeypatch: pytest.MonkeyPatch, is_low: bool) -> None:
    made = Mock()
    monkeypatch.setattr("rocksdict.CompactOptions", lambda: made)
    space._options(PAYLOADS, False, is_low)
    made.set_exclusive_manual_compaction.assert_called_once_with(is_low)


def test_what_gave_way_goes_on_where_it_was(tables: RocksdbStore, tmp_path: Path) -> None:
    family = tables._families[PAYLOADS]
    for first in range(0, 4000, 500):  # deletions that one piece finds all of would leave the others nothing
        tables.write([Write(PAYLOADS, seq_key(n), None) for n in range(first, first + 500, 2)])
        family.flush(True)
    pieces = tables._families[PAYLOADS] = Pieces(family, tmp_path, tables._space.give_way)
    for looks in range(1, 4):
        tables.reclaim(0, True)
        assert len(pieces.ranges) == looks, "a piece each"
    assert tables._space._usage(PAYLOADS).deletions == 0
    assert_adjoin(pieces)


@pytest.mark.parametrize("late", [range(1000), range(3000, 4000)])
def test_what_is_deleted_while_a_pass_waits_is_looked_for(tables: RocksdbStore, tmp_path: Path, late: range) -> None:
    family = tables._families[PAYLOADS]
    tables.write([Write(PAYLOADS, seq_key(n), None) for n in range(1000, 3000)])
    tables._families[PAYLOADS] = Pieces(family, tmp_path, tables._space.give_way)
    tables.reclaim(0, True)
    tables.write([Write(PAYLOADS, seq_key(n), None) for n in late])
    tables._families[PAYLOADS] = family
    for _ in range(2):  # the rest, then what came meanwhile
        tables.reclaim(0, True)
    assert tables._space._usage(PAYLOADS).deletions == 0


class Left(Pieces):
    """A family whose compactions leave all deletions as they are."""

    def compact_range(self, start: bytes | None, end: bytes | None, options: Any) -> None:
        self.ranges.append((start, end))


def test_what_is_deleted_behind_a_pass_is_looked_for(tables: RocksdbStore, tmp_path: Path) -> None:
    family = tables._families[PAYLOADS]

    def delete_behind() -> None:
        if len(pieces.ranges) == 1:
            tables.write([Write(PAYLOADS, seq_key(n), None) for n in range(1, 1000, 2)])

    tables.write([Write(PAYLOADS, seq_key(n), None) for n in range(0, 4000, 2)])
    pieces = tables._families[PAYLOADS] = Pieces(family, tmp_path, delete_behind)
    tables.reclaim(0, True)
    assert len(pieces.ranges) >= 3
    assert tables._space._in_tables(PAYLOADS)[1] == 500, "in files, where no range was left to find them"
    tables.reclaim(0, True)
    assert tables._space._usage(PAYLOADS).deletions == 0


def test_what_a_pass_leaves_is_left_alone(tables: RocksdbStore, tmp_path: Path) -> None:
    """As long as nothing came meanwhile."""
    family = tables._families[PAYLOADS]
    tables.write([Write(PAYLOADS, seq_key(n), None) for n in range(2000)])
    family.flush(True)
    pieces = tables._families[PAYLOADS] = Left(family, tmp_path)
    for _ in range(3):
        tables.reclaim(0, True)
    assert [start for start, _ in pieces.ranges].count(None) == 1
    tables.write([Write(PAYLOADS, seq_key(n), None) for n in range(2000, 3000)])
    tables.reclaim(0, True)
    assert [start for start, _ in pieces.ranges].count(None) == 2


def test_only_a_step_of_its_kind_goes_on_with_a_pass(
    tables: RocksdbStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [Step.COMPACT, Step.RELOCATE, Step.RELOCATE, Step.COMPACT]
    monkeypatch.setattr(space, "step_for", lambda *_: steps.pop(0))
    pieces = tables._families[PAYLOADS] = Pieces(tables._families[PAYLOADS], tmp_path, tables._space.give_way)
    for _ in range(4):
        tables._space._reclaim(PAYLOADS, 0, Room(PLENTY, True))
    starts = [start for start, _ in pieces.ranges]
    assert [start is None for start in starts] == [True, True, False, True]
