"""Backups and what is made of them: whole or not there, and never confused with the store they were made of."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from penstock.queue.v1 import queue_pb2
from services.queue.backup_call import BackupCall, Context
from services.queue.committer import Committer
from services.queue.core import records as r
from services.queue.core.effects import Deliver, Ended, Recorded, StopReason, StopRun, Write
from services.queue.core.entry import LeaseRef, parse_request_id
from services.queue.core.lifecycle import State
from services.queue.core.machine import Machine
from services.queue.core.messages import Claim, WorkerOpened
from services.queue.offline import main
from services.queue.storage.backup import BackupError, backups_of, make_backup, remove_partials, restore
from services.queue.storage.opening import BACKUP_MARK
from services.queue.storage.recovery import recover
from services.queue.storage.rocksdb_store import RocksdbStore
from services.queue.storage.store import StoreUnusableError
from services.queue.storage.verify import Verifier
from tests.support.committing import Ear, HandClock
from tests.support.memory_store import MemoryStore
from tests.support.queueing import RULES, STORE_ID, Queue, meta

NOW_NS = 1_800_000_000_000_000_000
NAME = f"{STORE_ID}-000000000001"


class DiskQueue(Queue):
    """A machine over RocksDB."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.disk = RocksdbStore(path)
        super().__init__(store=self.disk)

    def back_up(self, name: str = "b1") -> Path:
        return make_backup(self.disk, backups_of(self.path), name, NOW_NS).path


@pytest.fixture
def open_queue(tmp_path: Path) -> Iterator[Callable[[str], DiskQueue]]:
    opened: list[DiskQueue] = []

    def make(name: str) -> DiskQueue:
        opened.append(DiskQueue(tmp_path / name))
        return opened[-1]

    yield make
    for queue in opened:
        queue.disk.close()


def test_a_backup_holds_what_was_acknowledged_and_nothing_later(
    open_queue: Callable[[str], DiskQueue], tmp_path: Path
) -> None:
    queue = open_queue("data")
    before = queue.submit(*(meta(idempotency_key=f"k{n}") for n in range(50)))
    path = queue.back_up()
    queue.submit(meta(idempotency_key="later"))
    assert path == tmp_path / "data-backups" / "b1"
    assert json.loads((path / BACKUP_MARK).read_text())["store_id"] == STORE_ID
    restore(path, tmp_path / "again", NOW_NS)
    again = open_queue("again")
    assert [entry.name for entry in again.machine.book.entries.values()] == before
    assert list(Verifier(again.disk).violations()) == []


async def test_what_a_backup_is_said_to_hold_is_what_it_holds(tmp_path: Path) -> None:
    disk, clock = RocksdbStore(tmp_path / "data"), HandClock()
    (name,) = Queue(store=disk).submit(meta())
    committer = Committer(disk, lambda: Machine(STORE_ID, RULES, recover(disk), clock.now_ns()), clock, Ear(), 0)
    committer.post(WorkerOpened(1, "w", "life", ()))
    committer.post(Claim(1, name))  # of the same batch, so that it is not on disk when the copy is made
    call = BackupCall(committer, clock, tmp_path / "backups")
    made = asyncio.create_task(call.make(queue_pb2.BackupRequest(name="b1"), cast(Context, None)))
    await asyncio.sleep(0)
    running = asyncio.create_task(committer.run())
    response = await made
    assert (response.waiting, response.leased) == (1, 0)
    committer.stop()
    await running
    disk.close()
    verifier = Verifier(RocksdbStore(tmp_path / "backups" / "b1", read_only=True))
    assert list(verifier.violations()) == []
    assert (verifier.counts[r.READY], verifier.counts[r.LEASES]) == (1, 0)


def test_numbers_of_the_lost_life_are_never_given_again(open_queue: Callable[[str], DiskQueue], tmp_path: Path) -> None:
    queue = open_queue("data")
    queue.submit(meta())
    path = queue.back_up()
    lost = queue.submit(*(meta() for _ in range(5)))
    queue.step(WorkerOpened(1, "w", "life", ()))
    lease = queue.claim(1, lost[0])
    assert lease is not None
    (ended,) = [effect for effect in queue.complete(1, lease) if isinstance(effect, Ended)]

    restore(path, tmp_path / "again", NOW_NS)
    again = open_queue("again")
    new = again.submit(*(meta() for _ in range(5)))
    assert not set(new) & set(lost)
    assert all(parse_request_id(STORE_ID, name) > NOW_NS for name in new), "the names are read back"
    assert all(again.machine.book.find(name) is None for name in lost)
    again.step(WorkerOpened(1, "w", "life", ()))
    newer = again.claim(1, new[0])
    assert newer is not None
    assert newer.fencing_token > lease.fencing_token
    (ended_again,) = [effect for effect in again.complete(1, newer) if isinstance(effect, Ended)]
    assert ended_again.completion_seq > ended.completion_seq, "a watcher with a cursor of the lost life sees it"


def test_two_restores_of_one_backup_give_different_numbers(
    open_queue: Callable[[str], DiskQueue], tmp_path: Path
) -> None:
    path = open_queue("data").back_up()
    restore(path, tmp_path / "one", NOW_NS)
    restore(path, tmp_path / "two", NOW_NS + 60 * 10**9)
    assert not set(open_queue("one").submit(meta())) & set(open_queue("two").submit(meta()))


def test_a_clock_that_is_behind_moves_the_numbers_on_all_the_same(
    open_queue: Callable[[str], DiskQueue], tmp_path: Path
) -> None:
    queue = open_queue("data")
    queue.submit(meta())
    restore(queue.back_up(), tmp_path / "again", 5)
    assert open_queue("again").machine.book.counters.seq > 1 << 40


def test_a_lease_in_the_backup_is_still_good_and_one_of_the_lost_life_is_not(
    open_queue: Callable[[str], DiskQueue], tmp_path: Path
) -> None:
    queue = open_queue("data")
    kept, lost = queue.submit(meta(), meta())
    queue.step(WorkerOpened(1, "w", "life", ()))
    lease = queue.claim(1, kept)
    path = queue.back_up()
    late = queue.claim(1, lost)
    assert lease is not None
    assert late is not None

    restore(path, tmp_path / "again", NOW_NS)
    again = open_queue("again")
    effects = again.step(WorkerOpened(1, "w", "life", (lease, late)))
    assert [effect for effect in effects if isinstance(effect, StopRun)] == [StopRun(1, late, StopReason.LEASE_LOST)]
    assert Recorded(1, lease, True) in again.complete(1, lease)
    waiting = again.machine.book.find(lost)
    assert waiting is not None
    assert waiting.state is State.READY
    assert again.complete(1, late)[-1] == Recorded(1, late, False)


def test_a_lease_whose_worker_has_finished_meanwhile_is_run_again(
    open_queue: Callable[[str], DiskQueue], tmp_path: Path
) -> None:
    queue = open_queue("data")
    (name,) = queue.submit(meta())
    queue.step(WorkerOpened(1, "w", "life", ()))
    assert queue.claim(1, name) is not None
    restore(queue.back_up(), tmp_path / "again", NOW_NS)
    again = open_queue("again")
    again.step(WorkerOpened(1, "w", "life", ()))
    delivered = again.claim(1, name)
    assert delivered == LeaseRef(name, 2, delivered.fencing_token) if delivered else False


def test_a_queue_does_not_run_on_a_backup(open_queue: Callable[[str], DiskQueue]) -> None:
    path = open_queue("data").back_up()
    with pytest.raises(StoreUnusableError, match=r"is a backup: `penstock restore`"):
        RocksdbStore(path)


def test_a_taken_or_wrong_name_is_refused_and_leaves_nothing(open_queue: Callable[[str], DiskQueue]) -> None:
    queue = open_queue("data")
    path = queue.back_up()
    for name, text in (("b1", "already"), ("../b2", "must be letters"), (".b", "must be letters")):
        with pytest.raises(BackupError, match=text):
            queue.back_up(name)
    assert [found.name for found in path.parent.iterdir()] == ["b1"]
    assert queue.back_up("").name == "20270115T080000Z"


def test_a_backup_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(BackupError, match="in memory"):
        make_backup(MemoryStore(), tmp_path, "b", NOW_NS)
    assert list(tmp_path.iterdir()) == []


OURS = (f".a.{STORE_ID}.partial", f".b.c.{STORE_ID}.partial.tmp", ".of-an-older-version.partial", ".older.partial.tmp")
ANOTHERS = (".a.0123abcd.partial", ".a.0123abcd.partial.tmp", "a.partial", ".a.restoring", ".partial", "..partial")


def test_what_a_kill_left_of_a_backup_goes_before_the_next_and_at_a_start(
    open_queue: Callable[[str], DiskQueue], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue, backups = open_queue("data"), tmp_path / "data-backups"
    for begin in (queue.back_up, lambda: remove_partials(backups, STORE_ID)):
        for name in (*OURS, *ANOTHERS):
            (backups / name).mkdir(parents=True, exist_ok=True)
            (backups / name / "000009.sst").write_bytes(b"a link keeps what is deleted")
        (backups / ".file.partial").write_text("no directory")
        (backups / ".link.partial").unlink(missing_ok=True)
        (backups / ".link.partial").symlink_to(backups / "a.partial")
        caplog.clear()
        begin()
        left = sorted(path.name for path in backups.iterdir())
        assert left == sorted((*ANOTHERS, ".file.partial", ".link.partial", "b1"))
        assert sum("was not finished and is removed" in line for line in caplog.messages) == len(OURS)
    remove_partials(tmp_path / "nowhere", STORE_ID)
    remove_partials(backups / ".file.partial", STORE_ID)  # which cannot be looked at, and ends nothing


def test_what_is_being_made_is_nobodys_to_remove(
    open_queue: Callable[[str], DiskQueue], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    queue, backups, left = open_queue("data"), tmp_path / "data-backups", list[str]()

    class Store(MemoryStore):
        def checkpoint(self, path: Path) -> None:
            path.mkdir()
            remove_partials(backups, STORE_ID)  # as another queue does when it starts
            make_backup(queue.disk, backups, "b", NOW_NS)  # a copy's of the same name, which is first
            make_backup(queue.disk, backups, "of-a-copy", NOW_NS)
            left.extend(sorted(each.name for each in backups.iterdir()))

    store = Store()
    store.write([Write(r.META, r.STORE_ID_KEY, STORE_ID.encode())])
    with pytest.raises(BackupError, match=r"there is a backup .*/b already"):
        make_backup(store, backups, "b", NOW_NS)
    assert [left[0][:3], *left[1:]] == [".b.", "b", "of-a-copy"]
    assert (backups / "b" / "CURRENT").exists(), "the first one's"
    assert sorted(path.name for path in backups.iterdir()) == ["b", "of-a-copy"]
    assert "what was not finished before" in caplog.text
    held = os.open(backups, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(BackupError, match="is locked by another program"):
        make_backup(store, backups, "c", NOW_NS)
    os.close(held)


@pytest.mark.skipif("PENSTOCK_COMPILED" in os.environ, reason="nothing patches a compiled method")
def test_a_backup_is_made_under_the_name_of_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = DiskQueue(tmp_path / "data")
    seen = list[Path]()
    monkeypatch.setattr(queue.disk, "checkpoint", seen.append)
    with pytest.raises(BackupError):
        queue.back_up()
    queue.disk.close()
    assert seen[0].name.endswith(f".{STORE_ID}.partial"), "so that it is known whose it is"


def test_a_restore_is_refused_where_it_could_destroy_something(
    open_queue: Callable[[str], DiskQueue], tmp_path: Path
) -> None:
    queue = open_queue("data")
    path = queue.back_up()
    with pytest.raises(BackupError, match="is not empty"):
        restore(path, queue.path, NOW_NS)
    with pytest.raises(BackupError, match="is not a backup"):
        restore(queue.path, tmp_path / "again", NOW_NS)
    assert not (tmp_path / "again").exists()


def test_a_damaged_backup_is_refused_and_leaves_nothing(open_queue: Callable[[str], DiskQueue], tmp_path: Path) -> None:
    path = open_queue("data").back_up()
    (path / "CURRENT").write_text("MANIFEST-999999\n")
    with pytest.raises(BackupError, match="cannot be restored"):
        restore(path, tmp_path / "again", NOW_NS)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["data", "data-backups"]


def test_a_backup_whose_rows_contradict_each_other_is_refused_unless_that_is_wanted(
    open_queue: Callable[[str], DiskQueue], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = open_queue("data")
    kept, _ = queue.submit(meta(), meta())
    queue.disk.write([Write(r.PAYLOADS, r.seq_key(2), None)])
    path, again = str(queue.back_up()), str(tmp_path / "again")
    assert main(["restore", path, again]) == 69
    told = capsys.readouterr().err
    assert f"{path} cannot be restored: it is damaged: requests {r.seq_key(2).hex()}: has no payload; " in told
    assert "--with-violations" in told
    assert sorted(found.name for found in tmp_path.iterdir()) == ["data", "data-backups"]
    assert main(["restore", path, again, "--with-violations"]) == 0
    assert open_queue("again").machine.book.find(kept) is not None


def damage(directory: Path, pattern: str) -> Path:
    """Alter 20 bytes in the middle of the largest file of this pattern."""
    path = max(directory.glob(pattern), key=lambda found: found.stat().st_size)
    row = bytearray(path.read_bytes())
    at = len(row) // 2
    row[at : at + 20] = bytes(byte ^ 0x5A for byte in row[at : at + 20])
    path.write_bytes(row)
    return path


@pytest.mark.parametrize("pattern", ["*.sst", "*.blob"])
def test_altered_bytes_are_found_wherever_they_lie(
    open_queue: Callable[[str], DiskQueue], tmp_path: Path, capsys: pytest.CaptureFixture[str], pattern: str
) -> None:
    queue = open_queue("data")
    rows = {r.seq_key(seq): os.urandom(9000 if seq < 40 else 300) for seq in range(400)}
    queue.disk.write([Write(r.PAYLOADS, key, row) for key, row in rows.items()])
    path = queue.back_up()
    damaged = damage(path, pattern)
    with pytest.raises(BackupError, match="cannot be restored: it is damaged: payloads after key 0") as refused:
        restore(path, tmp_path / "again", NOW_NS)
    assert pattern == "*.blob" or f" in {damaged} offset" in str(refused.value), "the backup's own file is named"
    assert sorted(found.name for found in tmp_path.iterdir()) == ["data", "data-backups"]
    assert main(["verify", str(path)]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["payloads"], "the family and the last good key are named"
    assert "cannot be read: Corruption" in lines[0]
    assert pattern == "*.blob" or damaged.name in lines[0]
    assert last.endswith("1 places cannot be read; what is between the families was not checked")


def test_a_store_of_many_files_is_no_damaged_one(tmp_path: Path) -> None:
    """The usual soft limit of 1,024 descriptors is fewer than a large store has files: here 60, and a file a flush."""
    store = RocksdbStore(tmp_path / "data")
    for seq in range(100):
        store.write([Write(r.PAYLOADS, r.seq_key(seq), os.urandom(9000))])
        store._families[r.PAYLOADS].flush()
    store.close()
    assert len(list((tmp_path / "data").glob("*.blob"))) == 100

    def verified(limits: str) -> subprocess.CompletedProcess[str]:
        command = f"ulimit {limits} && exec {sys.executable} -m services.queue.offline verify {tmp_path / 'data'}"
        return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)

    raised = verified("-Sn 60")
    assert "places cannot be read" not in raised.stdout
    assert "payloads 0000000000000001: no such request lives" in raised.stdout, "and all of it is looked at"
    short = verified("-n 60")
    assert (short.returncode, short.stdout) == (69, "")
    assert "Too many open files" in short.stderr
    assert "damaged" not in short.stderr


def test_reading_goes_on_behind_a_damaged_table(tmp_path: Path) -> None:
    store = RocksdbStore(tmp_path / "data")
    for family in (r.PAYLOADS, r.RESULTS):
        store.write([Write(family, r.seq_key(seq), os.urandom(300)) for seq in range(100)])
    store.close()
    for table in (tmp_path / "data").glob("*.sst"):
        row = bytearray(table.read_bytes())
        if len(row) > 20_000:
            row[len(row) // 2] ^= 1
            table.write_bytes(row)
    store = RocksdbStore(tmp_path / "data", read_only=True)
    assert [family for family, _, _ in store.damage()] == [r.PAYLOADS, r.RESULTS]
    store.close()


def test_a_store_too_damaged_to_be_opened_is_damaged_and_not_locked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = RocksdbStore(tmp_path / "data")
    store.write([Write(r.PAYLOADS, r.seq_key(seq), os.urandom(300)) for seq in range(100)])
    store.close()
    table = max((tmp_path / "data").glob("*.sst"), key=lambda found: found.stat().st_size)
    row = bytearray(table.read_bytes())
    row[-200:-192] = bytes(byte ^ 0x5A for byte in row[-200:-192])  # what says where the blocks are
    table.write_bytes(row)
    assert main(["verify", str(tmp_path / "data")]) == 1
    told = capsys.readouterr().err
    assert "cannot be opened: Corruption: " in told
    with pytest.raises(StoreUnusableError, match=r"Corruption: .*checksum mismatch"):
        RocksdbStore(tmp_path / "data")


def test_the_tools_for_a_stopped_queue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    queue = DiskQueue(tmp_path / "data")
    queue.submit(meta(), meta())
    data = str(tmp_path / "data")
    # Another process, because locks of files do not keep a process from itself.
    command = [sys.executable, "-m", "services.queue.offline", "verify", data]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, "is locked: another queue service uses it" in ran.stderr) == (69, True)
    queue.disk.close()
    assert main(["verify", data]) == 0
    assert "2 requests, 2 payloads, 2 ready, 0 leases" in capsys.readouterr().out
    assert main(["backup", data, "b1"]) == 0
    assert main(["backup", data, "b1"]) == 2, "the name is taken"
    assert main(["verify", f"{data}-backups/b1"]) == 0
    assert main(["restore", f"{data}-backups/b1", str(tmp_path / "again")]) == 0
    assert main(["restore", f"{data}-backups/b1", str(tmp_path / "again")]) == 69
    capsys.readouterr()
    store = RocksdbStore(tmp_path / "again")
    store.write([Write(r.PAYLOADS, r.seq_key(1), None)])
    store.close()
    assert main(["verify", str(tmp_path / "again")]) == 1
    assert capsys.readouterr().out.splitlines()[0] == f"requests {r.seq_key(1).hex()}: has no payload"
    assert main(["verify", str(tmp_path / "nowhere")]) == 69
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("here", [".", "../data", "../data/."])
def test_a_directory_is_named_from_within_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str) -> None:
    data = tmp_path / "data"
    DiskQueue(data).disk.close()
    monkeypatch.chdir(data)
    assert main(["backup", here, "one"]) == 0
    backup = tmp_path / "data-backups" / "one"
    assert (backup / BACKUP_MARK).is_file()
    shutil.rmtree(data)
    data.mkdir()
    monkeypatch.chdir(data)
    assert main(["restore", str(backup), here]) == 0
    assert (data / "CURRENT").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "data-backups"]


def test_a_verification_changes_no_row_and_no_file(tmp_path: Path) -> None:
    queue = DiskQueue(tmp_path / "data")
    queue.submit(*(meta() for _ in range(20)))
    queue.disk.close()
    kept = {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()}
    assert main(["verify", str(tmp_path / "data")]) == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()} == kept


def test_deliveries_of_a_restored_queue_have_their_payload(
    open_queue: Callable[[str], DiskQueue], tmp_path: Path
) -> None:
    queue = open_queue("data")
    (name,) = queue.submit(meta())
    restore(queue.back_up(), tmp_path / "again", NOW_NS)
    again = open_queue("again")
    effects = again.step(WorkerOpened(1, "w", "life", ()))
    assert not [effect for effect in effects if isinstance(effect, Deliver)]
    assert again.claim(1, name) is not None
    assert again.disk.get(r.PAYLOADS, r.seq_key(1)) == queue.disk.get(r.PAYLOADS, r.seq_key(1))
