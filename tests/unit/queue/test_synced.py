"""Damage of the log: a tail that nobody was told of may be torn, and everything else refuses the store."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from services.queue.core import records as r
from services.queue.core.effects import Write
from services.queue.offline import main
from services.queue.storage.backup import BackupError, backups_of, make_backup, restore
from services.queue.storage.rocksdb_store import RocksdbStore
from services.queue.storage.store import StoreUnusableError
from services.queue.storage.synced import MARK_FILE, NOTE_FILE, MarkError, SyncedMark, read_mark
from tests.support.queueing import Queue, meta

NOW_NS = 1_800_000_000_000_000_000
ROWS = 400


@pytest.fixture(scope="module")
def as_killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a store as a killed process leaves it: all of it in one log."""
    directory = tmp_path_factory.mktemp("synced")
    live, copy = directory / "live", directory / "killed"
    store = RocksdbStore(live)
    for seq in range(ROWS):
        write(store, seq)
    shutil.copytree(live, copy)
    store.close()
    return copy


@pytest.fixture
def killed(as_killed: Path, tmp_path: Path) -> Path:
    """Return a copy of it for one test."""
    return shutil.copytree(as_killed, tmp_path / "killed")


def write(store: RocksdbStore, seq: int) -> None:
    store.write([Write(r.PAYLOADS, r.seq_key(seq), os.urandom(200)), Write(r.IDEMPOTENCY, b"%d" % seq, r.seq_key(seq))])


def log_of(directory: Path) -> Path:
    (log,) = directory.glob("*.log")
    return log


def overwrite(directory: Path, at: int, count: int) -> None:
    log = log_of(directory)
    row = bytearray(log.read_bytes())
    row[at : at + count] = bytes(byte ^ 0x5A for byte in row[at : at + count])
    log.write_bytes(row)


def cut(directory: Path, lost: int) -> None:
    log = log_of(directory)
    os.truncate(log, log.stat().st_size - lost)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "bytes in the middle": lambda path: overwrite(path, log_of(path).stat().st_size // 2, 50),
    "a length in the last block": lambda path: overwrite(path, log_of(path).stat().st_size // 32768 * 32768 + 4, 2),
    "cut before its last sync": lambda path: cut(path, 1),
    "cut in half": lambda path: cut(path, log_of(path).stat().st_size // 2),
    "deleted": lambda path: log_of(path).unlink(),
    "no store at all": lambda path: (path / "CURRENT").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_log_that_lost_a_synced_write_is_refused_each_time_and_left_as_it_is(killed: Path, damage: str) -> None:
    DAMAGE[damage](killed)
    left = {path.name: path.read_bytes() for path in killed.iterdir()}
    for _ in range(2):
        with pytest.raises(StoreUnusableError, match=r"its log ends after write \d+, .* had reached the disk"):
            RocksdbStore(killed)
    assert {path.name: path.read_bytes() for path in killed.iterdir()} == left, "evidence is kept"


def test_a_verification_names_what_the_log_lost(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DAMAGE["bytes in the middle"](killed)
    assert main(["verify", str(killed)]) == 1
    assert capsys.readouterr().out.startswith("meta -: its log ends after write ")


def test_a_tail_that_was_not_synced_may_be_torn_at_any_byte(tmp_path: Path, killed: Path) -> None:
    synced = read_mark(killed)
    again = tmp_path / "again"
    store = RocksdbStore(killed)
    store.close()
    store = RocksdbStore(killed)
    write(store, ROWS)
    store._mark = None  # what is written from now on is not noted, as if its sync had not returned
    begun = log_size(killed)
    write(store, ROWS + 1)
    grown = log_size(killed) - begun
    assert synced
    assert grown > 200
    for lost in {0, 1, 7, 8, grown // 2, grown - 8, grown - 1, grown}:
        shutil.rmtree(again, ignore_errors=True)
        shutil.copytree(killed, again)
        newest = max(again.glob("*.log"))
        os.truncate(newest, newest.stat().st_size - lost)
        found = RocksdbStore(again)
        assert found.get(r.PAYLOADS, r.seq_key(ROWS)) is not None
        assert (found.get(r.PAYLOADS, r.seq_key(ROWS + 1)) is None) == (lost > 0)
        found.close()
    store.close()


def log_size(directory: Path) -> int:
    return max(directory.glob("*.log")).stat().st_size


def test_a_store_without_a_mark_is_taken_as_it_is_and_gets_one(killed: Path) -> None:
    (killed / MARK_FILE).unlink()
    cut(killed, 1)
    store = RocksdbStore(killed)
    assert store.get(r.PAYLOADS, r.seq_key(ROWS - 1)) is None
    assert read_mark(killed) == store._db.latest_sequence_number()
    store.close()


def test_a_mark_that_is_damaged_refuses_the_store(killed: Path) -> None:
    (killed / MARK_FILE).write_bytes(b"?" * 12)
    with pytest.raises(StoreUnusableError, match=f"{MARK_FILE} is damaged"):
        RocksdbStore(killed)


def test_a_backup_has_a_mark_and_a_restored_store_goes_on(tmp_path: Path) -> None:
    store = RocksdbStore(tmp_path / "data")
    Queue(store=store).submit(meta())
    backup = make_backup(store, backups_of(tmp_path / "data"), "b", NOW_NS).path
    store.close()
    assert read_mark(backup)
    restore(backup, tmp_path / "restored", NOW_NS)
    RocksdbStore(tmp_path / "restored").close()
    (backup / MARK_FILE).write_bytes(b"")
    mark = SyncedMark(backup, 1 << 40)
    mark.close()
    with pytest.raises(BackupError, match="had reached the disk"):
        restore(backup, tmp_path / "other", NOW_NS)


def test_a_mark_only_grows_and_an_empty_one_says_nothing(tmp_path: Path) -> None:
    assert read_mark(tmp_path) is None
    (tmp_path / MARK_FILE).touch()
    assert read_mark(tmp_path) is None
    mark = SyncedMark(tmp_path, 7)
    mark.note(9)
    mark.note(8)
    mark.close()
    assert read_mark(tmp_path) == 9
    (tmp_path / MARK_FILE).write_bytes(b"x")
    with pytest.raises(MarkError):
        read_mark(tmp_path)


def test_a_copy_of_links_stays_what_it_was_when_the_store_goes_on(killed: Path, tmp_path: Path) -> None:
    RocksdbStore(killed).close()
    linked = tmp_path / "linked"
    shutil.copytree(killed, linked, copy_function=os.link)
    whole = {path.name: path.read_bytes() for path in linked.iterdir()}
    store = RocksdbStore(killed)
    write(store, ROWS)
    store.close()
    assert {name: (linked / name).read_bytes() for name in (MARK_FILE, NOTE_FILE)} == {
        name: whole[name] for name in (MARK_FILE, NOTE_FILE)
    }
    store = RocksdbStore(linked)
    assert store.get(r.IDEMPOTENCY, b"%d" % (ROWS - 1))
    assert store.get(r.IDEMPOTENCY, b"%d" % ROWS) is None
    store.close()


def test_what_a_kill_left_of_a_new_mark_is_in_nobodys_way(killed: Path) -> None:
    for mark in (MARK_FILE, NOTE_FILE):
        (killed / f"{mark}.new").write_bytes(b"half")
    RocksdbStore(killed).close()
    RocksdbStore(killed).close()
    assert not list(killed.glob("*.new"))


def test_a_mark_is_on_disk_before_it_takes_the_place_of_the_last_one(
    killed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, placed = set[str](), list[str]()

    def fsync(handle: int, real: Callable[[int], None] = os.fsync) -> None:
        real(handle)
        synced.add(os.readlink(f"/proc/self/fd/{handle}"))

    def rename(made: Path, path: Path, real: Callable[[Path, Path], None] = os.rename) -> None:
        assert str(made) in synced
        real(made, path)
        placed.append(path.name)

    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr("os.rename", rename)
    SyncedMark(killed, 7).close()
    assert sorted(placed) == sorted((MARK_FILE, NOTE_FILE))
    assert str(killed) in synced, "the names too"
