"""What has reached the disk, noted beside the store: how a start knows that nothing is missing.

RocksDB replays its log up to the first record it cannot read and takes that for the end. After a power cut it is: the
last write may be torn, and nobody was told of it. A bad sector, a file that was cut or deleted look the same, with
acknowledged writes behind them. The two are told apart by the number of the last write that was synced, which is noted
in a file of its own after each sync, and not synced itself: it costs a system call of a few microseconds, survives a
kill, and after a power cut is at most behind, by what the kernel had not written back. So a store whose last write has
a lower number than the mark has lost writes, always; and one that lost some is found, but for damage within the last
seconds before a power cut.

The MANIFEST, which names the table files, is read the same way, and the last write's number does not tell what it
lost: a log that was begun after it goes on. It only grows, so a second file notes how much of it has reached the disk
and the checksum of that. Those bytes are there, or the store is damaged; what is behind them may be torn. RocksDB
begins another MANIFEST at each open, under a higher number, and syncs it before it counts.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import threading
import zlib
from pathlib import Path
from typing import Final

from services.queue.storage.store import StoreUnusableError

MARK_FILE = "PENSTOCK_SYNCED"

NOTE_FILE = "PENSTOCK_MANIFEST"

_MARK = struct.Struct("<QI")
"""The number and its CRC-32; 12 bytes within one sector, which a disk writes whole or not at all."""

_NOTE = struct.Struct("<QQII")
"""Number of a MANIFEST, bytes of it that are synced, their CRC-32, and the CRC-32 of these three."""

_CURRENT: Final = re.compile(r"MANIFEST-(\d+)\n")
"""What RocksDB writes into `CURRENT`."""

_READ_BYTES: Final = 1 << 20
"""Of a MANIFEST at once; most are smaller."""


class MarkError(Exception):
    """The mark is there and cannot be read; the text says why."""


def read_mark(directory: Path) -> int | None:
    """Return the number of the last write known to be synced, None if the directory has no mark yet.

    Raises MarkError if the file is damaged, StoreUnusableError if it cannot be read for another reason.
    """
    row = _row_of(directory / MARK_FILE)
    if not row:
        return None
    if len(row) != _MARK.size or row != _encode(_MARK.unpack(row)[0]):
        raise MarkError(f"{directory / MARK_FILE} is damaged")
    return int(_MARK.unpack(row)[0])


def lost_of_manifest(directory: Path) -> str:
    """Return in words what is wrong with the part of the MANIFEST that is known to be synced; empty if nothing is.

    Raises MarkError if the note of it is damaged, StoreUnusableError for what cannot be read for another reason.
    """
    row = _row_of(directory / NOTE_FILE)
    if not row:
        return ""
    number, size, crc, _ = _NOTE.unpack(row) if len(row) == _NOTE.size else (0, 0, 0, 0)
    if row != _encode_note(number, size, crc):
        raise MarkError(f"{directory / NOTE_FILE} is damaged")
    current = _current(directory)
    if current is None or current > number:
        return ""  # RocksDB says so of one that is not there; a new one may be there before it is noted
    name = f"MANIFEST-{current:06d}"
    if current < number:
        return f"CURRENT names {name}, and MANIFEST-{number:06d} had reached the disk"
    try:
        handle = os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return f"its {name} is gone"
    except OSError as error:
        raise _unread(directory / name, error) from None
    try:
        found = os.fstat(handle).st_size
        if found < size:
            return f"its {name} ends after {found} bytes, and {size} had reached the disk"
        is_same = _checksum(handle, 0, size, 0) == crc
    except OSError as unread:
        raise _unread(directory / name, unread) from None
    finally:
        os.close(handle)
    return "" if is_same else f"the first {size} bytes of its {name} are not those that had reached the disk"


def write_mark(directory: Path, number: int) -> None:
    """Note what is in a directory that is made whole; whoever makes it syncs it. Raises OSError."""
    (directory / MARK_FILE).write_bytes(_encode(number))
    note = _ManifestNote(directory)
    note.close()


class SyncedMark:
    """The marks of a store that is being written; `note` may be called from any thread."""

    def __init__(self, directory: Path, number: int) -> None:
        """Begin the marks of `directory` anew, synced, at `number`. Raises OSError."""
        self._number = number
        self._guard = threading.Lock()
        self._manifest = _ManifestNote(directory)
        try:
            self._file = _begun(directory / MARK_FILE, _encode(number))
        except OSError:
            self._manifest.close()
            raise

    def note(self, number: int) -> None:
        """Note that every write up to `number` is synced. Raises OSError; the marks are behind then, which is no
        harm."""
        with self._guard:
            if number > self._number:
                os.pwrite(self._file, _encode(number), 0)
                self._number = number
            self._manifest.note()

    def close(self) -> None:
        """Let go of the files."""
        os.close(self._file)
        self._manifest.close()


class _ManifestNote:
    """The note of the MANIFEST that `CURRENT` names; a directory without a store has none."""

    def __init__(self, directory: Path) -> None:
        """Begin the note anew, and make it say what there is. Raises OSError."""
        self._directory = directory
        self._file = self._manifest = -1
        self._number = self._size = self._crc = 0
        try:
            self._begin()
            self.note()
        except OSError:
            self.close()
            raise

    def _begin(self) -> None:
        """Turn to the MANIFEST that is the present one."""
        number = _current(self._directory)
        if number is None:
            return
        handle = os.open(self._directory / f"MANIFEST-{number:06d}", os.O_RDONLY | os.O_CLOEXEC)
        if self._manifest >= 0:
            os.close(self._manifest)
        self._manifest, self._number, self._size, self._crc = handle, number, 0, 0

    def note(self) -> None:
        """Note what has come to it since, once that is synced. Raises OSError."""
        if self._manifest < 0:
            return
        found = os.fstat(self._manifest)
        if found.st_nlink == 0:  # RocksDB deletes it when it has begun another one
            self._begin()
            found = os.fstat(self._manifest)
        size = found.st_size
        if size == self._size:
            return
        # RocksDB syncs it before it relies on it, but may be in the middle of that.
        os.fdatasync(self._manifest)
        crc = _checksum(self._manifest, self._size, size, self._crc)
        row = _encode_note(self._number, size, crc)
        if self._file < 0:
            self._file = _begun(self._directory / NOTE_FILE, row)
        else:
            os.pwrite(self._file, row, 0)
        self._size, self._crc = size, crc

    def close(self) -> None:
        """Let go of the files."""
        for handle in (self._file, self._manifest):
            if handle >= 0:
                os.close(handle)


def _row_of(path: Path) -> bytes:
    """Return what is in a mark, nothing if there is none. Raises MarkError and StoreUnusableError."""
    try:
        return path.read_bytes()  # empty if made right before a power cut: nothing was acknowledged before its sync
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise _unread(path, error) from None


def _unread(path: Path, error: OSError) -> Exception:
    """Return what to raise of a file that cannot be read: want of descriptors or of a right is no damage."""
    text = f"{path}: {error.strerror}"
    return MarkError(text) if error.errno == errno.EIO else StoreUnusableError(text)


def _current(directory: Path) -> int | None:
    """Return the number of the MANIFEST that is the present one; None if RocksDB has to say why it cannot be told."""
    try:
        found = _CURRENT.fullmatch((directory / "CURRENT").read_text("latin-1"))
    except OSError:
        return None
    return int(found.group(1)) if found else None


def _checksum(handle: int, start: int, end: int, crc: int) -> int:
    """Return the CRC-32 of a file up to `end`, `crc` being that of what is before `start`. Raises OSError."""
    while start < end:
        piece = os.pread(handle, min(_READ_BYTES, end - start), start)
        if not piece:
            raise OSError(errno.EIO, "the MANIFEST got shorter")
        crc = zlib.crc32(piece, crc)
        start += len(piece)
    return crc


def _encode(number: int) -> bytes:
    return _MARK.pack(number, zlib.crc32(number.to_bytes(8, "little")))


def _encode_note(number: int, size: int, crc: int) -> bytes:
    return _NOTE.pack(number, size, crc, zlib.crc32(b"%d %d %d" % (number, size, crc)))


def _begun(path: Path, row: bytes) -> int:
    """Return a mark that is open and says `row`, synced. Raises OSError.

    A file of its own takes the place of what was there. That may be another user's, who ran a command on the store,
    and RocksDB's own files ask for no more than the right to write the directory; and it may be linked into a copy of
    a stopped store, which must go on saying what is true of that copy.
    """
    made = path.with_name(f"{path.name}.new")
    made.unlink(missing_ok=True)
    handle = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(handle, row, 0)
        os.fsync(handle)
        made.rename(path)
        sync_directory(path.parent)
    except OSError:
        os.close(handle)
        raise
    return handle


def sync_directory(directory: Path) -> None:
    """Have the names in a directory on the disk; raises OSError."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
