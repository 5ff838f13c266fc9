"""The reserve of disk space: made where there is room, given up for good use, and what is taken without it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rocksdict

from services.queue.core.effects import Write
from services.queue.core.entry import LeaseRef
from services.queue.core.messages import Cancel, Claim, Complete, Delete, Inspect, Tick
from services.queue.core.records import PAYLOADS, seq_key
from services.queue.storage import reserve, rocksdb_store
from services.queue.storage.health import HEAL_PAUSE_NS, StoreHealth
from services.queue.storage.reclaim import Room
from services.queue.storage.reserve import (
    AMPLE_BYTES,
    LAST_ROOM_BYTES,
    RESERVE_BYTES,
    RESERVE_FILE,
    ROOM_AGAIN_BYTES,
    Reserve,
)
from services.queue.storage.rocksdb_store import RocksdbStore
from services.queue.storage.store import StoreError, StoreUnusableError
from services.queue.storage.synced import MARK_FILE
from tests.support.committing import HandClock
from tests.support.memory_store import MemoryStore
from tests.support.sizes import size_bytes

ROOM_BYTES = RESERVE_BYTES + LAST_ROOM_BYTES


class Disk:
    """How much is free of it, as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free_bytes = ROOM_BYTES
        for module in (reserve, rocksdb_store):
            monkeypatch.setattr(module, "free_bytes", lambda _: self.free_bytes)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def held(directory: Path) -> int | None:
    return size_bytes(directory / RESERVE_FILE)


@pytest.mark.parametrize(
    ("free_bytes", "size"),
    [(ROOM_BYTES - 1, None), (ROOM_BYTES, RESERVE_BYTES), (AMPLE_BYTES - 1, RESERVE_BYTES), (AMPLE_BYTES, None)],
)
def test_it_is_made_where_there_is_room_and_not_ample_room(
    tmp_path: Path, disk: Disk, free_bytes: int, size: int | None
) -> None:
    disk.free_bytes = free_bytes
    Reserve(tmp_path).make()
    assert held(tmp_path) == size


def test_it_takes_blocks_and_gives_them_back_and_the_next_life_knows(tmp_path: Path, disk: Disk) -> None:
    mine = Reserve(tmp_path)
    assert not mine.give_up(), "there is none"
    mine.make()
    assert (tmp_path / RESERVE_FILE).stat().st_blocks * 512 >= RESERVE_BYTES
    assert Reserve(tmp_path).give_up()
    assert held(tmp_path) == 0
    after = Reserve(tmp_path)
    assert after.is_given_up
    disk.free_bytes = ROOM_BYTES - 1
    after.make()
    assert (after.is_given_up, held(tmp_path)) == (True, 0)
    disk.free_bytes = AMPLE_BYTES
    after.make()
    assert (after.is_given_up, held(tmp_path)) == (False, RESERVE_BYTES)


def test_where_it_cannot_be_allocated_there_is_none(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", fail)
    mine = Reserve(tmp_path)
    mine.make()
    assert (held(tmp_path), mine.is_given_up) == (None, False)


def test_what_the_file_holds_is_believed(tmp_path: Path, disk: Disk) -> None:
    mine = Reserve(tmp_path)
    mine.make()
    os.truncate(tmp_path / RESERVE_FILE, 0)  # by another program
    assert (mine.held_bytes, mine.give_up()) == (0, False)
    disk.free_bytes = ROOM_BYTES - 1
    mine.make()
    assert mine.is_given_up
    disk.free_bytes = ROOM_BYTES
    mine.make()
    assert (mine.is_given_up, held(tmp_path)) == (False, RESERVE_BYTES)
    (tmp_path / RESERVE_FILE).unlink()
    mine.make()
    assert held(tmp_path) == RESERVE_BYTES


def test_one_that_a_kill_left_in_part_is_made_whole_or_given_up(tmp_path: Path, disk: Disk) -> None:
    (tmp_path / RESERVE_FILE).write_bytes(bytes(4096))
    disk.free_bytes = ROOM_BYTES - 4097
    mine = Reserve(tmp_path)
    mine.make()
    assert (held(tmp_path), mine.held_bytes) == (4096, 4096)
    disk.free_bytes += 1
    mine.make()
    assert held(tmp_path) == RESERVE_BYTES
    os.truncate(tmp_path / RESERVE_FILE, 4096)
    assert mine.give_up()
    assert (mine.is_given_up, held(tmp_path)) == (True, 0)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[None]:
    """Another process has the store open, with a reserve."""
    (tmp_path / RESERVE_FILE).write_bytes(bytes(4096))
    code = (
        "import sys; from pathlib import Path; from services.queue.storage.rocksdb_store import RocksdbStore\n"
        "store = RocksdbStore(Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "open\n"
        yield
        process.stdin.close()


def test_a_second_queue_leaves_the_reserve_of_the_first_alone(
    tmp_path: Path, disk: Disk, running: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.free_bytes = 0
    with pytest.raises(StoreUnusableError, match="is locked: another queue service uses it"):
        RocksdbStore(tmp_path, keeps_reserve=True)
    assert held(tmp_path) == 4096
    disk.free_bytes = ROOM_BYTES - RESERVE_BYTES

    def full(*_: object, **__: object) -> None:
        raise Exception("IO error: No space left on device: rocksdict-config.json")

    monkeypatch.setattr(rocksdict, "Rdict", full)
    (tmp_path / MARK_FILE).unlink()  # so that nothing else looks before
    with pytest.raises(StoreUnusableError, match="is locked: another queue service uses it"):
        RocksdbStore(tmp_path, keeps_reserve=True)
    assert held(tmp_path) == 4096


def test_what_it_is_about_to_take_is_no_room_for_a_compaction(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.free_bytes = ROOM_BYTES - 1
    store, seen = RocksdbStore(tmp_path, keeps_reserve=True), list[int]()

    def noted(_bound_bytes: int, room: Room) -> int:
        seen.append(room.free_bytes)
        return 0

    monkeypatch.setattr(store._space, "reclaim", noted)
    store.reclaim(1 << 20, True)
    disk.free_bytes = ROOM_BYTES
    store.reclaim(1 << 20, True)
    store.keep_reserve()
    store.reclaim(1 << 20, True)
    assert seen == [ROOM_BYTES - 1, ROOM_BYTES - RESERVE_BYTES, ROOM_BYTES]
    store.close()


def test_a_store_without_one_keeps_none(tmp_path: Path, disk: Disk) -> None:
    store = RocksdbStore(tmp_path)
    assert not store.is_reserve_given_up()
    store.keep_reserve()
    disk.free_bytes = 0
    assert not store.make_room()
    store.close()
    assert held(tmp_path) is None


def test_room_to_open_is_what_the_log_takes_and_then_the_reserve(tmp_path: Path, disk: Disk) -> None:
    store = RocksdbStore(tmp_path, keeps_reserve=True)
    assert held(tmp_path) == RESERVE_BYTES
    store.write([Write(PAYLOADS, seq_key(1), bytes(4 << 20))])
    disk.free_bytes = rocksdb_store.OPENING_BYTES + (4 << 20) + 65536
    assert store.make_room()
    assert not store.is_reserve_given_up()
    disk.free_bytes = rocksdb_store.OPENING_BYTES + (4 << 20)
    assert not store.make_room(), "nothing came of it, as this test has it"
    assert store.is_reserve_given_up()
    disk.free_bytes = ROOM_BYTES
    store.keep_reserve()
    assert not store.is_reserve_given_up()
    assert held(tmp_path) == RESERVE_BYTES
    store.close()


def test_an_open_that_finds_no_space_is_tried_again_with_the_reserve(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    RocksdbStore(tmp_path, keeps_reserve=True).close()
    real, fails = rocksdict.Rdict, ["IO error: No space left on device: While appending to file: 000302.sst"]

    def full(*given: Any, **named: Any) -> Any:
        if fails and "column_families" in named:
            raise Exception(fails.pop())
        return real(*given, **named)

    monkeypatch.setattr(rocksdict, "Rdict", full)
    disk.free_bytes = ROOM_BYTES - 1
    store = RocksdbStore(tmp_path, keeps_reserve=True)
    assert store.is_reserve_given_up()
    store.close()
    fails.append("IO error: No space left on device")
    with pytest.raises(StoreUnusableError, match="No space left"):
        RocksdbStore(tmp_path, keeps_reserve=True)


# ---- what is served without it ----


class TightStore(MemoryStore):
    """A store that may have given its reserve up."""

    given_up = False

    def is_reserve_given_up(self) -> bool:
        return self.given_up


def test_with_little_left_only_what_frees_space_is_served() -> None:
    store, clock = TightStore(LAST_ROOM_BYTES - 1), HandClock()
    health = StoreHealth(store, clock, 0)
    assert not health.notice_little_room(), "there may be a reserve"
    store.given_up = True
    assert health.notice_little_room()
    assert not health.notice_little_room(), "noticed before"
    claim, complete = Claim(1, "r"), Complete(1, LeaseRef("r", 1, 1), None, None, b"")
    messages = (Cancel(1, ("r",)), Delete(1, ()), Inspect(1, ()), Tick(), claim, complete)
    assert [health.serves(message) for message in messages] == [True] * 3 + [False] * 3
    assert "only cancels and deletes" in health.refusal()
    assert health.is_disk_full
    with pytest.raises(StoreError) as raised:
        health.probe()
    health.still_fails(raised.value)
    assert health.refusal().startswith("the queue's disk is full")
    store.free_bytes = ROOM_AGAIN_BYTES
    health.probe()
    store.free_bytes, store.given_up = LAST_ROOM_BYTES, False
    health.probe()
    health.mended()
    assert (health.refusal(), health.is_tight) == ("", False)


def test_what_was_free_before_the_reserve_was_given_up_is_not_all_there_is() -> None:
    store, clock = TightStore(LAST_ROOM_BYTES - 1), HandClock()
    health = StoreHealth(store, clock, 0)
    health.check_disk()
    store.free_bytes, store.given_up = LAST_ROOM_BYTES, True
    assert not health.notice_little_room()
    assert health.disk_free_bytes == LAST_ROOM_BYTES


def test_with_more_left_everything_is_served() -> None:
    store, clock = TightStore(LAST_ROOM_BYTES), HandClock()
    store.given_up = True
    health = StoreHealth(store, clock, 0)
    assert not health.notice_little_room()
    assert health.serves(Tick())
    store.free_bytes = 0
    clock.pass_ns(HEAL_PAUSE_NS)
    assert health.notice_little_room()
    health.failed(StoreError("No space left on device"))
    assert not health.serves(Cancel(1, ("r",))), "it cannot write at all"


def test_what_is_above_the_watermark_is_used_before_what_is_below(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.free_bytes = AMPLE_BYTES
    store, seen = RocksdbStore(tmp_path, keeps_reserve=True), list[Room]()

    def noted(_bound_bytes: int, room: Room) -> int:
        seen.append(room)
        return 0

    monkeypatch.setattr(store._space, "reclaim", noted)
    for disk.free_bytes in (301, 300, 299):
        store.reclaim(1 << 20, True, 300)
    assert seen == [Room(301, True, False, 300), Room(300, True, True), Room(299, True, True)]
    monkeypatch.setattr(store._reserve, "is_given_up", True)
    disk.free_bytes = 900
    store.reclaim(1 << 20, True, 300)
    assert seen[-1] == Room(900, True, True)
