"""A restore has its place to itself, and leaves nothing there when it is ended."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.queue.storage import backup
from services.queue.storage.recovery import store_id_of
from services.queue.storage.rocksdb_store import RocksdbStore

NOW_NS = 1_800_000_000_000_000_000


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Path]:
    store = RocksdbStore(tmp_path / "data")
    store_id_of(store, lambda: "named")
    yield backup.make_backup(store, tmp_path / "backups", "b1", NOW_NS).path
    store.close()


def there(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_second_restore_to_one_place_waits_for_nothing_and_spoils_nothing(made: Path, tmp_path: Path) -> None:
    partial = tmp_path / ".again.restoring"
    partial.mkdir()
    (partial / "half").mkdir()
    (partial / "half" / "copied").touch()
    first = os.open(partial, os.O_RDONLY)
    fcntl.flock(first, fcntl.LOCK_EX)  # as a restore in another process has it
    with pytest.raises(backup.BackupError, match=r"again is being restored by another process$"):
        backup.restore(made, tmp_path / "again", NOW_NS)
    assert (partial / "half" / "copied").exists()
    os.close(first)  # as when it is killed
    backup.restore(made, tmp_path / "again", NOW_NS)
    assert "half" not in there(tmp_path / "again")
    assert there(tmp_path) == ["again", "backups", "data"]


def test_one_that_ends_just_now_has_made_the_place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was opened is the other's data directory by the time that its lock comes free."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: (tmp_path / ".again.restoring").rename(tmp_path / "again"))
    with pytest.raises(backup.BackupError, match="by another process"):
        backup.restore(made, tmp_path / "again", NOW_NS)
    assert there(tmp_path / "again") == []


def test_one_that_is_interrupted_leaves_nothing(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(backup, "_sync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backup.restore(made, tmp_path / "again", NOW_NS)
    assert there(tmp_path) == ["backups", "data"]


def test_a_place_that_cannot_be_made_is_named(made: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(backup.BackupError, match=r"cannot be restored: \[Errno 20\]"):
        backup.restore(made, tmp_path / "file" / "again", NOW_NS)
