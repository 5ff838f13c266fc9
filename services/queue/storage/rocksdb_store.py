"""The durable store: RocksDB through rocksdict, one write batch with one fsync per commit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import rocksdict

from services.queue.core.effects import Write
from services.queue.core.records import FAMILIES, META, SCHEMA_KEY, SCHEMA_VERSION
from services.queue.storage.batches import write_batch, write_options
from services.queue.storage.migration import MIGRATED_VERSIONS, migrate
from services.queue.storage.opening import (
    BACKUP_MARK,
    NO_SPACE,
    NOT_OF_THE_DISK,
    keep_writers_away,
    lost_writes,
    open_failure,
    refuse_locked,
    refuse_lost_writes,
    refuse_without_schema,
)
from services.queue.storage.reclaim import Room
from services.queue.storage.reserve import Reserve, free_bytes, log_bytes
from services.queue.storage.rocksdb_errors import STORE_ERRORS
from services.queue.storage.rocksdb_options import CACHE_BYTES, database_options, family_options
from services.queue.storage.space import Space
from services.queue.storage.spared import TABLE_FILE, Spared
from services.queue.storage.store import Row, StoreError, StoreUnusableError
from services.queue.storage.synced import MARK_FILE, SyncedMark, write_mark

log = logging.getLogger(__name__)

OPENING_BYTES = 8 * 1024 * 1024
"""What it takes to open a store beside the replay of its log: a manifest, and the first writes."""


class RocksdbStore:
    """A store in one directory. The directory belongs to one process at a time."""

    def __init__(self, path: Path, read_only: bool = False, keeps_reserve: bool = False) -> None:
        """Open or create the store in `path`; with `read_only` one that exists, of whatever schema, and change nothing.

        With `keeps_reserve` there is a reserve of disk space beside it, which is given up if it is needed to open it.

        Raises StoreUnusableError if the directory is locked, cannot be written, has lost
        writes that were synced, or has a schema this program does not know.
        """
        self._path = path
        self._lock: IO[bytes] | None = None
        self._read_only = read_only
        self._synced = 0
        """Number of the last write that is known to be synced."""
        self._sync_failed = ""
        """Why a sync failed: what it was to make durable may be on the disk or not until the store is opened anew."""
        self._write_failed = ""
        """Why the last write failed. One that did keeps RocksDB from all others until the store is opened anew."""
        self._sync_ended = threading.Condition()
        self._writing = threading.RLock()
        """Held while a batch is written and synced, and to open and close: the binding cannot close what syncs."""
        self._reclaiming = threading.Lock()
        """Held while disk space is given back: the binding cannot close what compacts either."""
        self._reserve: Reserve | None = None
        self._spared = Spared()
        self._no_slowdown = write_options()
        self._mark: SyncedMark | None = None
        self._mark_fails = False
        if read_only:
            self._open_to_read()
            return
        try:
            is_backup = (path / BACKUP_MARK).exists()
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnusableError(f"data directory {path}: {error.strerror}") from None
        if is_backup:
            raise StoreUnusableError(f"{path} is a backup: `penstock restore` makes a data directory of it")
        self._reserve = Reserve(path) if keeps_reserve else None
        self._open_with_room()
        try:
            self._check_schema()
        except StoreUnusableError:
            self.close()
            raise

    def _open_to_read(self) -> None:
        if not (self._path / "CURRENT").is_file():
            raise StoreUnusableError(f"there is no store in {self._path}")
        self._lock = keep_writers_away(self._path)
        self._open()

    def _open_with_room(self) -> None:
        with suppress(StoreError):  # what cannot be looked at cannot be opened either, which says why
            if self._reserve is not None and not self._has_room():
                refuse_locked(self._path)  # the reserve may be that of a queue that runs
                self.make_room()
        try:
            self._open()
        except StoreUnusableError as error:
            if NO_SPACE not in str(error) or self._reserve is None or not self._reserve.held_bytes:
                raise
            refuse_locked(self._path)
            self._reserve.give_up()
            self._open()
        if self._reserve is not None:
            self._reserve.make()

    def _open(self) -> None:
        if not self._read_only:
            refuse_lost_writes(self._path)
        access = rocksdict.AccessType.read_only() if self._read_only else rocksdict.AccessType.read_write()
        try:
            cache = rocksdict.Cache(CACHE_BYTES)
            families = {name: family_options(name, cache, self._spared) for name in FAMILIES}
            options = database_options()
            self._db: Any = rocksdict.Rdict(str(self._path), options, column_families=families, access_type=access)
            self._families: dict[str, Any] = {name: self._db.get_column_family(name) for name in FAMILIES}
            self._handles: dict[str, Any] = {name: self._db.get_column_family_handle(name) for name in FAMILIES}
            self._space = Space(self._families, self._spared, self._background_errors, lend=self._lend_reserve)
            self._cache = cache  # it must live as long as the database
        except Exception as error:  # rocksdict raises plain Exception for every failure
            raise open_failure(self._path, str(error)) from None
        with self._sync_ended:
            # To open replays the log into table files, which are synced.
            self._synced, self._sync_failed, self._write_failed = self._db.latest_sequence_number(), "", ""
            self._sync_ended.notify_all()
        if not self._read_only:
            self._begin_mark()

    def _begin_mark(self) -> None:
        try:
            self._mark = SyncedMark(self._path, self._synced)
        except OSError as error:
            self.close()
            raise StoreUnusableError(f"{error.filename or self._path / MARK_FILE}: {error.strerror}") from None

    def lost_writes(self) -> str:
        """Return what is missing at the end of the log, in words; empty if nothing is."""
        return lost_writes(self._path, self._db.latest_sequence_number())

    def _check_schema(self) -> None:
        found = self.get(META, SCHEMA_KEY)
        if found is None:
            refuse_without_schema(self._path, self._synced)
            self.write([Write(META, SCHEMA_KEY, str(SCHEMA_VERSION).encode())])
            return
        if found in MIGRATED_VERSIONS:
            log.info("data directory %s is brought up to schema version %d", self._path, SCHEMA_VERSION)
            try:
                migrate(self)
            except (StoreError, ValueError, TypeError) as error:
                raise StoreUnusableError(f"data directory {self._path} cannot be brought up to date: {error}") from None
            log.info("data directory %s is now of schema version %d", self._path, SCHEMA_VERSION)
            return
        if not found.isdigit() or int(found) != SCHEMA_VERSION:
            raise StoreUnusableError(
                f"data directory {self._path} has schema version {found.decode(errors='replace')}; "
                f"this program knows version {SCHEMA_VERSION}"
            )

    def get(self, family: str, key: bytes) -> bytes | None:
        """Return the row of `key`, or None."""
        with STORE_ERRORS:
            value: bytes | None = self._families[family].get(key)
            return value

    def get_many(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the rows of `keys`, in order, None where there is none."""
        if not keys:
            return []
        with STORE_ERRORS:
            values: list[bytes | None] = self._families[family].get(list(keys))
            return values

    def may_hold(self, family: str, key: bytes) -> bool:
        """Return False only if there is no row of `key`, by memtables, bloom filters and what is cached."""
        with STORE_ERRORS:
            return bool(self._families[family].key_may_exist(key))

    def scan(self, family: str, start: bytes, end: bytes, limit: int) -> list[Row]:
        """Return at most `limit` rows with start <= key < end, by key; an empty `end` means to the last."""
        rows: list[Row] = []
        with STORE_ERRORS:
            options = rocksdict.ReadOptions()
            if end:
                options.set_iterate_upper_bound(end)
            cursor = self._families[family].iter(options)
            cursor.seek(start)
            while len(rows) < limit and cursor.valid():
                rows.append((cursor.key(), cursor.value()))
                if len(rows) < limit:  # what nobody asked for may be damaged
                    cursor.next()
            cursor.status()
        return rows

    def scan_back(self, family: str, start: bytes, end: bytes, limit: int) -> list[Row]:
        """Return at most `limit` rows with start <= key < end, from the last downwards."""
        rows: list[Row] = []
        with STORE_ERRORS:
            options = rocksdict.ReadOptions()
            if end:
                options.set_iterate_upper_bound(end)
            cursor = self._families[family].iter(options)
            cursor.seek_to_last()
            while len(rows) < limit and cursor.valid() and cursor.key() >= start:
                rows.append((cursor.key(), cursor.value()))
                if len(rows) < limit:  # on its way back RocksDB itself looks at one row more
                    cursor.prev()
            cursor.status()
        return rows

    def damage(self) -> Iterator[tuple[str, bytes, str]]:
        """Read every row of every family, against its checksum; yield what cannot be read.

        Each time the family, the last key before it, and what is wrong there and how far. Raises StoreError for what is
        no damage: want of memory, or of files that may be open.
        """
        for family in FAMILIES:
            start: bytes | None = b""
            while start is not None:
                last, error = self._read_from(family, start)
                if error is None:
                    break
                if NOT_OF_THE_DISK.search(str(error)):
                    raise error
                start = self._end_of_file_in(error, max(last, start))
                until = "the end of the family" if start is None else start[:-1].hex()
                yield family, last, f"what follows, up to {until} at most, cannot be read: {error}"

    def _read_from(self, family: str, start: bytes) -> tuple[bytes, StoreError | None]:
        """Read rows from `start` on; return the last key that could be read, and what ended it before the end."""
        last = b""
        try:
            with STORE_ERRORS:
                options = rocksdict.ReadOptions()
                options.fill_cache(False)
                cursor = self._families[family].iter(options)
                cursor.seek(start)
                while cursor.valid():
                    last = cursor.key()
                    cursor.next()
                cursor.status()
        except StoreError as error:
            return last, error
        return last, None

    def _end_of_file_in(self, error: StoreError, after: bytes) -> bytes | None:
        """Return the first key behind the table file that an error names; None if none is named, or lies behind."""
        named = TABLE_FILE.search(str(error))
        ends = [file["end_key"] for file in self._db.live_files() if named and file["name"] == f"/{named.group()}"]
        return ends[0] + b"\0" if ends and ends[0] >= after else None

    def write(self, writes: Sequence[Write]) -> None:
        """Apply all writes in one batch and fsync it.

        In two steps: the binding keeps the interpreter's lock while it writes, also while such a write syncs, and lets
        go of it for a sync of its own, so that the event loop goes on meanwhile. In between reads find what the disk
        may not have; `wait_durable` is there for that.
        """
        with self._writing, STORE_ERRORS:
            self._write(writes, True)

    def write_at_once(self, writes: Sequence[Write]) -> bool:
        """Do as `write`, but return False, with nothing applied, where another writer or a stall is in the way."""
        if not self._writing.acquire(blocking=False):
            return False
        try:
            with STORE_ERRORS:
                return self._write(writes, False)
        finally:
            self._writing.release()

    def _write(self, writes: Sequence[Write], waits: bool) -> bool:
        self._refuse_in_doubt()
        try:
            self._space.deleted.begin(writes)
            if not write_batch(self._db, self._handles, writes, self._no_slowdown, self._space.give_way, waits):
                return False
            self._space.deleted.end()
            self._sync(self._db.latest_sequence_number())
        except BaseException as error:  # a panic of the binding is no Exception
            is_first, self._write_failed = not self._write_failed, str(error) or type(error).__name__
            if is_first and self._has_failed_in_background():
                self._spared.note(self._write_failed, self._families)
            raise
        self._write_failed = ""
        return True

    def _has_failed_in_background(self) -> bool:
        # RocksDB answers the next write with what a flush or a compaction met; a write itself reads nothing.
        try:
            return self._background_errors() > 0
        except rocksdict.DbClosedError:
            return False

    def _sync(self, number: int) -> None:
        """Sync the log, up to the write `number`. After an error the store is in doubt: what the kernel could not write
        back it forgets, so that another sync of the file may succeed with a hole before it."""
        try:
            self._db.flush_wal(True)
        except BaseException as error:  # a panic of the binding is no Exception
            with self._sync_ended:
                self._sync_failed = str(error) or type(error).__name__
                self._sync_ended.notify_all()
            raise
        with self._sync_ended:
            self._synced = number
            self._sync_ended.notify_all()
        self._note_synced(number)

    def _background_errors(self) -> int:
        return self._db.property_int_value("rocksdb.background-errors") or 0

    def doubt(self) -> str:
        """Return why the last sync failed; empty if it did not."""
        return self._sync_failed

    def write_failure(self) -> str:
        """Return why the last write failed; empty if it did not."""
        return self._write_failed

    def _refuse_in_doubt(self) -> None:
        if self._sync_failed:
            raise StoreError(f"a sync failed, so the store has to be opened again: {self._sync_failed}")

    def wait_durable(self) -> None:
        """Return once every write that reads could find so far is synced; raises StoreError if a sync failed."""
        with STORE_ERRORS:
            seen = (db := self._db).latest_sequence_number()
        with self._sync_ended:
            self._sync_ended.wait_for(lambda: self._sync_failed or self._synced >= seen or self._db is not db)
            self._refuse_in_doubt()
        if self._db is not db:  # which may have lost what was read; others have its numbers now
            raise StoreError("the store was opened again meanwhile")

    def _note_synced(self, number: int) -> None:
        try:
            if self._mark is not None:
                self._mark.note(number)
        except OSError as error:
            if not self._mark_fails:
                log.error("%s stays behind, so damage of what is written from now on may go unnoticed: %s",
                          self._path / MARK_FILE, error.strerror)  # fmt: skip
            self._mark_fails = True

    def checkpoint(self, path: Path) -> None:
        """Write a consistent copy to `path`: links where files no longer change, copies on another file system."""
        with STORE_ERRORS:
            number = self._db.latest_sequence_number()
            rocksdict.Checkpoint(self._db).create_checkpoint(str(path))
            write_mark(path, number)

    def disk_free_bytes(self) -> int:
        """Return the bytes an unprivileged process may still write. Raises StoreError."""
        try:
            return free_bytes(self._path)
        except OSError as error:
            raise StoreError(f"statvfs: {error.strerror}") from None

    def make_room(self) -> bool:
        """Return whether there is room to open the store, which replays its log; give the reserve up if there is not.

        Raises StoreError if the directory cannot be read.
        """
        if self._has_room():
            return True
        return self._reserve is not None and self._reserve.give_up() and self._has_room()

    def _has_room(self) -> bool:
        try:
            return free_bytes(self._path) >= OPENING_BYTES + log_bytes(self._path)
        except OSError as error:
            raise StoreError(f"{self._path}: {error.strerror}") from None

    def is_reserve_given_up(self) -> bool:
        """Return whether the reserve was needed, and has not been made again."""
        return self._reserve is not None and self._reserve.is_given_up

    def keep_reserve(self) -> None:
        """Make the reserve, if there is to be one and it is due."""
        if self._reserve is not None:
            self._reserve.make()

    def reclaim(self, bound_bytes: int, is_low: bool, kept_bytes: int = 0) -> int:
        """Compact what deleted rows are in the way of; return the bytes of bodies' files that went. Commits go on."""
        with self._reclaiming, STORE_ERRORS:
            if is_low and log_bytes(self._path) >= bound_bytes:
                self._space.let_log_go(self.disk_free_bytes())
            free = self.disk_free_bytes()
            due = 0 if self._reserve is None else self._reserve.due_bytes(free)  # it may be made meanwhile
            is_full = free - due <= kept_bytes or self.is_reserve_given_up()
            room = Room(free - due, is_low, is_full, 0 if is_full else kept_bytes)
            if self._reserve is None:
                return self._space.reclaim(bound_bytes, room)
            try:
                return self._space.reclaim(bound_bytes, room._replace(reserve_bytes=self._reserve.held_bytes))
            finally:
                self._reserve.end_loan()

    def _lend_reserve(self) -> bool:
        return self._reserve is not None and self._reserve.lend()

    def compacted_s(self) -> float:
        """Return how long `reclaim` has compacted since the store was opened."""
        return self._space.compacted_s

    def reopen(self) -> None:
        """Close and open again; raises StoreError if that fails."""
        with self._writing:
            self.close()
            try:
                self._open_with_room()
            except StoreUnusableError as error:
                raise StoreError(str(error)) from None

    def close(self) -> None:
        """Flush and release the directory; never raises, and a second call does nothing."""
        with self._writing:
            if not self._reclaiming.acquire(blocking=False):
                with suppress(rocksdict.DbClosedError):
                    # A compaction ends at once, with nothing changed, and whatever else would begin fails.
                    self._db.cancel_all_background(False)
                self._reclaiming.acquire()
            try:
                self._close()
            finally:
                self._reclaiming.release()

    def _close(self) -> None:
        # The lock goes when the last handle does, so these go first; cleared, for a frame that an error keeps, as the
        # one of a write that failed, may hold the dictionaries.
        self._families.clear()
        self._handles.clear()
        try:
            self._db.close()
        except rocksdict.DbClosedError:
            pass
        except Exception as error:  # what cannot be flushed, say after a full disk, is in the log all the same
            log.warning("closed without a flush: %s", error)
        if self._mark is not None:
            self._mark.close()
            self._mark = None
        if self._lock is not None:
            self._lock.close()
