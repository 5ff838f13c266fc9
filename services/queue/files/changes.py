"""Every change of files and records, as functions of what the store holds.

Each checks first and writes then: one that raises has changed nothing. They run on the shelf's thread, one after the
other, and see what those before them wrote although it is not on disk yet.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.files.v1 import files_pb2 as pb
from penstock.limits import PART_BYTES
from services.queue.core.ages import NO_GAPS, Ages
from services.queue.core.effects import Write
from services.queue.core.entry import DEFAULT_TENANT
from services.queue.core.records import FILES, PARTS, RECORDS
from services.queue.files.rows import (
    file_key,
    part_key,
    part_offsets,
    read_file,
    read_record,
    record_key,
    seen_file,
    seen_record,
)
from services.queue.storage.store import Store

MAX_FILE_BYTES = 4 * 1024 * 1024 * 1024
"""Largest file: 4,096 parts, which one commit can delete."""

ABANDONED_NS = 3600 * 1_000_000_000
"""An upload to which nothing has been added for an hour is deleted: no client that is still there pauses so long."""


class ChangeError(Exception):
    """The change cannot be made; the text says why."""


class UnknownError(ChangeError):
    """There is no such file."""


class TakenError(ChangeError):
    """The name belongs to something else."""


class ClosedError(ChangeError):
    """The file takes no content (any more)."""


class OffsetError(ChangeError):
    """The part does not belong there."""


class SizeError(ChangeError):
    """The file has another size."""


class ConflictError(ChangeError):
    """A record does not have the expected revision."""


class Draft:
    """The store as it will be: what it holds, and over it what is to be written."""

    def __init__(self, store: Store, now_ns: int, ages: Ages = NO_GAPS) -> None:
        """Begin with what is durable."""
        self.now_ns = now_ns
        self.ages = ages
        self._store = store
        self._rows: dict[tuple[str, bytes], bytes | None] = {}

    @property
    def writes(self) -> list[Write]:
        """All that is to be written."""
        return [Write(family, key, value) for (family, key), value in self._rows.items()]

    def get(self, family: str, key: bytes) -> bytes | None:
        """Return the row of `key`, or None."""
        place = (family, key)
        return self._rows[place] if place in self._rows else self._store.get(family, key)

    def put(self, family: str, key: bytes, value: bytes | None) -> None:
        """Put a row, or delete it if `value` is None."""
        self._rows[family, key] = value

    def file(self, file_id: str, sees: str | None) -> pb.File:
        """Return a file; raises UnknownError if there is none for a caller that `sees` one tenant only (None: all)."""
        file = seen_file(self.get(FILES, file_key(file_id)), sees)
        if file is None:
            raise UnknownError(f"file_id: {file_id!r} is unknown")
        return file

    def put_file(self, file: pb.File) -> None:
        """Put a file."""
        self.put(FILES, file_key(file.file_id), file.SerializeToString())


def create(
    draft: Draft, request: pb.CreateFileRequest, tenant: str = DEFAULT_TENANT, sees: str | None = None
) -> pb.File:
    """Begin a file of `tenant`; one that was begun in the same way stays, a view with the size it is put with last.

    Raises UnknownError if the name is that of a file that the caller does not see: of another tenant's file it is told
    here what it is told everywhere, and not what state that file is in.
    """
    if draft.get(FILES, file_key(request.file_id)) is not None:
        found = draft.file(request.file_id, sees)
        same = (found.tenant, found.view) == (tenant, request.view)
        begun = same and (request.view != "" or (found.uploading and not found.bytes))
        if not begun:
            raise TakenError(f"file_id: there is a file {request.file_id!r} already")
        if request.view and found.bytes != request.bytes:
            # Its batch ended in another way after all: what is known last of its content counts.
            found.bytes = request.bytes
            draft.put_file(found)
        return found
    file = pb.File(file_id=request.file_id, created_unix_ns=draft.now_ns, touched_unix_ns=draft.now_ns)
    file.tenant = tenant
    if request.view:
        file.view, file.filename, file.purpose = request.view, request.filename, request.purpose
        file.bytes = request.bytes
        file.expires_unix_ns = _expires(file, request.expires_after_ns)
    else:
        file.uploading = True
    draft.put_file(file)
    return file


def append(draft: Draft, request: pb.AppendFileRequest, sees: str | None = None) -> int:
    """Add a part at the end, unless it is there; return the file's size. Raises ClosedError and OffsetError."""
    file = draft.file(request.file_id, sees)
    size = len(request.data)
    if not file.uploading:
        raise ClosedError(f"file_id: {request.file_id!r} is closed")
    key = part_key(request.file_id, request.offset)
    if request.offset + size == file.bytes and draft.get(PARTS, key) == request.data:
        return file.bytes
    if file.bytes % PART_BYTES:
        raise OffsetError(f"offset: {request.file_id!r} ends at {file.bytes}, with a part that is not full")
    if request.offset != file.bytes:
        raise OffsetError(
            f"offset: {request.file_id!r} has {file.bytes} bytes; a part cannot begin at {request.offset}"
        )
    if file.bytes + size > MAX_FILE_BYTES:
        raise OffsetError(f"data: a file has at most {MAX_FILE_BYTES} bytes")
    file.bytes += size
    file.touched_unix_ns = draft.now_ns
    draft.put(PARTS, key, request.data)
    draft.put_file(file)
    return file.bytes


def close(draft: Draft, request: pb.CloseFileRequest, sees: str | None = None) -> pb.File:
    """End an upload; one that has ended is returned as it is."""
    file = draft.file(request.file_id, sees)
    if file.bytes != request.bytes or file.view:
        raise SizeError(f"bytes: {request.file_id!r} has {file.bytes} bytes, not {request.bytes}")
    if not file.uploading:
        return file
    file.uploading = False
    file.filename, file.purpose = request.filename, request.purpose
    file.expires_unix_ns = _expires(file, request.expires_after_ns)
    draft.put_file(file)
    return file


def _expires(file: pb.File, after_ns: int) -> int:
    return file.created_unix_ns + after_ns if after_ns else 0


def delete(draft: Draft, file_id: str, sees: str | None = None) -> bool:
    """Delete a file with its parts; return whether there was one."""
    file = seen_file(draft.get(FILES, file_key(file_id)), sees)
    if file is None:
        return False
    if not file.view:
        for offset in part_offsets(file.bytes):
            draft.put(PARTS, part_key(file_id, offset), None)
    draft.put(FILES, file_key(file_id), None)
    return True


def put_records(
    draft: Draft, puts: Sequence[pb.PutRecord], tenant: str = DEFAULT_TENANT, sees: str | None = None
) -> list[int]:
    """Put records if every one has the expected revision; return the new revisions.

    New ones are `tenant`'s, the others stay whose they are. Raises UnknownError for one that the caller does not see.
    """
    owners = [_checked_owner(draft, put, tenant, sees) for put in puts]
    revisions = []
    for put, owner in zip(puts, owners, strict=True):
        key = record_key(put.record.kind, put.record.record_id)
        revision = 0 if put.delete else put.record.revision + 1
        if put.delete:
            draft.put(RECORDS, key, None)
        else:
            record = pb.Record()
            record.CopyFrom(put.record)
            record.revision, record.tenant = revision, owner
            draft.put(RECORDS, key, record.SerializeToString())
        revisions.append(revision)
    return revisions


def new_bytes(puts: Sequence[pb.PutRecord]) -> int:
    """Return the bytes that new records bring. Those that are there may change however full the disk is, to end."""
    return sum(len(put.record.value) for put in puts if not put.delete and not put.record.revision)


def _checked_owner(draft: Draft, put: pb.PutRecord, tenant: str, sees: str | None) -> str:
    """Return whose a record is; raises ChangeError if it cannot be changed."""
    row = draft.get(RECORDS, record_key(put.record.kind, put.record.record_id))
    record = seen_record(row, sees)
    if row is not None and record is None:
        raise UnknownError(f"record_id: {put.record.record_id!r} is unknown")
    found = 0 if record is None else record.revision
    if found != put.record.revision and not (put.delete and not found):
        name = f"{put.record.kind}/{put.record.record_id}"
        raise ConflictError(f"revision: {name} has revision {found}, not {put.record.revision}")
    return tenant if record is None else record.tenant


def sweep(draft: Draft, file_ids: Sequence[str], records: Sequence[tuple[str, str]]) -> int:
    """Delete those that are (still) due; return how many."""
    deleted = 0
    for file_id in file_ids:
        row = draft.get(FILES, file_key(file_id))
        if row is not None and file_is_due(read_file(row), draft.ages, draft.now_ns):
            deleted += delete(draft, file_id)
    for kind, record_id in records:
        key = record_key(kind, record_id)
        row = draft.get(RECORDS, key)
        if row is not None and record_is_due(read_record(row), draft.now_ns):
            draft.put(RECORDS, key, None)
            deleted += 1
    return deleted


def file_is_due(file: pb.File, ages: Ages, now_ns: int) -> bool:
    """Whether a file is to be deleted: expired, or an upload its client has left."""
    if file.uploading:
        return file.touched_unix_ns <= ages.ago(now_ns, ABANDONED_NS)
    kept_ns = file.expires_unix_ns - file.created_unix_ns
    return file.expires_unix_ns > 0 and file.created_unix_ns <= ages.ago(now_ns, kept_ns)


def record_is_due(record: pb.Record, now_ns: int) -> bool:
    """Whether a record is to be deleted; when, its client has said by the clock."""
    return 0 < record.expires_unix_ns <= now_ns
