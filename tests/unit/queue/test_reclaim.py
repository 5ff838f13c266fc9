"""Disk space of deleted bodies comes back: when it is worth it, in small steps where room is short, and no more."""

import os
import threading
from collections.abc import Callable, Iterator
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


def test_what_is_deleted_while_it_compacts_is_looked_for_again(
    store: RocksdbStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, PAYLOADS)
    delete(store, PAYLOADS, step=2)
    compact_once = store._space._compact_once

    def compact_as_all_is_deleted(name: str, options: Any) -> bool:
        done = compact_once(name, options)
        delete(store, PAYLOADS)
        return done

    with monkeypatch.context() as patched:
        patched.setattr(store._space, "_compact_once", compact_as_all_is_deleted)
        assert store.reclaim(4 * MIB, False) > 0
    assert store.reclaim(4 * MIB, False) > 0
    wait_for(lambda: blob_bytes(tmp_path) == 0, "the disk space")


class Pieces:
    """A family whose compactions are noted: what blob files each of them made."""

    def __init__(self, family: Any, directory: Path, after: Callable[[], None] = lambda: None) -> None:
        self._family, self._directory, self._after = family, directory, after
        self.made: list[int] = []
        self.ranges: list[tuple[bytes | None, bytes | None]] = []

    def compact_range(self, start: bytes | None, end: bytes | None, options: Any) -> None:
        before = set(self._directory.glob("*.blob"))
        self._family.compact_range(start, end, options)
        self.made.append(sum(path.stat().st_size for path in set(self._directory.glob("*.blob")) - before))
        self.ranges.append((start, end))
        self._after()

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


def test_tables_are_compacted_in_ranges(store: RocksdbStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = store._families[PAYLOADS]
    family.set_options({"target_file_size_base": str(MIB)})
    for first in (0, 1):  # two files that overlap
        store.write([Write(PAYLOADS, seq_key(n), os.urandom(2000)) for n in range(first, 4000, 2)])
        family.flush(True)
    family.compact_range(None, None)
    store.write([Write(PAYLOADS, seq_key(n), None) for n in range(0, 4000, 2)])
    monkeypatch.setattr(space, "PIECE_BYTES", 2 * MIB)
    pieces = store._families[PAYLOADS] = Pieces(family, tmp_path)
    assert store.reclaim(0, True) > 3 * MIB
    assert len(pieces.ranges) >= 3
    starts, ends = [start for start, _ in pieces.ranges], [end for _, end in pieces.ranges]
    assert (starts[0], ends[-1]) == (None, None)
    assert starts[1:] == [end + b"\0" for end in ends[:-1] if end]
    assert [store.get(PAYLOADS, seq_key(n)) is None for n in range(4000)] == [n % 2 == 0 for n in range(4000)]


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
    assert step_for(usage, settled, 32 * MIB, PLENTY, is_low) is step


def test_no_more_is_moved_than_there_is_room_for() -> None:
    usage = USAGE._replace(garbage_bytes=600 * MIB)  # ten files of 100 MiB
    assert usage.relocated_share(PLENTY) == 0.25
    assert 0.1 < usage.relocated_share(200 * MIB) < 0.25
    assert usage.relocated_share(120 * MIB) == 0.0
    assert usage._replace(blob_files=2).relocated_share(PLENTY) == 0.5, "of few files one"
    assert step_for(usage, 0, 32 * MIB, 200 * MIB, True) is Step.RELOCATE
    assert step_for(usage, 0, 32 * MIB, 120 * MIB, True) is Step.NOTHING
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
    ],
)
def test_what_is_moved_is_moved_in_pieces(usage: Usage, share: float, pieces: int) -> None:
    assert usage.pieces(share) == pieces
