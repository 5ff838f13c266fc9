"""A file that holds disk space which the store gets when there is none left: the way out of a full disk.

What frees space takes some first. To open the store again after a write that failed replays its log into new files;
deletions are written before what they are about goes; compactions write before they delete. While the reserve is given
up and less than `LAST_ROOM_BYTES` is left, the queue takes only what frees space.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from services.queue.storage.rocksdb_options import ALL_WRITE_BUFFERS_BYTES, MAX_WAL_BYTES, WRITE_BUFFER_BYTES

log = logging.getLogger(__name__)

RESERVE_FILE: Final = "PENSTOCK_RESERVE"

LAST_ROOM_BYTES: Final = ALL_WRITE_BUFFERS_BYTES + WRITE_BUFFER_BYTES
"""From here on only cancels and deletes are taken: what is in memory can be flushed, for which the log goes, although a
flush has taken some just before; and a blob file can be emptied."""

ROOM_AGAIN_BYTES: Final = LAST_ROOM_BYTES + WRITE_BUFFER_BYTES
"""From here on everything is taken again: clearly more, for each time the workers' streams are ended."""

RESERVE_BYTES: Final = MAX_WAL_BYTES + LAST_ROOM_BYTES
"""Room for the log to be replayed, which writes as much as is in it, and the last room after that."""

AMPLE_BYTES: Final = 32 * RESERVE_BYTES
"""With more free than this there is no reserve yet: 5 GiB do not go between two looks, which are seconds apart."""


def log_bytes(directory: Path) -> int:
    """Return the size of the store's log, which is replayed when it is opened. Raises OSError."""
    with os.scandir(directory) as entries:
        sizes = 0
        for entry in entries:
            with suppress(FileNotFoundError):  # let go of meanwhile
                sizes += entry.stat().st_size if entry.name.endswith(".log") else 0
        return sizes


def free_bytes(directory: Path) -> int:
    """Return the bytes that an unprivileged process may still write to the disk of `directory`. Raises OSError."""
    stats = os.statvfs(directory)
    return stats.f_bavail * stats.f_frsize


class Reserve:
    """The reserve of a data directory. Calls may come from any thread, and raise OSError only from `__init__`.

    The file is as long as what it holds; one of no bytes is given up, and so is the next life told.
    """

    def __init__(self, directory: Path) -> None:
        """Look what there is of it."""
        self._directory = directory
        self._path = directory / RESERVE_FILE
        self._guard = threading.Lock()
        size = self._path.stat().st_size if self._path.exists() else None
        self._is_lent = False
        self.is_given_up = size == 0
        """Whether it was needed, and has not been made again."""

    @property
    def held_bytes(self) -> int:
        """What is held: by the file, which a kill may have left in part, and whoever makes room by hand may cut."""
        return self._size() or 0

    def _size(self) -> int | None:
        try:
            return self._path.stat().st_size
        except OSError:
            return None

    def due_bytes(self, free: int) -> int:
        """Return what it is about to take of so many free bytes: it is made where it is wanted and leaves some room."""
        missing = RESERVE_BYTES - self.held_bytes
        is_wanted = missing > 0 and not self._is_lent and (self.is_given_up or free < AMPLE_BYTES)
        return missing if is_wanted and free >= missing + LAST_ROOM_BYTES else 0

    def make(self) -> None:
        """Make it if it is due."""
        with self._guard:
            self.is_given_up = self.is_given_up or self._size() == 0
            try:
                if self.due_bytes(free_bytes(self._directory)):
                    self._allocate()
            except OSError as error:
                log.warning("%s cannot be made: %s", self._path, error.strerror)

    def _allocate(self) -> None:
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(handle, 0, RESERVE_BYTES)
        except OSError:
            os.ftruncate(handle, 0)
            if not self.is_given_up:
                self._path.unlink()
            raise
        finally:
            os.close(handle)
        self.is_given_up = False
        log.info("%d MiB of the disk are held in reserve", RESERVE_BYTES >> 20)

    def lend(self) -> bool:
        """Give it up for what gives more back; return whether there was any. It is not due before `end_loan`."""
        self._is_lent = True
        return self.give_up("what is deleted takes room to be compacted")

    def end_loan(self) -> None:
        """Make it again from now on, once there is room."""
        self._is_lent = False

    def give_up(self, why: str = "the disk is full") -> bool:
        """Give the space to the store; return whether there was any."""
        with self._guard:
            size = self._size()
            if not size:
                return False
            try:
                os.truncate(self._path, 0)
            except OSError as error:
                log.error("%s cannot be given up: %s", self._path, error.strerror)
                return False
            self.is_given_up = True
            log.warning("%s: the reserve of %d MiB is given up", why, size >> 20)
            return True
