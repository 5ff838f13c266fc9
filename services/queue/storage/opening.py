"""What is looked at before a store is opened, and what is said of one that cannot be."""

from __future__ import annotations

import fcntl
import re
from pathlib import Path
from typing import IO, Any

import rocksdict

from services.queue.storage.store import StoreUnreadableError, StoreUnusableError
from services.queue.storage.synced import MARK_FILE, MarkError, lost_of_manifest, read_mark

BACKUP_MARK = "PENSTOCK_BACKUP.json"
"""The file that tells a backup from a data directory."""

DAMAGE = "Corruption"
"""How RocksDB begins an error about bytes that are not what was written."""

NO_FAMILY = "Column family not found"
"""In errors about a store that has not all that this version's have."""

NOT_OF_THE_DISK = re.compile("Too many open files|Cannot allocate memory")
"""In errors that say nothing of what the disk holds."""

NO_SPACE = "No space left on device"
"""In errors of a disk that is full."""


def keep_writers_away(path: Path) -> IO[bytes] | None:
    """Take the lock of a store that is only read; raises StoreUnusableError if a queue has it.

    RocksDB reads beside a writer without asking, and sees rows of different moments.
    """
    lock = path / "LOCK"
    if not lock.exists():
        return None
    file = lock.open("r+b")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise StoreUnusableError(open_reason(path, f"{lock}: {error.strerror}")) from None
    return file


def refuse_locked(path: Path) -> None:
    """Raise StoreUnusableError if another process has the store open.

    Called only where something is wrong already: to let go of the lock takes it from a store of this process, too.
    """
    try:
        lock = keep_writers_away(path)
    except OSError as error:
        raise StoreUnusableError(open_reason(path, str(error))) from None
    if lock is not None:
        lock.close()


def refuse_lost_writes(path: Path) -> None:
    """Raise StoreUnusableError if writes are missing that were synced; only reads.

    Opening to write would make what the log still says the truth, and delete what is behind the damage.
    """
    if not (path / MARK_FILE).exists():
        return  # new, or written by a version that kept no mark
    try:
        # Looked at before RocksDB does, which may take what is left of a MANIFEST for an older version's.
        refusal = _lost_of_manifest(path) or lost_writes(path, _last_write(path))
    except Exception as error:  # rocksdict raises plain Exception for every failure
        refusal = str(error)
        if not refusal.startswith(DAMAGE):
            raise StoreUnusableError(open_reason(path, refusal)) from None
    if not refusal:
        return
    refuse_locked(path)  # beside a writer a log may look torn
    raise damaged(path, refusal)


def damaged(path: Path, what: str) -> StoreUnreadableError:
    """Return the refusal of a directory in which `what` is wrong."""
    return StoreUnreadableError(
        f"data directory {path} is damaged: {what}. Acknowledged requests would be lost silently: restore a backup,"
        f" or see docs/operations.md on how to go on with what is left"
    )


def refuse_without_schema(path: Path, writes: int) -> None:
    """Raise StoreUnusableError if a store without a schema has had writes: the table that tells the first is lost."""
    if writes:
        raise damaged(path, f"it has {writes} writes, and not the first, which tells the schema")


def _last_write(path: Path) -> int:
    """Return the number of the last write in the store, by reading its log; 0 if there is no store."""
    if not (path / "CURRENT").exists():
        return 0
    # The default family alone: the whole log is read for its numbers, and no row of it kept.
    access = rocksdict.AccessType.read_only()
    db: Any = rocksdict.Rdict(str(path), rocksdict.Options(raw_mode=True), access_type=access)
    number: int = db.latest_sequence_number()
    db.close()
    return number


def lost_writes(path: Path, found: int) -> str:
    """Return in words what had reached the disk and is missing from the MANIFEST, or behind the write `found`, the last
    that is there; empty if nothing is."""
    try:
        marked = read_mark(path)
    except MarkError as error:
        return str(error)
    if marked is None:
        return ""
    if (lost := _lost_of_manifest(path)) or found >= marked:
        return lost
    return f"its log ends after write {found}, and write {marked} had reached the disk"


def _lost_of_manifest(path: Path) -> str:
    try:
        return lost_of_manifest(path)
    except MarkError as error:
        return str(error)


def written_by_older(path: Path) -> str:
    """Return what to say of a store whose rows only a migration can read."""
    if (path / BACKUP_MARK).exists():
        what, remedy = "backup", "`penstock restore` makes a data directory of it, which its queue migrates"
    else:
        what, remedy = "data directory", "starting its queue migrates it; the version that wrote it can back it up"
    return f"{what} {path} was written by an older version of this program; {remedy}"


def open_failure(path: Path, text: str) -> StoreUnusableError:
    """Return the refusal of a directory that RocksDB does not open, saying `text`."""
    if NO_FAMILY in text and (path / MARK_FILE).exists() and (lost := _lost_of_manifest(path)):
        return damaged(path, lost)
    kind = StoreUnreadableError if text.startswith(DAMAGE) else StoreUnusableError
    return kind(open_reason(path, text))


def open_reason(path: Path, text: str) -> str:
    """Return what to say of a directory that RocksDB does not open, saying `text`."""
    if f"{path / 'LOCK'}:" in text or "lock hold by current process" in text:
        return f"data directory {path} is locked: another queue service uses it"
    if NO_FAMILY in text:
        return written_by_older(path)
    if "Column families not opened" in text:
        return f"data directory {path} was written by a newer version of this program ({text})"
    return f"data directory {path} cannot be opened: {text}"
