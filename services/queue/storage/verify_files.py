"""Checks every invariant of the families `files`, `parts` and `records` of a store that nobody uses. It only reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.files.v1 import files_pb2
from penstock.limits import PART_BYTES
from services.queue.core.records import FILES, PARTS, RECORDS
from services.queue.files.rows import (
    NAME,
    file_key,
    part_key,
    part_of,
    part_offsets,
    read_file,
    read_record,
    record_key,
)
from services.queue.storage.store import Row, Store, StoreDamagedError

Finding = tuple[str, bytes, str]
"""Family, key and text of a violation."""


class FileVerifier:
    """Looks at pages of rows; of a file it knows the parts by their keys, so that content is read once."""

    def __init__(self, store: Store) -> None:
        """Read `store`."""
        self._store = store

    def files(self, page: Sequence[Row]) -> Iterator[Finding]:
        """Readable, under its own name; with all parts up to its size, unless it is a view."""
        for key, row in page:
            file = _file(row)
            if file is None or file_key(file.file_id) != key or not NAME.fullmatch(file.file_id):
                yield FILES, key, "cannot be read"
            elif file.view:
                if file.uploading or not NAME.fullmatch(file.view):
                    yield FILES, key, f"is a view of {file.view!r} that cannot be"
            else:
                missing = [at for at in part_offsets(file.bytes) if not self._has_part(file, at)]
                if missing:
                    yield FILES, key, f"has no part at {missing[0]} of {file.bytes} bytes"

    def _has_part(self, file: files_pb2.File, offset: int) -> bool:
        key = part_key(file.file_id, offset)
        return self._store.get(PARTS, key) is not None

    def parts(self, page: Sequence[Row]) -> Iterator[Finding]:
        """Of a file, at a place where one begins, and as long as the file says."""
        for key, row in page:
            try:
                file_id, offset = part_of(key)
            except ValueError:
                yield PARTS, key, "cannot be read"
                continue
            found = self._store.get(FILES, file_key(file_id))
            file = None if found is None else _file(found)
            if file is None or file.view:
                yield PARTS, key, f"there is no file {file_id!r} with content"
                continue
            wanted = max(0, min(PART_BYTES, file.bytes - offset))
            if offset % PART_BYTES or len(row) != wanted or not wanted:
                yield PARTS, key, f"{len(row)} bytes at {offset} of a file of {file.bytes}"

    def records(self, page: Sequence[Row]) -> Iterator[Finding]:
        """Readable, under its own name, and put at least once."""
        for key, row in page:
            record = _record(row)
            if record is None or record_key(record.kind, record.record_id) != key:
                yield RECORDS, key, "cannot be read"
            elif not record.revision:
                yield RECORDS, key, "has revision 0"


def _file(row: bytes) -> files_pb2.File | None:
    try:
        return read_file(row)
    except StoreDamagedError:
        return None


def _record(row: bytes) -> files_pb2.Record | None:
    try:
        return read_record(row)
    except StoreDamagedError:
        return None
