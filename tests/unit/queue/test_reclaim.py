"""Disk space of deleted bodies comes back: when it is worth it, in small steps where room is short, and no more."""

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.queue.core.effects import Write
from services.queue.core.records import COMPLETIONS, DEAD, EXPIRY, FILES, PARTS, PAYLOADS, RECORDS, RESULTS, seq_key
from services.queue.storage import reclaim, space
from services.queue.storage.reclaim import WALKED_AT_MOST, Step, Usage, is_walk_long, step_for
from services.queue.storage.rocksdb_store import RocksdbStore
from services.queue.storage.store import StoreError
from tests.support.sizes import sizes_bytes
from tests.support.waiting import wait_for

MIB = 1 << 20
BODY = os.urandom(200_000)
BODIES = 300
PLENTY = 1 << 40
USAGE = Usage(rows=1000, deletions=0, table_bytes=MIB, blob_bytes=1000 * MIB, blob_files=10, garbage_bytes=0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RocksdbStore]:
    made = RocksdbStore(tmp_path)
    yield made
    made.close()


def blob_bytes(directory: Path) -> int:
    return sum(sizes_bytes(directory, "*.blob"))


def fill(store: RocksdbStore, family: str) -> None:
    for first in range(0, BODIES, 20):
        store.write([Write(family, seq_key(n), BODY) for n in range(first, first + 20)])


def delete(store: RocksdbStore, family: str, step: int = 1) -> None:
    store.write([Write(family, seq_key(n), None) for n in range(0, BODIES, step)])


@pytest.mark.parametrize("family", [PAYLOADS, RESULTS, PARTS])
def test_what_is_deleted_comes_back(store: RocksdbStore, tmp_path: Path, family: str) -> None:
    fill(store, family)
    wait_for(lambda: blob_bytes(tmp_path) > 20 * MIB, "a flush of what was written")
    assert store.reclaim(8 * MIB, False) == store.reclaim(8 * MIB, True) == 0, "nothing is deleted"
    delete(store, family)
    assert store.reclaim(8 * MIB, False) > 0
    wait_for(lambda: blob_bytes(tmp_path) == 0, "the disk space")


def test_deletions_of_an_earlier_life_count(store: RocksdbStore, tmp_path: Path) -> None:
    fill(store, PAYLOADS)
    delete(store, PAYLOADS)
    store.reopen()
    assert blob_bytes(tmp_path) > 20 * MIB
    assert store.reclaim(8 * MIB, False) > 0
    wait_for(lambda: blob_bytes(tmp_path) == 0, "the disk space")


def test_what_is_scattered_among_the_living_comes_back_where_room_is_short(store: RocksdbStore, tmp_path: Path) -> None:
    fill(store, PAYLOADS)
    delete(store, PAYLOADS, step=2)
    rounds = [store.reclaim(8 * MIB, True) for _ in range(12)]
    assert rounds[-1] == 0
    assert blob_bytes(tmp_path) < BODIES * len(BODY) / 2 + 8 * MIB
    assert [store.get(PAYLOADS, seq_key(n)) for n in range(4)] == [None, BODY, None, BODY]


def test_a_few_large_rows_among_many_small_ones_come_back_where_room_is_short(
    store: RocksdbStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, took_s = [0.0], itertools.count(1.0)
    monkeypatch.setattr(store._space, "_clock", lambda: now_s[0])
    monkeypatch.setattr(store._space, "_compacted_s", lambda _: next(took_s))
    store.write([Write(PAYLOADS, seq_key(n), os.urandom(2000)) for n in range(5000)])
    store.write([Write(PAYLOADS, seq_key(5000 + n), os.urandom(2 * MIB)) for n in range(4)])
    store._families[PAYLOADS].flush(True)
    store.write([Write(PAYLOADS, seq_key(5000 + n), None) for n in (0, 1)])
    assert store.reclaim(8 * MIB, False) == 0
    family = store._families[PAYLOADS]
    pieces = store._families[PAYLOADS] = Pieces(family, tmp_path)
    store.reclaim(8 * MIB, True)
    assert store._space._usage(PAYLOADS).garbage_bytes > 4 * MIB
    store.write([Write(PAYLOADS, seq_key(5000 + n), None) for n in (2, 3)])
    store.reclaim(8 * MIB, True)
    assert len(pieces.ranges) == 1, "a few deletions of whatever size may be looked for a tenth of the time"
    now_s[0] += reclaim.REST
    assert store.reclaim(8 * MIB, True) > 8 * MIB
    wait_for(lambda: blob_bytes(tmp_path) == 0, "the disk space")
    now_s[0] += reclaim.REST
    store.reclaim(8 * MIB, True)
    assert len(pieces.ranges) == store.compacted_s() == 2, "nothing was deleted"


def test_what_is_scattered_comes_back_too_while_rows_come_and_go(store: RocksdbStore, tmp_path: Path) -> None:
    """Each look finds deletions that have not met their rows: what those leave must not wait until there are none."""
    rounds, at_once, lives_on = 40, 50, 10
    for n in range(rounds):
        keys = [seq_key(at) for at in range(n * at_once, (n + 1) * at_once)]
        store.write([Write(PAYLOADS, key, BODY) for key in keys])
        store._families[PAYLOADS].flush(True)
        store.write([Write(PAYLOADS, key, None) for key in keys[:-lives_on]])
        store.reclaim(4 * MIB, False)
    alive_bytes = rounds * lives_on * len(BODY)
    assert blob_bytes(tmp_path) < 2.5 * alive_bytes < 0.6 * rounds * at_once * len(BODY)


def test_what_is_deleted_while_it_compacts_is_looked_for_again(store: RocksdbStore, tmp_path: Path) -> None:
    fill(store, PAYLOADS)
    family = store._families[PAYLOADS]
    family.flush(True)
    delete(store, PAYLOADS, step=2)
    store._families[PAYLOADS] = Pieces(family, tmp_path, lambda: delete(store, PAYLOADS))
    assert store.reclaim(4 * MIB, False) > 0
    store._families[PAYLOADS] = family
    assert store.reclaim(4 * MIB, False) > 0
    wait_for(lambda: blob_bytes(tmp_path) == 0, "the disk space")


class Pieces:
    """A family whose compactions are noted: what blob files each of them made."""

    def __init__(
        self,
        family: Any,
        directory: Path,
        after: Callable[[], None] = lambda: None,
        flushed: Callable[[], None] = lambda: None,
    ) -> None:
        self._family, self._directory, self._after, self._flushed = family, directory, after, flushed
        self.made: list[int] = []
        self.ranges: list[tuple[bytes | None, bytes | None]] = []

    def compact_range(self, start: bytes | None, end: bytes | None, options: Any) -> None:
        before = set(self._directory.glob("*.blob"))
        self._family.compact_range(start, end, options)
        self.made.append(sum(path.stat().st_size for path in set(self._directory.glob("*.blob")) - before))
        self.ranges.append((start, end))
        self._after()

    def flush(self, waits: bool) -> None:
        self._family.flush(waits)
        self._flushed()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._family, name)


def scatter(store: RocksdbStore) -> None:
    """Have blob files of some MiB, a bit more than half of each of them garbage."""
    store._families[PAYLOADS].set_options({"blob_file_size": str(4 * MIB)})
    fill(store, PAYLOADS)
    store._families[PAYLOADS].flush(True)
    store.write([Write(PAYLOADS, seq_key(n), None) for n in range(BODIES) if n % 5 < 3])
    store.reclaim(0, False)


def test_blobs_are_moved_in_pieces(store: RocksdbStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scatter(store)
    monkeypatch.setattr(reclaim, "PIECE_BYTES", 4 * MIB)
    pieces = store._families[PAYLOADS] = Pieces(store._families[PAYLOADS], tmp_path)
    assert store.reclaim(8 * MIB, False) > 6 * MIB
    assert len(pieces.made) >= 3
    assert 0 < max(pieces.made) < 6 * MIB
    options = max(tmp_path.glob("OPTIONS-*"), key=lambda path: path.stat().st_mtime_ns).read_text()
    assert "enable_blob_garbage_collection=true" not in options, "whatever RocksDB compacts by itself moves none"
    assert [store.get(PAYLOADS, seq_key(n)) == BODY for n in range(BODIES)] == [n % 5 >= 3 for n in range(BODIES)]


def test_a_write_that_is_stalled_ends_it(store: RocksdbStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scatter(store)
    monkeypatch.setattr(reclaim, "PIECE_BYTES", 4 * MIB)
    family = store._families[PAYLOADS]
    pieces = store._families[PAYLOADS] = Pieces(family, tmp_path, store._space.give_way)
    store.reclaim(8 * MIB, False)
    assert len(pieces.made) == 1
    pieces = store._families[PAYLOADS] = Pieces(family, tmp_path)
    store.reclaim(8 * MIB, False)
    assert len(pieces.made) >= 2, "it goes on at the next look"


def test_a_write_that_is_stalled_by_the_flush_before_does_not(store: RocksdbStore, tmp_path: Path) -> None:
    scatter(store)
    give_way = store._space.give_way
    pieces = store._families[PAYLOADS] = Pieces(store._families[PAYLOADS], tmp_path, give_way, give_way)
    store.reclaim(8 * MIB, False)
    assert len(pieces.made) == 1


def test_only_compactions_are_timed(store: RocksdbStore) -> None:
    family, keys = store._families[PAYLOADS], [seq_key(n) for n in range(5000)]
    store.write([Write(PAYLOADS, key, os.urandom(2000)) for key in keys])
    family.flush(True)
    assert store._space._compacted_s(PAYLOADS) == 0
    store.write([Write(PAYLOADS, key, None) for key in keys[::2]])
    family.compact_range(None, None)
    assert store._space._compacted_s(PAYLOADS) > 0


def some_dead(store: RocksdbStore, family: str) -> None:
    keys = [seq_key(n) for n in range(20)]
    store.write([Write(family, key, BODY) for key in keys])
    store._families[family].flush(True)
    store.write([Write(family, key, None) for key in keys])


def test_who_was_in_the_way_of_a_write_lets_the_others_go_first(store: RocksdbStore, tmp_path: Path) -> None:
    compacted = list[str]()

    def note(family: str) -> None:
        compacted.append(family)
        store._space.give_way()

    store.write([Write(EXPIRY, seq_key(n), b"") for n in range(WALKED_AT_MOST)])
    store.write([Write(EXPIRY, seq_key(n), None) for n in range(WALKED_AT_MOST)])
    some_dead(store, RESULTS)
    for family in (PAYLOADS, RESULTS, EXPIRY):
        store._families[family] = Pieces(store._families[family], tmp_path, partial(note, family))
    for _ in range(3):
        some_dead(store, PAYLOADS)  # so that it always has something to do
        store.reclaim(MIB, False)
    assert compacted == [PAYLOADS, RESULTS, EXPIRY]


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


def test_a_compaction_of_bodies_is_small(tmp_path: Path) -> None:
    RocksdbStore(tmp_path).close()
    families = max(tmp_path.glob("OPTIONS-*")).read_text().split("[CFOptions ")
    small = {text.split('"')[1] for text in families if f"max_compaction_bytes={64 * MIB}\n" in text}
    assert small == {PAYLOADS, RESULTS, PARTS}


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


def test_a_store_is_closed_and_opened_while_it_compacts(store: RocksdbStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, PAYLOADS)
    store._families[PAYLOADS].flush(True)  # what is dead in memory alone is worth no compaction
    delete(store, PAYLOADS, step=2)
    began, raised = threading.Event(), []
    monkeypatch.setattr(store._space, "_tune", lambda *_: began.set())

    def work() -> None:
        try:
            store.reclaim(8 * MIB, False)
        except StoreError as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert began.wait(30)
    store.reopen()
    thread.join(30)
    assert store.get(PAYLOADS, seq_key(1)) == BODY
    store.reclaim(8 * MIB, True)
    assert store.get(PAYLOADS, seq_key(0)) is None


def test_a_closed_store_gives_nothing_back(tmp_path: Path) -> None:
    store = RocksdbStore(tmp_path)
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.reclaim(MIB, True)


@pytest.mark.parametrize(
    ("usage", "settled", "is_low", "step"),
    [
        (USAGE, 0, True, Step.NOTHING),
        (USAGE._replace(deletions=10), 0, False, Step.NOTHING),  # 10 MiB, and 32 may be dead
        (USAGE._replace(deletions=10), 0, True, Step.COMPACT),
        (USAGE._replace(deletions=10), 10, True, Step.NOTHING),  # the last step left them
        (USAGE._replace(deletions=33), 0, False, Step.COMPACT),
        (USAGE._replace(deletions=33, table_bytes=400 * MIB), 0, False, Step.NOTHING),  # too much to write anew
        (USAGE._replace(deletions=33, table_bytes=400 * MIB), 0, True, Step.COMPACT),
        (USAGE._replace(deletions=1, table_bytes=400 * MIB), 0, True, Step.NOTHING),
        (USAGE._replace(rows=0, table_bytes=0, blob_bytes=0, deletions=9), 0, True, Step.NOTHING),  # all in memory
        (USAGE._replace(garbage_bytes=400 * MIB), 0, False, Step.NOTHING),
        (USAGE._replace(garbage_bytes=600 * MIB), 0, False, Step.RELOCATE),
        (USAGE._replace(garbage_bytes=400 * MIB, deletions=66), 0, False, Step.COMPACT),
        (USAGE._replace(garbage_bytes=600 * MIB, deletions=99), 0, False, Step.RELOCATE),  # which compacts as well
        (USAGE._replace(garbage_bytes=33 * MIB), 0, True, Step.RELOCATE),
        (USAGE._replace(garbage_bytes=31 * MIB), 0, True, Step.NOTHING),
    ],
)
def test_steps(usage: Usage, settled: int, is_low: bool, step: Step) -> None:
    assert step_for(usage, settled, 32 * MIB, PLENTY, is_low, False) is step


MIXED = Usage(10**6, deletions=80, table_bytes=280 * MIB, blob_bytes=320 * MIB, blob_files=10, garbage_bytes=0)


@pytest.mark.parametrize(
    ("usage", "settled", "is_low", "is_rested", "step"),
    [
        (MIXED, 0, True, True, Step.COMPACT),  # they may be all blobs there are
        (MIXED, 0, True, False, Step.NOTHING),
        (MIXED, 0, False, True, Step.NOTHING),
        (MIXED, 80, True, True, Step.NOTHING),
        (MIXED._replace(deletions=1), 0, True, True, Step.COMPACT),
        (MIXED._replace(blob_bytes=0), 0, True, True, Step.NOTHING),  # each less than 4 KiB
        (MIXED._replace(garbage_bytes=319 * MIB), 0, True, True, Step.RELOCATE),
        (MIXED._replace(garbage_bytes=319 * MIB, moves_blobs=False), 0, True, True, Step.NOTHING),
        (MIXED._replace(deletions=2000, blob_bytes=0), 0, True, True, Step.COMPACT),
        (MIXED._replace(deletions=0), 0, True, True, Step.NOTHING),
    ],
)
def test_any_deletion_may_be_of_a_large_row_where_room_is_short(
    usage: Usage, settled: int, is_low: bool, is_rested: bool, step: Step
) -> None:
    assert step_for(usage, settled, 32 * MIB, PLENTY, is_low, is_rested) is step


def test_no_more_is_moved_than_there_is_room_for() -> None:
    usage = USAGE._replace(garbage_bytes=600 * MIB)  # ten files of 100 MiB
    assert usage.relocated_share(PLENTY) == 0.25
    assert 0.1 < usage.relocated_share(200 * MIB) < 0.25
    assert usage.relocated_share(120 * MIB) == 0.0
    assert usage._replace(blob_files=2).relocated_share(PLENTY) == 0.5, "of few files one"
    assert step_for(usage, 0, 32 * MIB, 200 * MIB, True, False) is Step.RELOCATE
    assert step_for(usage, 0, 32 * MIB, 120 * MIB, True, False) is Step.NOTHING
    assert usage._replace(moves_blobs=False).relocated_share(PLENTY) == 0.0


@pytest.mark.parametrize("family", [EXPIRY, COMPLETIONS, DEAD, FILES, RECORDS])
def test_reads_in_order_do_not_walk_over_many_deleted_rows(store: RocksdbStore, family: str) -> None:
    keys = [seq_key(n) for n in range(WALKED_AT_MOST)]
    store.write([Write(family, key, b"") for key in keys])
    store.write([Write(family, key, None) for key in keys[1:]])
    store.reclaim(8 * MIB, False)
    assert store._space._usage(family).deletions == WALKED_AT_MOST - 1, "a few are not worth a compaction"
    store.write([Write(family, keys[0], None)])
    assert store.reclaim(8 * MIB, False) == 0, "bytes of bodies"
    assert store._space._usage(family).deletions == 0
    assert store.scan(family, b"", b"", 1) == []


def test_a_family_with_damage_is_walked_over(store: RocksdbStore) -> None:
    store._spared.families.add(EXPIRY)
    keys = [seq_key(n) for n in range(WALKED_AT_MOST)]
    store.write([Write(EXPIRY, key, b"") for key in keys])
    store.write([Write(EXPIRY, key, None) for key in keys])
    store.reclaim(8 * MIB, True)
    assert store._space._usage(EXPIRY).deletions == WALKED_AT_MOST


@pytest.mark.parametrize(
    ("usage", "settled", "free_bytes", "is_long"),
    [
        (USAGE._replace(deletions=WALKED_AT_MOST), 0, PLENTY, True),
        (USAGE._replace(deletions=WALKED_AT_MOST), 1, PLENTY, False),  # the last compaction left one
        (USAGE._replace(deletions=WALKED_AT_MOST, rows=10**6), 0, PLENTY, False),  # too much to write anew
        (USAGE._replace(deletions=125_000, rows=10**6), 0, PLENTY, True),
        (USAGE._replace(deletions=WALKED_AT_MOST), 0, MIB, False),  # no room for it
    ],
)
def test_walks_that_are_worth_a_compaction(usage: Usage, settled: int, free_bytes: int, is_long: bool) -> None:
    assert is_walk_long(usage, settled, free_bytes) is is_long


@pytest.mark.parametrize(
    ("usage", "share", "pieces"),
    [
        (USAGE, 0.0, 1),
        (USAGE, 0.1, 1),
        (USAGE, 0.25, 2),  # of two files no half
        (USAGE._replace(blob_files=100), 0.25, 4),  # 250 MiB, 64 each
        (USAGE._replace(blob_files=100, table_bytes=400 * MIB), 0.25, 3),  # as much as tables are worth
        (USAGE._replace(blob_files=100, garbage_bytes=900 * MIB), 0.25, 2),  # no more lives than 100 MiB
    ],
)
def test_what_is_moved_is_moved_in_pieces(usage: Usage, share: float, pieces: int) -> None:
    assert usage.pieces(share) == pieces
