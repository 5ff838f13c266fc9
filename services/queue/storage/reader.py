"""Reads of the store that change nothing, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

from penstock.limits import TARGET_FRAME_BYTES
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2
from services.queue import wire
from services.queue.core import records
from services.queue.core.entry import NO_SEQ, BatchKey, Entry, request_id_of
from services.queue.core.messages import EndedRow
from services.queue.storage.read_faults import ReadFaults, decoded
from services.queue.storage.store import Store, StoreDamagedError, durably

READ_THREADS = 2
"""Reads at once: enough that one slow page does not hold up the rest."""

LOOK_RESULTS = 8
"""Results looked at in one job, of which no more is kept than a number: at most 96 MiB of the largest there can be."""

MOST_CHUNK = 64
"""Results read between two looks at their size, if they are small."""

MOST_ROWS = 256
"""Results read in one job, if they are small: about a millisecond."""

PAGE_BYTES = TARGET_FRAME_BYTES
"""A page ends once it holds this much: what a watcher that does not take it keeps in memory is a frame."""

LAST = (1 << 64) - 1
"""Largest completion_seq a key can hold."""

T = TypeVar("T")


class LogRow(NamedTuple):
    """One entry of a batch's completion log."""

    completion_seq: int
    seq: int


class Heads(NamedTuple):
    """What deleting needs of some results."""

    rows: list[EndedRow]
    damaged: int
    """Of those asked for, how many cannot be read, and so not be deleted."""
    damage: str
    """What is wrong with one of them."""


class Page(NamedTuple):
    """Some results of a batch."""

    results: list[wire.StoredResult]
    cursor: int
    """After the log entries that were read."""
    last: bool
    """Whether the log had no more entries when it was read."""


class Reader:
    """Reads for Watch, Get and the dead letters. Every method raises StoreError if the store fails."""

    def __init__(self, store: Store, store_id: str, faults: ReadFaults | None = None) -> None:
        """Read from `store`."""
        self._faults = faults or ReadFaults()
        self._store = store
        self._store_id = store_id
        self._threads = ThreadPoolExecutor(READ_THREADS, "read")

    def close(self) -> None:
        """Wait for reads to end."""
        self._threads.shutdown()

    async def _off_loop(self, work: Callable[[], T]) -> T:
        with self._faults.noted():
            return await asyncio.get_running_loop().run_in_executor(self._threads, durably, self._store, work)

    async def result(self, seq: int, sees: str | None = None) -> wire.StoredResult | None:
        """Return the result of one request, or None; for a caller that `sees` one tenant only, None of others' too."""
        return await self._off_loop(lambda: self._result(seq, sees))

    def _result(self, seq: int, sees: str | None) -> wire.StoredResult | None:
        row = self._store.get(records.RESULTS, records.seq_key(seq)) if seq >= 0 else None
        return None if row is None or not _seen(row, sees) else decoded(wire.read_result, row)

    async def results(self, seqs: Sequence[int]) -> dict[int, wire.StoredResult]:
        """Return the results there are of these requests; for a few of them."""
        return await self._off_loop(lambda: self._results(seqs))

    async def in_order(self, seqs: Sequence[int], sees: str | None = None) -> list[int]:
        """Return those of these requests that have a result which the caller sees, in order of completion."""
        found: list[tuple[int, int]] = []
        for first in range(0, len(seqs), LOOK_RESULTS):
            found += await self._off_loop(partial(self._cursors, seqs[first : first + LOOK_RESULTS], sees))
        return [seq for _, seq in sorted(found)]

    def _cursors(self, seqs: Sequence[int], sees: str | None) -> list[tuple[int, int]]:
        rows = self._store.get_many(records.RESULTS, [records.seq_key(seq) for seq in seqs])
        pairs = zip(rows, seqs, strict=True)
        seen = [(row, seq) for row, seq in pairs if row is not None and _seen(row, sees)]
        return [(decoded(records.split_result, row)[0], seq) for row, seq in seen]

    async def cancelled(self, seqs: Sequence[int], sees: str | None = None) -> set[int]:
        """Return those of these requests that have ended as cancelled, and whose result the caller sees."""
        found: set[int] = set()
        for first in range(0, len(seqs), LOOK_RESULTS):
            found |= await self._off_loop(partial(self._cancelled, seqs[first : first + LOOK_RESULTS], sees))
        return found

    def _cancelled(self, seqs: Sequence[int], sees: str | None) -> set[int]:
        results = [(seq, self._result(seq, sees)) for seq in seqs]
        return {seq for seq, found in results if found and found.result().outcome == request_pb2.OUTCOME_CANCELLED}

    async def heads(self, seqs: Sequence[int]) -> Heads:
        """Return what deleting needs of the results there are of these requests, but of those that are damaged.

        Their bodies are read with them, and let go of: whoever asks pays for their size, and not who commits meanwhile.
        """
        found: list[EndedRow] = []
        first = damaged = 0
        damage = ""
        while first < len(seqs):
            rows, count, fault = await self._off_loop(partial(self._heads, seqs[first:]))
            found += rows
            first += count
            damaged += bool(fault)
            damage = fault or damage
        return Heads(found, damaged, damage)

    def _heads(self, seqs: Sequence[int]) -> tuple[list[EndedRow], int, str]:
        """Return the heads of the first of these results, up to PAGE_BYTES, and of how many requests they are.

        They end before one that is damaged. If that is the first: of it alone none, and what is wrong with it.
        """
        found: list[EndedRow] = []
        size_bytes = count = 0
        try:
            for row in self._rows(seqs, LOOK_RESULTS):
                if row is not None:
                    found.append(EndedRow(seqs[count], *decoded(records.decode_head, row)))
                    size_bytes += len(row)
                count += 1
                if size_bytes >= PAGE_BYTES:
                    break
        except StoreDamagedError as error:
            if not count:  # read by itself, as the first of a job is
                self._faults.note(error)
                return found, 1, str(error)
        return found, count, ""

    async def in_chunks(self, seqs: Sequence[int]) -> AsyncIterator[dict[int, wire.StoredResult]]:
        """Yield the results there are of these requests, in the given order, as many at once as are small together."""
        first = 0
        while first < len(seqs):
            results, count = await self._off_loop(partial(self._chunk, seqs[first : first + MOST_CHUNK]))
            yield results
            first += count

    def _chunk(self, seqs: Sequence[int]) -> tuple[dict[int, wire.StoredResult], int]:
        """Return the results of the first of these requests, up to PAGE_BYTES, and of how many requests they are."""
        found: dict[int, wire.StoredResult] = {}
        size_bytes = count = 0
        for result in self._each(seqs):
            count += 1
            if result is not None:
                found[seqs[count - 1]] = result
                size_bytes += len(result.body)
            if size_bytes >= PAGE_BYTES:
                break
        return found, count

    def _each(self, seqs: Sequence[int]) -> Iterator[wire.StoredResult | None]:
        """Yield the result of each of these requests, or None; of large ones few are read ahead of what is taken."""
        for row in self._rows(seqs, MOST_CHUNK):
            yield None if row is None else decoded(wire.read_result, row)

    def _rows(self, seqs: Sequence[int], most: int) -> Iterator[bytes | None]:
        """Yield the row of each result, or None, at most `most` of them read at once."""
        first, count = 0, 1
        while first < len(seqs):
            rows = self._store.get_many(records.RESULTS, [records.seq_key(seq) for seq in seqs[first : first + count]])
            yield from rows
            first += count
            largest = max((len(row) for row in rows if row is not None), default=1)
            count = max(1, min(most, PAGE_BYTES // max(largest, 1)))

    def _results(self, seqs: Sequence[int]) -> dict[int, wire.StoredResult]:
        rows = self._store.get_many(records.RESULTS, [records.seq_key(seq) for seq in seqs])
        pairs = zip(seqs, rows, strict=True)
        return {seq: decoded(wire.read_result, row) for seq, row in pairs if row is not None}

    async def page(self, batch: BatchKey, cursor: int, limit: int) -> Page:
        """Return results of a batch after `cursor`.

        At most `limit` log entries are read, fewer if the results are large; results deleted meanwhile are left out.
        """
        return await self._off_loop(lambda: self._page(batch, cursor, limit))

    def _page(self, batch: BatchKey, cursor: int, limit: int) -> Page:
        log = self._log(batch, cursor, limit)
        found: list[wire.StoredResult] = []
        after = cursor
        size_bytes = 0
        for row, result in zip(log, self._each([row.seq for row in log]), strict=True):
            # A dead letter that was revived and ended again has a later place in the log.
            if result is not None and after < result.cursor <= row.completion_seq:
                found.append(result)
                size_bytes += len(result.body)
            after = row.completion_seq
            if size_bytes >= PAGE_BYTES:
                break
        at_end = not log or after == log[-1].completion_seq
        return Page(found, after, at_end and len(log) < limit)

    async def log(self, batch: BatchKey, cursor: int, limit: int, last: int) -> list[LogRow]:
        """Return at most `limit` entries of a batch's completion log after `cursor`, up to place `last`."""
        return await self._off_loop(lambda: self._log(batch, cursor, limit, last))

    def _log(self, batch: BatchKey, cursor: int, limit: int, last: int = LAST - 1) -> list[LogRow]:
        if cursor >= last:
            return []
        start = records.completion_key(batch, cursor + 1)
        end = records.completion_key(batch, last + 1)
        rows = self._store.scan(records.COMPLETIONS, start, end, limit)
        return [LogRow(records.completion_seq_of(key), records.seq_of(value)) for key, value in rows]

    async def older_than(self, before_ns: int, limit: int, after: bytes = b"") -> tuple[list[int], bytes]:
        """Return at most `limit` requests whose results are older than `before_ns`, oldest first, and where they end.

        Those that follow are returned for that as `after`.
        """
        if before_ns <= 0:
            return [], after
        end = records.expiry_key(before_ns, 0)
        rows = await self._off_loop(lambda: self._store.scan(records.EXPIRY, after, end, limit))
        return [records.expiry_of(key)[1] for key, _ in rows], rows[-1][0] + b"\0" if rows else after

    async def first_results(self, seqs: Sequence[int], sees: str | None) -> list[wire.StoredResult | None]:
        """Return the results of the first of these requests, in order; None where there is none that the caller sees.

        They end after PAGE_BYTES, and before one that is damaged: raises StoreDamagedError if that is the first. Of a
        request that is NO_SEQ none is looked for.
        """
        found: list[wire.StoredResult | None] = []
        size_bytes = 0
        while len(found) < len(seqs) and size_bytes < PAGE_BYTES:
            some = seqs[len(found) : len(found) + MOST_ROWS]
            try:
                results = await self._off_loop(partial(self._first_results, some, sees, PAGE_BYTES - size_bytes))
            except StoreDamagedError:
                if not found:
                    raise
                break
            found += results
            size_bytes += sum(len(result.body) for result in results if result is not None)
        return found

    def _first_results(self, seqs: Sequence[int], sees: str | None, most_bytes: int) -> list[wire.StoredResult | None]:
        found: list[wire.StoredResult | None] = []
        size_bytes = 0
        rows = self._rows([seq for seq in seqs if seq != NO_SEQ], MOST_CHUNK)
        try:
            for seq in seqs:
                row = None if seq == NO_SEQ else next(rows)
                found.append(None if row is None or not _seen(row, sees) else decoded(wire.read_result, row))
                size_bytes += len(row or b"")
                if size_bytes >= most_bytes:
                    break
        except StoreDamagedError:
            if not found:
                raise
        return found

    async def known_of(self, tenant: str, keys: Sequence[str]) -> list[int]:
        """Return the requests that were submitted with the first of these idempotency keys, NO_SEQ for one unknown.

        They end before a row that is damaged, and may well before it; raises StoreDamagedError if that is the first.
        """
        return await self._off_loop(lambda: self._known_of(tenant, keys))

    def _known_of(self, tenant: str, keys: Sequence[str]) -> list[int]:
        try:
            rows = self._store.get_many(records.IDEMPOTENCY, [records.idempotency_key(tenant, key) for key in keys])
        except StoreDamagedError:
            if len(keys) == 1:
                raise
            return self._known_of(tenant, keys[: len(keys) // 2])
        return [NO_SEQ if row is None else records.seq_of(row) for row in rows]

    async def known(self, tenant: str, key: str) -> int | None:
        """Return the request that was submitted with this idempotency key, or None."""
        row = await self._off_loop(lambda: self._store.get(records.IDEMPOTENCY, records.idempotency_key(tenant, key)))
        return records.seq_of(row) if row is not None else None

    async def dead(self, after: int, limit: int) -> list[tuple[int, queue_pb2.DeadLetter]]:
        """Return at most `limit` dead letters that died after position `after`, each with its position."""
        return await self._off_loop(lambda: self._dead(after, limit))

    def _dead(self, after: int, limit: int) -> list[tuple[int, queue_pb2.DeadLetter]]:
        rows = self._store.scan(records.DEAD, records.seq_key(min(after, LAST - 1) + 1), b"", limit)
        seqs = [records.dead_seq(row) for _, row in rows]
        metas = self._store.get_many(records.REQUESTS, [records.seq_key(seq) for seq in seqs])
        letters = []
        for (key, row), seq, meta_row in zip(rows, seqs, metas, strict=True):
            if meta_row is None:
                continue  # requeued between the two reads
            entry = Entry(seq, records.decode_meta(meta_row))
            records.restore_dead(entry, row)
            letter = queue_pb2.DeadLetter(
                request_id=request_id_of(self._store_id, seq),
                channel=entry.meta.channel,
                batch=entry.meta.batch,
                attempts=entry.attempts,
                last_error=entry.last_error,
                died_unix_ns=entry.died_ns,
            )
            letters.append((records.completion_seq_of(key), letter))
        return letters


def _seen(row: bytes, sees: str | None) -> bool:
    """Whether a result is there for a caller that sees this tenant's only; None: everybody's."""
    return sees is None or decoded(records.decode_head, row).tenant == sees
