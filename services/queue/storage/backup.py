"""Backups: a consistent copy of a store beside it, and a data directory made of one.

A backup is a RocksDB checkpoint: its files are links to the store's where these no longer change, so that it takes
little time and at first no space. A mark tells it from a data directory, because a queue must not run on it as it is:
it would give out once more the numbers that were given out after the backup was made, and a client would find the
result of another's request under the name of its own. `restore` moves the numbers on.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from services.queue.core import records
from services.queue.core.effects import Write
from services.queue.core.entry import Counters
from services.queue.storage.opening import BACKUP_MARK
from services.queue.storage.rocksdb_store import RocksdbStore
from services.queue.storage.store import Store, StoreError, StoreUnusableError
from services.queue.storage.synced import sync_directory
from services.queue.storage.verify import Verifier

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Names of backups: nothing that leads out of their directory."""

PARTIAL = re.compile(r"\.[A-Za-z0-9][A-Za-z0-9._-]*?(?:\.(?P<store>[0-9a-f]{8}))?\.partial(?:\.tmp)?")
"""Names of backups that are being made, by us and, with `.tmp`, by RocksDB; older versions left the store out."""

NUMBERS_SKIPPED = 1 << 40
"""Least that a restore moves every counter on: more than any store hands out between a backup and its use. The time in
nanoseconds is usually far beyond it, and keeps two restores of one backup apart."""

FORMAT = 1
"""Of a backup, as its mark tells it."""


class BackupError(Exception):
    """The backup cannot be made or used; the text says why."""


class Backup(NamedTuple):
    """A backup on disk."""

    path: Path
    store_id: str
    made_ns: int
    """When it was begun, Unix time."""


def backups_of(data_dir: Path) -> Path:
    """Return the directory of the backups of a data directory: beside it, so on the same file system."""
    named = _named(data_dir)
    return named.with_name(f"{named.name}-backups")


def _named(directory: Path) -> Path:
    """Return the same directory under a path that ends with its name: "." has none."""
    return Path(os.path.realpath(directory)) if directory.name in {"", ".."} else directory


def name_of(made_ns: int) -> str:
    """Return the name of a backup that was given none: its time in UTC."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(made_ns // 1_000_000_000))


def make_backup(store: Store, directory: Path, name: str, now_ns: int) -> Backup:
    """Write a backup of `store` to `directory`; it appears under its name when it is whole and on disk.

    Raises BackupError if the name cannot be used or the copy cannot be written.
    """
    name = name or name_of(now_ns)
    if not NAME.fullmatch(name):
        raise BackupNameError(f"name: {name!r} must be letters, digits, dots, dashes and underscores, at most 100")
    try:
        named = store.get(records.META, records.STORE_ID_KEY)
        backup = Backup(directory / name, named.decode() if named else "", now_ns)
        directory.mkdir(parents=True, exist_ok=True)
        if backup.path.exists():
            raise BackupExistsError(f"name: there is a backup {backup.path} already")
        remove_partials(directory, backup.store_id)
        with _locked(directory, fcntl.LOCK_SH | fcntl.LOCK_NB):  # commits wait for this
            _write_backup(store, backup)
    except BlockingIOError:
        raise BackupError(f"{directory} is locked by another program, or a queue clears it up: try again") from None
    except (OSError, StoreError) as error:
        raise BackupError(f"the backup cannot be written: {error}") from None
    return backup


def _write_backup(store: Store, backup: Backup) -> None:
    directory, name = backup.path.parent, backup.path.name
    # Nobody else's: a queue with a copy of the store may be making one of the same name.
    partial = directory / f".{name}.{secrets.token_hex(4)}.{backup.store_id}.partial"
    try:
        store.checkpoint(partial)
        mark = {"format": FORMAT, "store_id": backup.store_id, "made_unix_ns": backup.made_ns}
        (partial / BACKUP_MARK).write_text(json.dumps(mark) + "\n")
        _sync(partial)
        with _taken_refused(backup.path):
            partial.rename(backup.path)
        sync_directory(directory)
    except (OSError, StoreError, BackupError):
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _taken_refused(path: Path) -> Iterator[None]:
    """Refuse a name that another has taken meanwhile. Raises BackupExistsError."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise BackupExistsError(f"name: there is a backup {path} already") from None


@contextmanager
def _locked(directory: Path, how: int) -> Iterator[None]:
    """Hold a lock on a directory of backups: shared to make one, alone to remove what was not finished.

    Queues may share the directory, and a store and its restored copy have one name: what is being made is told from
    what a kill left by this lock, which ends with its process. Raises OSError, BlockingIOError where `how` says so.
    """
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, how)
        yield
    finally:
        os.close(handle)


def remove_partials(directory: Path, store_id: str) -> None:
    """Remove what was begun of backups of a store and not finished: its links keep files that the store has let go.

    What is of another store that uses the directory stays. What cannot be looked at or removed stays as well, and all
    of it while anybody makes a backup there, for the next time.
    """
    try:
        with _locked(directory, fcntl.LOCK_EX | fcntl.LOCK_NB):
            for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
                _remove_partial(entry, store_id)
    except FileNotFoundError:
        return
    except BlockingIOError:
        log.info("%s: a backup is being made; what was not finished before is removed another time", directory)
    except OSError as error:
        log.warning("%s: %s", directory, error.strerror)


def _remove_partial(entry: os.DirEntry[str], store_id: str) -> None:
    found = PARTIAL.fullmatch(entry.name)
    if found and found["store"] in {None, store_id} and entry.is_dir(follow_symlinks=False):
        log.warning("the backup %s was not finished and is removed", entry.path)
        shutil.rmtree(entry.path, ignore_errors=True)


class BackupNameError(BackupError):
    """The name cannot be one."""


class BackupExistsError(BackupNameError):
    """The name is taken."""


def restore(backup: Path, data_dir: Path, now_ns: int, with_violations: bool = False) -> Counters:
    """Make the data directory `data_dir`, which must be missing or empty, of `backup`; return its counters.

    Its rows are verified, and refused if they contradict each other, unless `with_violations`.

    Every counter goes on far beyond anything given out before: names, cursors and fencing tokens that only the lost
    life of the store gave out stay unknown for ever. Raises BackupError, with nothing left behind; also where another
    process is making the same data directory.
    """
    data_dir = _named(data_dir)
    if not (backup / BACKUP_MARK).is_file():
        raise BackupError(f"{backup} is not a backup: it has no {BACKUP_MARK}")
    if data_dir.exists() and (not data_dir.is_dir() or any(data_dir.iterdir())):
        raise BackupError(f"{data_dir} is not empty; a backup is restored to a new place")
    partial = data_dir.with_name(f".{data_dir.name}.restoring")
    try:
        held = _hold(partial, data_dir)
    except OSError as error:
        raise BackupError(f"{backup} cannot be restored: {error}") from None
    try:
        _empty(partial)  # of what a restore that was killed has left
        # Copied and not linked: what damages the one directory must not reach the other.
        ignored = shutil.ignore_patterns(BACKUP_MARK, "LOCK")
        shutil.copytree(backup, partial, ignore=ignored, dirs_exist_ok=True)
        counters = _move_on(partial, now_ns, with_violations)
        _sync(partial)
        partial.rename(data_dir)
        sync_directory(data_dir.parent)
    except (BackupError, OSError, shutil.Error, ValueError, StoreError, StoreUnusableError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        text = str(error).replace(str(partial), str(backup))  # the copy is gone, and its files are the backup's
        raise BackupError(f"{backup} cannot be restored: {text}") from None
    except KeyboardInterrupt:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(held)
    return counters


def _hold(partial: Path, data_dir: Path) -> int:
    """Make the directory in which `data_dir` is restored, and return the open lock on it. Raises BackupError, OSError.

    The lock ends with the process, however that ends, and what is locked becomes the data directory or is removed.
    """
    partial.mkdir(parents=True, exist_ok=True)
    handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(handle), partial.stat()):
            raise BlockingIOError  # it was another's, and ended between the two
    except (BlockingIOError, FileNotFoundError):
        os.close(handle)
        raise BackupError(f"{data_dir} is being restored by another process") from None
    except BaseException:
        os.close(handle)
        raise
    return handle


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _move_on(path: Path, now_ns: int, with_violations: bool) -> Counters:
    store = RocksdbStore(path)
    try:
        for family, key, text in store.damage():
            raise BackupError(f"it is damaged: {family} after key {key.hex() or '-'}: {text}")
        if not with_violations and (found := next(Verifier(store).violations(), None)):
            raise BackupError(
                f"it is damaged: {found.line()}; `penstock verify-store` names whatever else there is. Restore another"
                f" backup, or what is there of this one, --with-violations"
            )
        row = store.get(records.META, records.COUNTERS_KEY)
        counters = Counters() if row is None else records.decode_counters(row)
        counters.seq = max(now_ns, counters.seq + NUMBERS_SKIPPED)
        counters.fencing_token = max(now_ns, counters.fencing_token + NUMBERS_SKIPPED)
        counters.completion_seq = max(now_ns, counters.completion_seq + NUMBERS_SKIPPED)
        store.write([Write(records.META, records.COUNTERS_KEY, records.encode_counters(counters))])
    finally:
        store.close()
    return counters


def _sync(directory: Path) -> None:
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_directory(directory)
