"""The mark of what has reached the disk, beside the store: how a start knows that nothing is missing from its log.

RocksDB replays its log up to the first record it cannot read and takes that for the end. After a power cut it is: the
last write may be torn, and nobody was told of it. A bad sector, a file that was cut or deleted look the same, with
acknowledged writes behind them. The two are told apart by the number of the last write that was synced, which is noted
in a file of its own after each sync, and not synced itself: it costs a system call of a few microseconds, survives a
kill, and after a power cut is at most behind, by what the kernel had not written back. So a store whose last write has
a lower number than the mark has lost writes, always; and one that lost some is found, but for damage within the last
seconds before a power cut.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from pathlib import Path

MARK_FILE = "PENSTOCK_SYNCED"

_MARK = struct.Struct("<QI")
"""The number and its CRC-32; 12 bytes within one sector, which a disk writes whole or not at all."""


class MarkError(Exception):
    """The mark is there and cannot be read; the text says why."""


def read_mark(directory: Path) -> int | None:
    """Return the number of the last write known to be synced, None if the directory has no mark yet.

    Raises MarkError if the file is damaged.
    """
    path = directory / MARK_FILE
    try:
        row = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise MarkError(f"{path}: {error.strerror}") from None
    if not row:  # made right before a power cut: no write was acknowledged before it was synced
        return None
    if len(row) != _MARK.size or row != _encode(_MARK.unpack(row)[0]):
        raise MarkError(f"{path} is damaged")
    return int(_MARK.unpack(row)[0])


def write_mark(directory: Path, number: int) -> None:
    """Write a mark for a directory that is made whole; whoever makes it syncs it. Raises OSError."""
    (directory / MARK_FILE).write_bytes(_encode(number))


class SyncedMark:
    """The mark of a store that is being written; `note` may be called from any thread."""

    def __init__(self, directory: Path, number: int) -> None:
        """Open the mark of `directory`, made and synced if it is missing, at `number`. Raises OSError."""
        self._number = number
        self._guard = threading.Lock()
        path = directory / MARK_FILE
        is_new = not path.exists()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(self._file, _encode(number), 0)
            if is_new:
                os.fsync(self._file)
                _sync_directory(directory)
        except OSError:
            os.close(self._file)
            raise

    def note(self, number: int) -> None:
        """Note that every write up to `number` is synced. Raises OSError; the mark is behind then, which is no harm."""
        with self._guard:
            if number > self._number:
                os.pwrite(self._file, _encode(number), 0)
                self._number = number

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)


def _encode(number: int) -> bytes:
    return _MARK.pack(number, zlib.crc32(number.to_bytes(8, "little")))


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
