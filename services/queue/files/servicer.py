"""The gRPC face of the shelf: each method checks its input, and names what is wrong with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc

from penstock.errors import DISK_FULL, STORE_UNAVAILABLE
from penstock.files.v1 import files_pb2 as pb
from penstock.limits import PART_BYTES
from services.auth.caller import CALLER
from services.queue.files import changes
from services.queue.files.rows import NAME
from services.queue.files.shelf import Shelf, ShelfRefusedError
from services.queue.storage.read_faults import code_of
from services.queue.storage.store import StoreError
from services.rpc.strict import BadInputError, abort_with_code

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

MAX_TEXT_BYTES = 512
"""Of a file's own name and its purpose: they are in every list."""

MAX_VALUE_BYTES = 1024 * 1024
"""Of a record."""

MAX_PUTS = 100
"""Records in one change."""

PAGE_DEFAULT = 100
PAGE_MOST = 1000
"""Of a list, where no number is asked for, and at most: a page of files stays below 2 MiB."""

CODES: dict[type[changes.ChangeError], grpc.StatusCode] = {
    changes.UnknownError: grpc.StatusCode.NOT_FOUND,
    changes.TakenError: grpc.StatusCode.ALREADY_EXISTS,
    changes.ClosedError: grpc.StatusCode.FAILED_PRECONDITION,
    changes.SizeError: grpc.StatusCode.FAILED_PRECONDITION,
    changes.OffsetError: grpc.StatusCode.OUT_OF_RANGE,
    changes.ConflictError: grpc.StatusCode.ABORTED,
}


class FilesServicer:
    """Implements `penstock.files.v1.FilesService`."""

    def __init__(self, shelf: Shelf) -> None:
        """Serve what is on `shelf`."""
        self._shelf = shelf

    async def CreateFile(self, request: pb.CreateFileRequest, context: Context) -> pb.CreateFileResponse:
        """Begin a file."""
        check_name("file_id", request.file_id)
        if request.view:
            check_name("view", request.view)
        _check_described(request)
        caller = CALLER.get()
        async with _answered(context):
            change = self._shelf.change(lambda draft: changes.create(draft, request, caller.tenant, caller.sees))
            return pb.CreateFileResponse(file=await change)

    async def AppendFile(self, request: pb.AppendFileRequest, context: Context) -> pb.AppendFileResponse:
        """Add a part. Raises BadInputError."""
        check_name("file_id", request.file_id)
        size = len(request.data)
        if not 1 <= size <= PART_BYTES:
            raise BadInputError(f"data: {size} bytes; a part has 1 to {PART_BYTES}")
        if request.offset % PART_BYTES:
            raise BadInputError(f"offset: {request.offset} is not a multiple of {PART_BYTES}")
        caller = CALLER.get()
        async with _answered(context):
            change = self._shelf.change(lambda draft: changes.append(draft, request, caller.sees), caller.tenant, size)
            return pb.AppendFileResponse(bytes=await change)

    async def CloseFile(self, request: pb.CloseFileRequest, context: Context) -> pb.CloseFileResponse:
        """End an upload."""
        check_name("file_id", request.file_id)
        _check_described(request)
        sees = CALLER.get().sees
        async with _answered(context):
            return pb.CloseFileResponse(
                file=await self._shelf.change(lambda draft: changes.close(draft, request, sees))
            )

    async def GetFile(self, request: pb.GetFileRequest, context: Context) -> pb.GetFileResponse:
        """Describe a file. Raises UnknownError."""
        check_name("file_id", request.file_id)
        async with _answered(context):
            file = await self._shelf.file(request.file_id, CALLER.get().sees)
            if file is None:
                raise changes.UnknownError(f"file_id: {request.file_id!r} is unknown")
            return pb.GetFileResponse(file=file)

    async def ListFiles(self, request: pb.ListFilesRequest, context: Context) -> pb.ListFilesResponse:
        """Page through the closed files."""
        limit = _checked_page(request)
        _check_text("purpose", request.purpose)
        async with _answered(context):
            files, has_more = await self._shelf.files(request, limit, CALLER.get().sees)
            return pb.ListFilesResponse(files=files, has_more=has_more)

    async def DeleteFile(self, request: pb.DeleteFileRequest, context: Context) -> pb.DeleteFileResponse:
        """Delete a file."""
        check_name("file_id", request.file_id)
        sees = CALLER.get().sees
        async with _answered(context):
            change = self._shelf.change(lambda draft: changes.delete(draft, request.file_id, sees), frees=True)
            return pb.DeleteFileResponse(deleted=await change)

    async def ReadFile(self, request: pb.ReadFileRequest, context: Context) -> pb.ReadFileResponse:
        """Return content. Raises BadInputError."""
        check_name("file_id", request.file_id)
        if request.offset > changes.MAX_FILE_BYTES:
            raise BadInputError(f"offset: {request.offset} is beyond the largest file ({changes.MAX_FILE_BYTES} bytes)")
        async with _answered(context):
            return pb.ReadFileResponse(
                data=await self._shelf.content(request.file_id, request.offset, CALLER.get().sees)
            )

    async def PutRecords(self, request: pb.PutRecordsRequest, context: Context) -> pb.PutRecordsResponse:
        """Put records."""
        _check_puts(request)
        caller = CALLER.get()
        async with _answered(context):
            change = self._shelf.change(
                lambda draft: changes.put_records(draft, request.puts, caller.tenant, caller.sees),
                caller.tenant,
                changes.new_bytes(request.puts),
                frees=all(put.delete for put in request.puts),
            )
            return pb.PutRecordsResponse(revisions=await change)

    async def GetRecord(self, request: pb.GetRecordRequest, context: Context) -> pb.GetRecordResponse:
        """Return a record. Raises UnknownError."""
        check_name("kind", request.kind)
        check_name("record_id", request.record_id)
        async with _answered(context):
            record = await self._shelf.record(request.kind, request.record_id, CALLER.get().sees)
            if record is None:
                raise changes.UnknownError(f"record_id: {request.record_id!r} is unknown")
            return pb.GetRecordResponse(record=record)

    async def ListRecords(self, request: pb.ListRecordsRequest, context: Context) -> pb.ListRecordsResponse:
        """Page through records."""
        check_name("kind", request.kind)
        limit = _checked_page(request)
        async with _answered(context):
            records, has_more = await self._shelf.records(request, limit, CALLER.get().sees)
            return pb.ListRecordsResponse(records=records, has_more=has_more)


@asynccontextmanager
async def _answered(context: Context) -> AsyncIterator[None]:
    """Turn what the shelf raises into the call's status."""
    try:
        yield
    except changes.ChangeError as error:
        await context.abort(CODES[type(error)], str(error))
    except ShelfRefusedError as error:
        status = grpc.StatusCode.RESOURCE_EXHAUSTED if error.full else grpc.StatusCode.UNAVAILABLE
        await abort_with_code(context, status, str(error), DISK_FULL if error.full else STORE_UNAVAILABLE)
    except StoreError as error:
        await context.abort(code_of(error), f"the store cannot be read: {error}")


def check_name(param: str, name: str) -> None:
    """Raise BadInputError if `name` cannot name a file or a record."""
    if not NAME.fullmatch(name):
        raise BadInputError(f"{param}: {name[:100]!r} must be 1 to 100 letters, digits, dashes and underscores")


def _check_text(param: str, text: str) -> None:
    size = len(text.encode())
    if size > MAX_TEXT_BYTES:
        raise BadInputError(f"{param}: {size} bytes; at most {MAX_TEXT_BYTES} are allowed")


def _check_described(request: pb.CreateFileRequest | pb.CloseFileRequest) -> None:
    _check_text("filename", request.filename)
    _check_text("purpose", request.purpose)
    if not 0 <= request.expires_after_ns <= MAX_EXPIRY_NS:
        raise BadInputError(f"expires_after_ns: {request.expires_after_ns} is not within 0 and {MAX_EXPIRY_NS}")


MAX_EXPIRY_NS = 100 * 365 * 86_400 * 1_000_000_000
"""A hundred years: far below where Unix time in ns leaves 64 bits."""


def _checked_page(request: pb.ListFilesRequest | pb.ListRecordsRequest) -> int:
    """Return the size of the page."""
    if request.after:
        check_name("after", request.after)
    if request.limit > PAGE_MOST:
        raise BadInputError(f"limit: {request.limit} is more than {PAGE_MOST}")
    return request.limit or PAGE_DEFAULT


def _check_puts(request: pb.PutRecordsRequest) -> None:
    if not 1 <= len(request.puts) <= MAX_PUTS:
        raise BadInputError(f"puts: {len(request.puts)} given; 1 to {MAX_PUTS} are allowed")
    names = set()
    for place, put in enumerate(request.puts):
        record = put.record
        check_name(f"puts[{place}].record.kind", record.kind)
        check_name(f"puts[{place}].record.record_id", record.record_id)
        if len(record.value) > MAX_VALUE_BYTES:
            text = f"{len(record.value)} bytes; at most {MAX_VALUE_BYTES} are allowed"
            raise BadInputError(f"puts[{place}].record.value: {text}")
        if record.expires_unix_ns < 0:
            raise BadInputError(f"puts[{place}].record.expires_unix_ns: {record.expires_unix_ns} is negative")
        names.add((record.kind, record.record_id))
    if len(names) < len(request.puts):
        raise BadInputError("puts: a record is named twice")
