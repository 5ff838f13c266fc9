"""Disk space of deleted bodies comes back: when it is worth it, in small steps where room is short, and no more."""

import itertools
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from services.queue.core.effects import Write
from services.queue.core.records import COMPLETIONS, DEAD, EXPIRY, FILES, PARTS, PAYLOADS, RECORDS, RESULTS, seq_key
from services.queue.storage import reclaim
from services.queue.storage.reclaim import WALKED_AT_MOST
from services.queue.storage.rocksdb_store import RocksdbStore
from services.queue.storage.store import StoreError
from tests.support.compactions import Pieces
from tests.support.sizes import sizes_bytes
from tests.support.waiting import wait_for

MIB = 1 << 20
PLENTY = 1 << 40
BODY = os.urandom(200_000)
BODIES = 300


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
    store.write([Write(PAYLOADS, seq_key(5000 + n), os.urandom(MIB)) for n in range(4)])
    store._families[PAYLOADS].flush(True)
    store.write([Write(PAYLOADS, seq_key(6000 + n), os.urandom(MIB)) for n in range(30)])
    store._families[PAYLOADS].flush(True)
    store.write([Write(PAYLOADS, seq_key(5000 + n), None) for n in (0, 1)])
    assert store.reclaim(8 * MIB, False) == 0
    family = store._families[PAYLOADS]
    pieces = store._families[PAYLOADS] = Pieces(family, tmp_path)
    store.reclaim(8 * MIB, True)
    assert store._space._usage(PAYLOADS).garbage_bytes > 2 * MIB
    store.write([Write(PAYLOADS, seq_key(5000 + n), None) for n in (2, 3)])
    store.reclaim(8 * MIB, True)
    assert len(pieces.ranges) == 1, "a few deletions of whatever size are looked for once a minute at most"
    now_s[0] += reclaim.SEARCH_REST_S
    assert store.reclaim(8 * MIB, True) > 4 * MIB
    wait_for(lambda: blob_bytes(tmp_path) < 31 * MIB, "the disk space")
    now_s[0] += 2 * reclaim.SEARCH_REST_S
    store.reclaim(8 * MIB, True)
    assert len(pieces.ranges) == store.compacted_s() == 2, "nothing was deleted"


def test_a_few_small_rows_are_not_searched_for_all_the_time(
    store: RocksdbStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(store._space, "_clock", lambda: now_s[0])
    store.write([Write(PAYLOADS, seq_key(n), os.urandom(2000)) for n in range(5000)])
    store.write([Write(PAYLOADS, seq_key(5000 + n), os.urandom(2 * MIB)) for n in range(4)])
    store._families[PAYLOADS].flush(True)
    pieces = store._families[PAYLOADS] = Pieces(store._families[PAYLOADS], tmp_path)
    for n in range(10):
        store.write([Write(PAYLOADS, seq_key(n), None)])
        store.reclaim(8 * MIB, True)
        now_s[0] += reclaim.SEARCH_REST_S
    assert len(pieces.ranges) == 4, "after none, one, three and seven minutes"


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


def test_a_store_is_closed_and_opened_while_it_compacts(store: RocksdbStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, PAYLOADS)
    store._families[PAYLOADS].flush(True)  # what is dead in memory alone is worth no compaction
    delete(store, PAYLOADS, step=2)
    began, raised = threading.Event(), []

    def begin(*_: object) -> float:
        began.set()
        return 0.0

    monkeypatch.setattr(store._space, "_compacted_s", begin)

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


def test_who_reads_while_it_is_closed_is_told_so(store: RocksdbStore) -> None:
    told = set[str]()

    def tells_why() -> bool:
        store.write([Write(PAYLOADS, seq_key(n), os.urandom(MIB)) for n in range(24)])  # to close writes them to a file
        thread = threading.Thread(target=store.reopen)
        thread.start()
        while thread.is_alive():
            try:
                store.wait_durable()
            except StoreError as error:
                told.add(str(error))
        return bool(told)

    wait_for(tells_why, "a read of a closed store")
    assert told == {"the store is closed; it is being opened again"}


def test_a_closed_store_gives_nothing_back(tmp_path: Path) -> None:
    store = RocksdbStore(tmp_path)
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.reclaim(MIB, True)


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
