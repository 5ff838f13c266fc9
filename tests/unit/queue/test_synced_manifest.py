"""The note of the MANIFEST: what had reached the disk of it is there or the store is refused; the rest may be torn."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from services.queue.core import records as r
from services.queue.core.effects import Write
from services.queue.offline import main
from services.queue.storage.backup import BackupError, make_backup, restore
from services.queue.storage.rocksdb_store import RocksdbStore
from services.queue.storage.store import StoreUnreadableError, StoreUnusableError
from services.queue.storage.synced import MARK_FILE, NOTE_FILE, SyncedMark, lost_of_manifest
from tests.support.queueing import Queue, meta

NOW_NS = 1_800_000_000_000_000_000
HEAD = struct.Struct("<IHB")
"""Of a record in RocksDB's format: checksum, length, kind."""


def flush_all(store: RocksdbStore) -> None:
    for family in r.FAMILIES:
        store._families[family].flush()


def filled(path: Path) -> RocksdbStore:
    """Return a store whose requests are in tables that its MANIFEST was told of one after the other, and a log."""
    store = RocksdbStore(path)
    queue = Queue(store=store)
    for _ in range(3):
        queue.submit(*(meta() for _ in range(10)))
        flush_all(store)
    queue.submit(meta())
    return store


@pytest.fixture(scope="module")
def as_killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("manifest")
    store = filled(directory / "live")
    make_backup(store, directory, "backup", NOW_NS)
    write(store, 0)
    shutil.copytree(directory / "live", directory / "killed")
    store.close()
    return directory / "killed"


@pytest.fixture
def killed(as_killed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(as_killed, tmp_path / "killed")


def write(store: RocksdbStore, number: int) -> None:
    store.write([Write(r.IDEMPOTENCY, b"%d" % number, r.seq_key(1))])


def manifest_of(directory: Path) -> Path:
    return directory / (directory / "CURRENT").read_text().strip()


def heads_of(manifest: bytes) -> list[int]:
    heads, at = list[int](), 0
    while at < len(manifest):
        heads.append(at)
        at += HEAD.size + HEAD.unpack_from(manifest, at)[1]
    return heads


def altered(directory: Path, at: int) -> None:
    row = bytearray(manifest_of(directory).read_bytes())
    row[at] ^= 0x40
    manifest_of(directory).write_bytes(row)


def test_a_manifest_cut_between_any_two_records_refuses_the_store_and_is_left_as_it_is(killed: Path) -> None:
    whole = manifest_of(killed).read_bytes()
    heads = heads_of(whole)
    assert len(heads) > 30
    for at in (*heads[::4], heads[-1], len(whole) - 1):
        manifest_of(killed).write_bytes(whole[:at])
        left = {path.name: path.read_bytes() for path in killed.iterdir()}
        with pytest.raises(StoreUnusableError, match=r"is damaged: .*restore a backup"):
            RocksdbStore(killed)
        assert {path.name: path.read_bytes() for path in killed.iterdir()} == left, f"evidence is kept, cut at {at}"
        assert main(["verify", str(killed)]) == 1, f"cut at {at}"
    manifest_of(killed).write_bytes(whole)
    RocksdbStore(killed).close()


def test_a_bit_in_the_length_of_any_record_refuses_the_store(killed: Path) -> None:
    for head in heads_of(manifest_of(killed).read_bytes())[::3]:
        altered(killed, head + 5)
        with pytest.raises(StoreUnusableError, match="is damaged: "):
            RocksdbStore(killed)
        altered(killed, head + 5)
    RocksdbStore(killed).close()


def test_a_verification_names_it_and_a_loss_that_was_accepted_is_opened(
    killed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = manifest_of(killed).stat().st_size
    cut = heads_of(manifest_of(killed).read_bytes())[-2]
    os.truncate(manifest_of(killed), cut)
    assert main(["verify", str(killed)]) == 1
    said = f"meta -: its {manifest_of(killed).name} ends after {cut} bytes, and {size} had reached the disk"
    assert capsys.readouterr().out.splitlines()[0] == said
    (killed / MARK_FILE).unlink()
    RocksdbStore(killed).close()
    assert lost_of_manifest(killed) == ""
    RocksdbStore(killed).close()


def test_what_is_behind_the_note_may_be_torn_at_any_byte(killed: Path) -> None:
    noted = manifest_of(killed).stat().st_size
    store = RocksdbStore(killed)
    store.close()
    store = RocksdbStore(killed)
    noted = manifest_of(killed).stat().st_size
    write(store, 1)
    assert store._mark is not None
    store._mark.close()
    store._mark = None  # nothing is noted from now on, as if the queue had been killed
    store._families[r.IDEMPOTENCY].flush()
    whole = manifest_of(killed).read_bytes()
    assert len(whole) > noted
    for size in {noted, noted + 1, noted + HEAD.size, (noted + len(whole)) // 2, len(whole) - 1, len(whole)}:
        again = killed.with_name(f"again-{size}")
        shutil.copytree(killed, again)
        os.truncate(manifest_of(again), size)
        assert lost_of_manifest(again) == ""
    store.close()


def test_a_kill_at_any_call_that_notes_leaves_a_store_that_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, copies, synced = tmp_path / "live", list[Path](), dict[int, int]()

    def before(real: Callable[..., object]) -> Callable[..., object]:
        def call(*given: int) -> object:
            copies.append(tmp_path / f"killed-{len(copies)}")
            shutil.copytree(live, copies[-1])
            return real(*given)

        return call

    def fdatasync(handle: int, real: Callable[[int], None] = os.fdatasync) -> None:
        size = os.fstat(handle).st_size
        real(handle)
        synced[os.fstat(handle).st_ino] = size

    monkeypatch.setattr("os.fdatasync", before(fdatasync))
    monkeypatch.setattr("os.pwrite", before(os.pwrite))
    monkeypatch.setattr("os.fsync", before(os.fsync))
    monkeypatch.setattr("os.rename", before(os.rename))
    store = filled(live)
    store.close()
    store = RocksdbStore(live)
    store.close()
    monkeypatch.undo()
    inodes = {manifest_of(live).stat().st_ino: 0} | synced
    assert len(inodes) == 2, "one of each life"
    assert len(copies) > 15
    for copy in copies:
        again = RocksdbStore(copy)
        assert again.lost_writes() == ""
        again.close()


def test_nothing_is_noted_that_is_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path / "q")
    write(store, 1)
    row = (tmp_path / "q" / NOTE_FILE).read_bytes()
    flush_all(store)

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.fdatasync", fail)
    write(store, 2)
    assert (tmp_path / "q" / NOTE_FILE).read_bytes() == row, "the write is good all the same"
    monkeypatch.undo()
    write(store, 3)
    assert (tmp_path / "q" / NOTE_FILE).read_bytes() != row
    store.close()


def test_a_note_of_an_older_manifest_says_nothing_and_one_of_a_newer_refuses(killed: Path) -> None:
    older = (killed / NOTE_FILE).read_bytes()
    first = manifest_of(killed).name
    shutil.copy(killed / first, killed.with_name("kept"))
    RocksdbStore(killed).close()
    (killed / NOTE_FILE).rename(killed.with_name("newer"))
    (killed / NOTE_FILE).write_bytes(older)
    store = RocksdbStore(killed)  # a kill before the note, or a program that knows of none
    newer = manifest_of(killed).name
    store.close()
    shutil.copy(killed.with_name("kept"), killed / first)
    (killed / "CURRENT").write_text(f"{first}\n")
    assert lost_of_manifest(killed) == f"CURRENT names {first}, and {newer} had reached the disk"
    (killed / "CURRENT").write_text("MANIFEST-999999\n")
    with pytest.raises(StoreUnusableError, match="MANIFEST-999999"):
        RocksdbStore(killed)


def test_a_store_without_a_note_is_taken_as_it_is_and_gets_one(killed: Path) -> None:
    (killed / NOTE_FILE).unlink()
    RocksdbStore(killed).close()
    assert (killed / NOTE_FILE).exists()
    (killed / NOTE_FILE).write_bytes(b"")
    RocksdbStore(killed).close()
    for row in (b"?", b"?" * 24):
        (killed / NOTE_FILE).write_bytes(row)
        with pytest.raises(StoreUnusableError, match=f"{NOTE_FILE} is damaged"):
            RocksdbStore(killed)


def test_a_backup_whose_manifest_is_cut_or_altered_is_not_restored(as_killed: Path, tmp_path: Path) -> None:
    damages: list[Callable[[Path], None]] = [
        lambda path: altered(path, 400),
        lambda path: os.truncate(manifest_of(path), 900),
    ]
    for damage in damages:
        backup = shutil.copytree(as_killed.with_name("backup"), tmp_path / "backup")
        damage(backup)
        with pytest.raises(BackupError, match=r"cannot be restored: .*is damaged"):
            restore(backup, tmp_path / "restored", NOW_NS)
        shutil.rmtree(backup)
    assert list(tmp_path.iterdir()) == []


def test_the_note_follows_a_manifest_that_another_takes_the_place_of(tmp_path: Path) -> None:
    def begin(number: int) -> None:
        (tmp_path / f"MANIFEST-{number:06d}").write_bytes(b"%d" % number * 50)
        (tmp_path / "CURRENT").write_text(f"MANIFEST-{number:06d}\n")

    begin(5)
    mark = SyncedMark(tmp_path, 1)
    begin(9)
    (tmp_path / "MANIFEST-000005").unlink()
    mark.note(2)
    mark.close()
    assert lost_of_manifest(tmp_path) == ""
    os.truncate(tmp_path / "MANIFEST-000009", 49)
    assert lost_of_manifest(tmp_path) == "its MANIFEST-000009 ends after 49 bytes, and 50 had reached the disk"
    (tmp_path / "MANIFEST-000009").unlink()
    assert lost_of_manifest(tmp_path) == "its MANIFEST-000009 is gone"


@pytest.mark.parametrize("mark", [MARK_FILE, NOTE_FILE])
def test_a_mark_that_cannot_be_read_is_named_and_no_damage(killed: Path, mark: str) -> None:
    (killed / mark).unlink()
    (killed / mark).mkdir()
    with pytest.raises(StoreUnusableError, match=f"{mark}: Is a directory") as refused:
        RocksdbStore(killed)
    assert not isinstance(refused.value, StoreUnreadableError)
    assert "damaged" not in str(refused.value)
