"""What a gateway keeps at the queue: files and records, through the queue's FilesService."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import grpc

from penstock.connection import Connection
from penstock.errors import PenstockError, ServiceError
from penstock.files.v1 import files_pb2 as pb
from penstock.files.v1.files_pb2_grpc import FilesServiceStub
from penstock.tls import Access, TlsFiles

if TYPE_CHECKING:
    from penstock.files.v1.files_pb2_grpc import FilesServiceAsyncStub

log = logging.getLogger(__name__)

PAGE = 1000
"""Most the queue lists at once."""

T = TypeVar("T")


class ConflictError(PenstockError):
    """A record was changed by somebody else: read it again."""


class UnreadableError(ServiceError):
    """What is asked for is damaged at the queue: asking again does not help."""


class Shelf:
    """Calls are repeated while the queue is away, as long as its patience lasts; then they raise Unavailable.

    Every method raises NotFound for what is unknown, InvalidRequest for what the queue refuses, and UnreadableError for
    what is damaged there.
    """

    def __init__(self, address: str, retry_for_s: float, access: Access | None = None) -> None:
        """Talk to the queue at "HOST:PORT", on a connection of its own: content must not delay tokens.

        Without `access` TLS and key are the environment's.
        """
        access = access or Access(TlsFiles.from_environment())
        self._connection = Connection(address, retry_for_s, access.tls, access.credentials)
        self._stub: FilesServiceAsyncStub = FilesServiceStub(self._connection.channel)

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()

    async def _call(self, method: Callable[[], Awaitable[T]]) -> T:
        async def call() -> T:
            try:
                return await method()
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.ABORTED:
                    raise ConflictError(error.details() or "") from None
                if error.code() is grpc.StatusCode.DATA_LOSS:
                    raise UnreadableError(error.details() or "") from None
                raise

        return await self._connection.call(call)

    # ---- files ----

    async def begin(self, file_id: str) -> None:
        """Begin an upload."""
        request = pb.CreateFileRequest(file_id=file_id)
        await self._call(lambda: self._stub.CreateFile(request))

    async def append(self, file_id: str, offset: int, data: bytes) -> None:
        """Add a part at `offset`, the size so far."""
        request = pb.AppendFileRequest(file_id=file_id, offset=offset, data=data)
        await self._call(lambda: self._stub.AppendFile(request))

    async def end(self, request: pb.CloseFileRequest) -> pb.File:
        """End an upload; return the file."""
        return (await self._call(lambda: self._stub.CloseFile(request))).file

    async def put_view(self, request: pb.CreateFileRequest) -> None:
        """Put a file that is a view of something; one that is there stays."""
        await self._call(lambda: self._stub.CreateFile(request))

    async def file(self, file_id: str) -> pb.File:
        """Return a file, uploading or not."""
        request = pb.GetFileRequest(file_id=file_id)
        return (await self._call(lambda: self._stub.GetFile(request))).file

    async def files(self, after: str, limit: int, ascending: bool, purpose: str) -> tuple[list[pb.File], bool]:
        """Return at most `limit` closed files after the one named, and whether there are more."""
        request = pb.ListFilesRequest(after=after, limit=limit, ascending=ascending, purpose=purpose)
        page = await self._call(lambda: self._stub.ListFiles(request))
        return list(page.files), page.has_more

    async def delete(self, file_id: str) -> bool:
        """Delete a file; return whether there was one."""
        request = pb.DeleteFileRequest(file_id=file_id)
        return (await self._call(lambda: self._stub.DeleteFile(request))).deleted

    async def content(self, file_id: str, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """Yield the content from `offset`, a part at a time."""
        while True:
            request = pb.ReadFileRequest(file_id=file_id, offset=offset)
            response = await self._call(lambda request=request: self._stub.ReadFile(request))  # type: ignore[misc]
            if not response.data:
                return
            offset += len(response.data)
            yield response.data

    # ---- records ----

    async def put(self, puts: Sequence[pb.PutRecord]) -> list[int]:
        """Put records, all or none; return their revisions. Raises ConflictError."""
        request = pb.PutRecordsRequest(puts=puts)
        return list((await self._call(lambda: self._stub.PutRecords(request))).revisions)

    async def record(self, kind: str, record_id: str) -> pb.Record:
        """Return a record."""
        request = pb.GetRecordRequest(kind=kind, record_id=record_id)
        return (await self._call(lambda: self._stub.GetRecord(request))).record

    async def records(self, kind: str, after: str, limit: int, ascending: bool) -> tuple[list[pb.Record], bool]:
        """Return at most `limit` records after the one named, and whether there are more."""
        request = pb.ListRecordsRequest(kind=kind, after=after, limit=limit, ascending=ascending)
        page = await self._call(lambda: self._stub.ListRecords(request))
        return list(page.records), page.has_more

    async def every(self, kind: str) -> list[pb.Record]:
        """Return all records of a kind of which there are few. Raises UnreadableError if one cannot be read."""
        found: list[pb.Record] = []
        await self._page_into(found, kind, ascending=True)
        return found

    async def readable(self, kind: str) -> list[pb.Record]:
        """Return the records of a kind, from both ends up to what fails its checksum, which is logged."""
        found: list[pb.Record] = []
        try:
            await self._page_into(found, kind, ascending=True)
        except UnreadableError as error:
            behind: list[pb.Record] = []
            with suppress(UnreadableError):
                await self._page_into(behind, kind, ascending=False)
            before = found[-1].record_id if found else "the beginning"
            after = behind[-1].record_id if behind else "the end"
            log.error("records of kind %s cannot be read between %s and %s: %s", kind, before, after, error)
            known = {record.record_id for record in found}
            found += [record for record in reversed(behind) if record.record_id not in known]
        return found

    async def _page_into(self, found: list[pb.Record], kind: str, ascending: bool) -> None:
        """Add page after page to `found`, so that what was read stays when the next one cannot be."""
        more = True
        while more:
            page, more = await self.records(kind, found[-1].record_id if found else "", PAGE, ascending)
            found += page
