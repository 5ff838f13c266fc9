"""Batches as records at the queue: put, found, and held by one gateway at a time."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from penstock.errors import NotFound
from penstock.files.v1 import files_pb2 as pb
from services.gateway.core.batch import MOST_LEASE_S, Batch, LineError, Status
from services.gateway.shelf import ConflictError, Shelf

log = logging.getLogger(__name__)

BATCHES = "batch"
OPEN = "open-batch"
"""Kinds of records: every batch, and the names of those that have not ended, with their input file as the value."""

FILE = "file-"
"""What names of files begin with."""

KEPT_S = 30 * 86_400
"""A batch that has ended is forgotten after thirty days, the longest its files can be kept."""


def new_batch_id() -> str:
    """Draw a name: names of batches sort by when they were drawn."""
    return f"batch_{time.time_ns():016x}{secrets.token_hex(8)}"


class DamagedError(ValueError):
    """A batch's record cannot be read: it is damaged, or a newer gateway's."""


class LeaseLostError(Exception):
    """Another gateway holds the batch, or it has ended: leave it."""


class ChangedError(Exception):
    """A client has cancelled the batch: look at it again."""


class BatchRecords:
    """Reads and writes batches."""

    def __init__(self, shelf: Shelf) -> None:
        """Keep them on `shelf`."""
        self._shelf = shelf

    async def add(self, batch: Batch) -> None:
        """Put a new batch, open."""
        marker = pb.Record(kind=OPEN, record_id=batch.batch_id, value=batch.input_file_id.encode())
        try:
            await self._shelf.put([_put(batch, 0), pb.PutRecord(record=marker)])
        except ConflictError:
            # Its name is its own: the answer to a first try was lost, and the call repeated.
            await self.get(batch.batch_id)

    async def get(self, batch_id: str) -> tuple[Batch, int]:
        """Return a batch and its revision; raises NotFound or DamagedError."""
        record = await self._shelf.record(BATCHES, batch_id)
        return _read(record), record.revision

    async def page(self, after: str, limit: int) -> tuple[list[Batch], bool]:
        """Return batches, the newest first, and whether there are more; of a damaged one that it is so."""
        records, more = await self._shelf.records(BATCHES, after, limit, ascending=False)
        return [_shown(record) for record in records], more

    async def open_ids(self) -> list[str]:
        """Return the name of every batch that has not ended and whose marker can be read; the others are logged.

        One of which only the name can be read could not be closed: it would be driven to its end again and again.
        """
        markers = await self._shelf.readable(OPEN)
        for marker in markers:
            if not marker.revision:
                log.error("%s rests: its marker of kind %s cannot be read", marker.record_id, OPEN)
        return [marker.record_id for marker in markers if marker.revision]

    async def users_of(self, file_id: str) -> list[str]:
        """Return the batches that have not ended and read this input. Raises UnreadableError where one is unknown."""
        return [one.record_id for one in await self._shelf.every(OPEN) if await self._input_of(one) == file_id]

    async def _input_of(self, marker: pb.Record) -> str:
        value = marker.value.decode(errors="replace")
        if value.isascii() and value.startswith(FILE):
            return value
        try:  # a damaged one; a batch that cannot be read either will never read its input
            return (await self.get(marker.record_id))[0].input_file_id
        except (NotFound, DamagedError):
            return ""

    async def put(self, batch: Batch, revision: int) -> int:
        """Put a batch that has this revision, closing it if it has ended; return the new one. Raises ConflictError."""
        if not batch.ended:
            return (await self._shelf.put([_put(batch, revision)]))[0]
        # Only ever deleted: whatever its revision is, it is 1.
        marker = pb.Record(kind=OPEN, record_id=batch.batch_id, revision=1)
        forget_ns = (int(time.time()) + KEPT_S) * 1_000_000_000
        puts = [_put(batch, revision, forget_ns), pb.PutRecord(record=marker, delete=True)]
        return (await self._shelf.put(puts))[0]

    async def change(self, batch_id: str, change: Callable[[Batch], Batch]) -> Batch:
        """Change a batch whoever holds it; return it. Raises NotFound, and what `change` raises.

        What `change` leaves as it is is not put: who drives the batch would have to look at it again.
        """
        while True:
            batch, revision = await self.get(batch_id)
            changed = change(batch)
            if changed is batch:
                return batch
            try:
                await self.put(changed, revision)
            except ConflictError:
                continue
            return changed


def damaged(batch_id: str) -> Batch:
    """Return what is shown of a batch whose record cannot be read."""
    error = LineError("damaged_record", "the batch's record cannot be read; its results are still at the queue")
    return Batch(batch_id, "", "", "", 0, 0, "", status=Status.FAILED, errors=[error])


def _read(record: pb.Record) -> Batch:
    try:
        return Batch.from_row(record.value)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(f"{record.record_id}: {error}") from error


def _shown(record: pb.Record) -> Batch:
    try:
        return _read(record)
    except DamagedError:
        return damaged(record.record_id)


def _put(batch: Batch, revision: int, expires_ns: int = 0) -> pb.PutRecord:
    record = pb.Record(kind=BATCHES, record_id=batch.batch_id, revision=revision, value=batch.to_row())
    record.expires_unix_ns = expires_ns
    return pb.PutRecord(record=record)


class Stillness:
    """Which leases are over by the time that has passed here, whatever the clock said that they were given by.

    A gateway whose clock was ahead leaves leases that last as long as it was. No lease is longer than MOST_LEASE_S and
    who holds one writes the record in every third of it: what was not written for so long, nobody holds.
    """

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """Know nothing yet."""
        self._monotonic_s = monotonic_s
        self._seen: dict[str, tuple[int, float]] = {}
        """The revision of each batch, and when it was first seen."""

    def over(self, batch_id: str, revision: int) -> bool:
        """Remember the revision that a batch has now; return whether it has had it for the longest lease."""
        now_s = self._monotonic_s()
        known, since_s = self._seen.get(batch_id, (revision, now_s))
        if known != revision:
            since_s = now_s
        self._seen[batch_id] = (revision, since_s)
        return now_s - since_s >= MOST_LEASE_S

    def forget_all_but(self, batch_ids: Collection[str]) -> None:
        """Forget the batches that have ended."""
        for batch_id in self._seen.keys() - set(batch_ids):
            del self._seen[batch_id]


class Held:
    """A batch that this gateway drives, for as long as it keeps renewing its lease."""

    def __init__(
        self,
        records: BatchRecords,
        batch: Batch,
        revision: int,
        owner: str,
        lease_s: float,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """Hold `batch`, which was taken with the lease it has; `now_s` is Unix time."""
        self.batch = batch
        self.now_s = now_s
        self._records = records
        self._revision = revision
        self._owner = owner
        self._lease_s = lease_s
        self._writing = asyncio.Lock()

    @classmethod
    async def take(
        cls,
        records: BatchRecords,
        batch_id: str,
        owner: str,
        lease_s: float,
        now_s: Callable[[], float] = time.time,
        over: Callable[[str, int], bool] = lambda _batch_id, _revision: False,
    ) -> Held | None:
        """Take a batch if nobody holds it, or if its lease is `over` whatever the lease says."""
        try:
            batch, revision = await records.get(batch_id)
        except NotFound:
            return None
        is_over = over(batch_id, revision)  # asked in any case: it remembers what it was asked
        if batch.ended or not (batch.free_for(owner, now_s()) or is_over):
            return None
        held = cls(records, batch, revision, owner, lease_s, now_s)
        try:
            await held.save(batch)
        except (LeaseLostError, ChangedError):
            return None
        return held

    @property
    def late(self) -> bool:
        """Whether the batch's time is over."""
        return self.now_s() >= self.batch.expires_at

    async def save(self, batch: Batch | None = None) -> None:
        """Put `batch`, or what was put last, and renew the lease. Raises LeaseLostError or ChangedError."""
        await self.change(lambda last: batch or last)

    async def change(self, made: Callable[[Batch], Batch]) -> None:
        """Put what is made of the batch that was put last; otherwise as `save`. For whoever is not alone."""
        async with self._writing:
            batch = made(self.batch)
            until_s = 0.0 if batch.ended else self.now_s() + self._lease_s
            leased = batch.leased("" if batch.ended else self._owner, until_s)
            try:
                self._revision = await self._records.put(leased, self._revision)
            except ConflictError:
                await self._look_again()
            self.batch = leased

    async def progress(self, **fields: Any) -> None:
        """Put how far the batch is; what else changes it meanwhile stays."""
        await self.change(lambda batch: replace(batch, progress=replace(batch.progress, **fields)))

    async def beat(self) -> None:
        """Renew the lease when a third of it has gone, or when the clock was set back: others look for its renewals."""
        if not self._lease_s * 2 / 3 <= self.batch.lease.until - self.now_s() <= self._lease_s:
            await self.save()

    async def found(self) -> Batch:
        """Return the batch as it is now, whoever holds it."""
        return (await self._records.get(self.batch.batch_id))[0]

    async def give_back(self) -> None:
        """End the lease, so that another gateway need not wait for it."""
        async with self._writing:
            if not self.batch.ended:
                await self._records.put(self.batch.leased("", 0.0), self._revision)

    async def _look_again(self) -> None:
        found, revision = await self._records.get(self.batch.batch_id)
        if found.lease.owner != self._owner:
            raise LeaseLostError
        self._revision = revision
        if found.status is self.batch.status:
            # What was put is our own: the answer was lost, and the call repeated.
            self.batch = found
        else:
            self.batch = replace(found, lease=self.batch.lease)
        raise ChangedError
