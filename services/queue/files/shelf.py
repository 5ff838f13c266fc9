"""The one writer of files and records: many changes to a sync, each answered when it is on disk.

It stands beside the committer and not inside it: files have nothing to say to the machine that decides about requests,
and a commit of requests must not wait for megabytes of content. Both write to the same log, in families apart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias, TypeVar

from penstock.files.v1 import files_pb2 as pb
from penstock.limits import PART_BYTES
from services.clock import Clock
from services.queue.core.ages import NO_GAPS, Ages
from services.queue.core.records import FILES, PARTS, RECORDS
from services.queue.files import changes
from services.queue.files.changes import ChangeError, Draft, UnknownError
from services.queue.files.listing import Listing, before_damage
from services.queue.files.rows import (
    END,
    after_records,
    file_key,
    part_key,
    read_file,
    read_record,
    record_key,
    seen_file,
    seen_record,
)
from services.queue.storage.read_faults import ReadFaults
from services.queue.storage.store import Row, Store, StoreDamagedError, StoreError, durably
from services.rpc.waiters import SharedWindow

log = logging.getLogger(__name__)

MAX_COMMIT_BYTES = 4 * 1024 * 1024
"""Content in one sync: four parts. What is behind it in the log waits for so much at most."""

UNDER_WAY_BYTES = 2 * MAX_COMMIT_BYTES
"""Content of all tenants that is on its way to the disk: one sync's and the next one's. What is more waits for room,
where tenants take turns, so that one who sends without end keeps another's waiting for some syncs and no longer."""

SWEEP_ROWS = 256
"""Files looked at in one sweep: all of ten thousand within a minute, and never a pause."""

RECORDS_AT_ONCE = 16
"""The same of records, which are kept for weeks and have up to a MiB each."""

READ_THREADS = 2
"""Reads at once, as of results."""

T = TypeVar("T")
Change = Callable[[Draft], T]


class ShelfRefusedError(Exception):
    """No change can be made now. `full` tells a full disk, which time alone does not cure."""

    def __init__(self, text: str, full: bool = False) -> None:
        """Refuse with `text`, for the client."""
        super().__init__(text)
        self.full = full


Refusal: TypeAlias = Callable[[bool], ShelfRefusedError | None]
"""Why a change that takes room is refused now, or None; called with whether it brings content."""


class _Waiting(NamedTuple):
    change: Change[Any]
    size_bytes: int
    answer: asyncio.Future[Any]


class Shelf:
    """Owner of the families `files`, `parts` and `records`. All but the disk's work happens in one event loop."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        refusal: Refusal,
        faults: ReadFaults | None = None,
        ages: Ages = NO_GAPS,
    ) -> None:
        """Keep everything in `store`; `refusal` says what is refused now; `ages` what it is old by."""
        self._faults = faults or ReadFaults()
        self._store = store
        self._clock = clock
        self._ages = ages
        self._refusal = refusal
        self._waiting: list[_Waiting] = []
        self._content = SharedWindow(UNDER_WAY_BYTES)
        self._began_ns = 0
        """Since when the changes that are under way are being made; 0 if none are."""
        self._ready = asyncio.Event()
        self._stopping = False
        self._disk = ThreadPoolExecutor(1, "shelf")
        """One thread: changes are in order, and each sees those before it."""
        self._readers = ThreadPoolExecutor(READ_THREADS, "shelf-read")
        self._turns = asyncio.Semaphore(READ_THREADS)
        """Lists take turns, a job each: before any other read there is at most one job for each thread."""
        self._swept_files = b""
        self._swept_records = b""

    # ---- changes ----

    async def change(self, change: Change[T], tenant: str = "", size_bytes: int = 0, frees: bool = False) -> T:
        """Return what `change` answers, once it is durable.

        Raises ChangeError, ShelfRefusedError, and StoreError for what cannot be read.

        `size_bytes` is the content it brings, for which it waits its `tenant`'s turn; a change without any is made on
        a nearly full disk as well: a batch must be able to end. What `frees` space, and takes none, is made where the
        last room is kept for such too.
        """
        if size_bytes:
            await self._content.enter(tenant, size_bytes)
        try:
            if self._stopping:
                raise ShelfRefusedError("the queue service is stopping")
            if not frees and (refusal := self._refusal(size_bytes > 0)) is not None:
                raise refusal
        except ShelfRefusedError:
            self._content.leave(size_bytes)
            raise
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(change, size_bytes, answer))
        self._ready.set()
        return await answer

    async def run(self) -> None:
        """Make changes until `stop`; then make what is left and return."""
        while not (self._stopping and not self._waiting):
            await self._ready.wait()
            self._ready.clear()
            while self._waiting:
                self._began_ns = self._clock.now_ns()
                await self._commit(self._take())
                self._began_ns = 0
        self._disk.shutdown()
        self._readers.shutdown()

    def commit_age_s(self) -> float:
        """Return how long the changes under way have taken so far; 0 if none are. Any thread may ask."""
        began_ns = self._began_ns
        return (self._clock.now_ns() - began_ns) / 1e9 if began_ns else 0.0

    def stop(self) -> None:
        """Let `run` end after what is waiting."""
        self._stopping = True
        self._ready.set()

    def _take(self) -> list[_Waiting]:
        size_bytes = count = 0
        while count < len(self._waiting) and size_bytes < MAX_COMMIT_BYTES:
            size_bytes += self._waiting[count].size_bytes
            count += 1
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    async def _commit(self, taken: Sequence[_Waiting]) -> None:
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self._disk, self._write, taken)
        except StoreError as error:
            log.error("files and records cannot be written: %s", error)
            refusal = ShelfRefusedError(f"the queue's store cannot write: {error}")
            answers = [refusal] * len(taken)
        for waiting, answer in zip(taken, answers, strict=True):
            if waiting.answer.done():
                continue  # its caller has gone
            if isinstance(answer, ChangeError | StoreError | ShelfRefusedError):
                waiting.answer.set_exception(answer)
            else:
                waiting.answer.set_result(answer)
        # Now, and not when the answer comes: a caller that goes before leaves its content here.
        self._content.leave(sum(waiting.size_bytes for waiting in taken))

    def _write(self, taken: Sequence[_Waiting]) -> list[Any]:
        draft = Draft(self._store, self._clock.now_ns(), self._ages)
        answers: list[Any] = []
        for waiting in taken:
            try:
                answers.append(waiting.change(draft))
            except (ChangeError, StoreError) as error:
                # Also where a row cannot be read nothing has been changed: what a caller asks for is read first.
                if isinstance(error, StoreError):
                    self._faults.note(error)
                answers.append(error)
        if writes := draft.writes:
            self._store.write(writes)
        else:
            self._store.wait_durable()  # what was found is told
        return answers

    # ---- reads; all raise StoreError if the disk fails ----

    async def _read(self, work: Callable[[], T]) -> T:
        with self._faults.noted():
            return await asyncio.get_running_loop().run_in_executor(self._readers, durably, self._store, work)

    # `sees` is the only tenant whose files and records there are for the caller; None: everybody's.

    async def file(self, file_id: str, sees: str | None = None) -> pb.File | None:
        """Return a file, or None."""
        return await self._read(lambda: seen_file(self._store.get(FILES, file_key(file_id)), sees))

    async def content(self, file_id: str, offset: int, sees: str | None = None) -> bytes:
        """Return the content from `offset` to the end of its part, nothing at its end; raises UnknownError."""
        first = offset - offset % PART_BYTES

        def read() -> bytes:
            file = seen_file(self._store.get(FILES, file_key(file_id)), sees)
            part = None if file is None else self._store.get(PARTS, part_key(file_id, first))
            if part is not None:
                return part[offset - first :]
            if file is not None and (file.view or offset >= file.bytes):
                return b""
            # It may have been deleted between the two looks: its reader must not take that for its end.
            if file is None or self._store.get(FILES, file_key(file_id)) is None:
                raise UnknownError(f"file_id: {file_id!r} is unknown")
            raise StoreDamagedError(f"{file_id!r} has no part at {first} of {file.bytes} bytes")

        return await self._read(read)

    async def files(
        self, request: pb.ListFilesRequest, limit: int, sees: str | None = None
    ) -> tuple[list[pb.File], bool]:
        """Return a page of closed files, and whether there are more."""

        def wanted(_: bytes, row: bytes) -> pb.File | None:
            file = seen_file(row, sees)
            return file if file and not file.uploading and request.purpose in {"", file.purpose} else None

        after = file_key(request.after) if request.after else b""
        return await self._listed(Listing(self._store, FILES, (b"", b""), after, request.ascending, limit, wanted))

    async def record(self, kind: str, record_id: str, sees: str | None = None) -> pb.Record | None:
        """Return a record, or None."""
        return await self._read(lambda: seen_record(self._store.get(RECORDS, record_key(kind, record_id)), sees))

    async def records(
        self, request: pb.ListRecordsRequest, limit: int, sees: str | None = None
    ) -> tuple[list[pb.Record], bool]:
        """Return a page of records of one kind, and whether there are more; of a row that is none its name alone.

        Whose that is cannot be known: for a caller who sees one tenant only it raises StoreDamagedError.
        """
        bounds = (record_key(request.kind, ""), after_records(request.kind))
        after = record_key(request.kind, request.after) if request.after else b""

        def wanted(key: bytes, row: bytes) -> pb.Record | None:
            try:
                return seen_record(row, sees)
            except StoreDamagedError as error:
                if sees is not None:
                    raise
                name = key[len(bounds[0]) :].decode("ascii", "replace")
                self._faults.note(StoreDamagedError(f"{request.kind} {name}: {error}"))
                return pb.Record(kind=request.kind, record_id=name)

        return await self._listed(Listing(self._store, RECORDS, bounds, after, request.ascending, limit, wanted))

    async def _listed(self, listing: Listing[T]) -> tuple[list[T], bool]:
        """Return a page, and whether there is more behind it."""
        with self._faults.noted():
            complete = False
            while not complete:
                async with self._turns:
                    complete = await asyncio.get_running_loop().run_in_executor(self._readers, self._look, listing)
        return listing.found, listing.has_more

    def _look(self, listing: Listing[T]) -> bool:
        complete = True  # also if it raises, which is told too
        try:
            complete = listing.look()
        finally:
            if complete:
                self._store.wait_durable()
        return complete

    # ---- the sweep ----

    async def sweep(self) -> int:
        """Delete what is due among the next rows of `files` and `records`; return how many were deleted.

        Raises StoreError or ShelfRefusedError.
        """
        now_ns = self._clock.now_ns()
        files, self._swept_files = await self._to_sweep(FILES, self._swept_files)
        records, self._swept_records = await self._to_sweep(RECORDS, self._swept_records)
        due_files = [
            file.file_id for file in readable(read_file, files) if changes.file_is_due(file, self._ages, now_ns)
        ]
        due_records = [
            (record.kind, record.record_id)
            for record in readable(read_record, records)
            if changes.record_is_due(record, now_ns)
        ]
        if not due_files and not due_records:
            return 0
        return await self.change(lambda draft: changes.sweep(draft, due_files, due_records), frees=True)

    async def _to_sweep(self, family: str, start: bytes) -> tuple[list[Row], bytes]:
        """Return the next rows of a family, and where to go on after them; nothing if that is the beginning."""
        limit = rows_at_once(family)
        rows = None
        with suppress(StoreDamagedError):
            rows = await self._read(lambda: self._store.scan(family, start, b"", limit))
        if rows is None:
            return await asyncio.get_running_loop().run_in_executor(self._readers, self._around_damage, family, start)
        return rows, rows[-1][0] + END if len(rows) == limit else b""

    def _around_damage(self, family: str, start: bytes) -> tuple[list[Row], bytes]:
        """Return rows up to a damaged one, or where it is the next one those from the end back to it."""
        bounds = (start, b"")
        rows = before_damage(self._store.scan, family, bounds, rows_at_once(family))
        if rows:
            return rows, rows[-1][0] + END
        return before_damage(self._store.scan_back, family, bounds, rows_at_once(family)), b""


def rows_at_once(family: str) -> int:
    """Return how many rows of a family are read at once."""
    return RECORDS_AT_ONCE if family == RECORDS else SWEEP_ROWS


def readable(read: Callable[[bytes], T], rows: Iterable[Row]) -> Iterator[T]:
    """Yield what the rows say; one that is damaged is left to `verify-store`, and must not end the service."""
    for _, row in rows:
        try:
            yield read(row)
        except StoreDamagedError:
            continue
