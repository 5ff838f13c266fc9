"""Keys and rows of the families `files`, `parts` and `records`.

Rows are the API's messages, encoded: fields are added to these, never renumbered, so that old rows stay readable.
"""

from __future__ import annotations

import re
import struct

from google.protobuf.message import DecodeError

from penstock.files.v1 import files_pb2
from penstock.limits import PART_BYTES
from services.queue.core.entry import DEFAULT_TENANT
from services.queue.storage.store import StoreDamagedError

NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
"""Names of files and records and kinds of records; no byte of one sorts before the ends below."""

END = b"\0"
"""Ends a name in a key: the names that begin with another's sort after all rows of that one."""

_OFFSET = struct.Struct(">Q")


def file_key(file_id: str) -> bytes:
    """Return the key in `files`."""
    return file_id.encode()


def part_key(file_id: str, offset: int) -> bytes:
    """Return the key in `parts` of the part that begins at `offset`."""
    return file_id.encode() + END + _OFFSET.pack(offset)


def part_of(key: bytes) -> tuple[str, int]:
    """Return (file_id, offset) of a key in `parts`; raises ValueError if it is not one."""
    size = _OFFSET.size
    if len(key) <= size + 1 or key[-size - 1 : -size] != END:
        raise ValueError(f"a key of {len(key)} bytes")
    return key[: -size - 1].decode("ascii"), int.from_bytes(key[-size:], "big")


def part_offsets(size_bytes: int) -> range:
    """Return where the parts of a content of this size begin."""
    return range(0, size_bytes, PART_BYTES)


def record_key(kind: str, record_id: str) -> bytes:
    """Return the key in `records`."""
    return kind.encode() + END + record_id.encode()


def after_records(kind: str) -> bytes:
    """Return a key after those of all records of a kind and before any other's."""
    return kind.encode() + b"\1"


def read_file(row: bytes) -> files_pb2.File:
    """Read a row of `files`; raises StoreDamagedError if it is not one."""
    try:
        file = files_pb2.File.FromString(row)
    except DecodeError as error:
        raise StoreDamagedError(f"a row of files is none: {error}") from error
    # A file that was put before there were tenants.
    file.tenant = file.tenant or DEFAULT_TENANT
    return file


def read_record(row: bytes) -> files_pb2.Record:
    """Read a row of `records`; raises StoreDamagedError if it is not one."""
    try:
        record = files_pb2.Record.FromString(row)
    except DecodeError as error:
        raise StoreDamagedError(f"a row of records is none: {error}") from error
    record.tenant = record.tenant or DEFAULT_TENANT  # as above
    return record


def seen_file(row: bytes | None, sees: str | None) -> files_pb2.File | None:
    """Return the file in a row, or None if there is none for a caller that `sees` one tenant only (None: all)."""
    file = None if row is None else read_file(row)
    return file if file is None or sees in {None, file.tenant} else None


def seen_record(row: bytes | None, sees: str | None) -> files_pb2.Record | None:
    """Return the record in a row, or None; as `seen_file`."""
    record = None if row is None else read_record(row)
    return record if record is None or sees in {None, record.tenant} else None
