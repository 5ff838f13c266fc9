"""Start-up: read from the store what lives, in pages, and never a payload.

Pages can be taken in one by one while the queue serves submits already: what is
submitted meanwhile has higher numbers than everything that is read here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from services.queue.core import records
from services.queue.core.effects import Write
from services.queue.core.entry import EMPTY_META, Counters, Entry, Recovered
from services.queue.core.lifecycle import State
from services.queue.storage.store import Row, Store, StoreUnusableError, write_reopening

PAGE_ROWS = 2048
"""Rows read at once. Reading a page and taking it in occupies the interpreter for some 30 ms, which is what a submit
waits for at most while a large store is being loaded."""

NUMBERS_SKIPPED = 1 << 20
"""Names and fencing tokens passed over at a start: more than there can be in one write, and nothing of 2⁶⁴."""


class Recovery:
    """The live requests of a store, in pages: leased ones, dead letters in the order they died, then those that wait.

    Raises StoreUnusableError, here or while it is iterated, if the rows contradict each other. That nothing is left
    over (a row in `ready` whose request is gone) takes reading every family, which is not a start's business.
    """

    def __init__(self, store: Store) -> None:
        """Read the counters; `pages` reads what was submitted up to now."""
        self._store = store
        with _damage():
            row = store.get(records.META, records.COUNTERS_KEY)
            self.counters = Counters() if row is None else records.decode_counters(row)
            # Not by its counters: a store of an older version has none before its first request is written.
            self._is_new = store.get(records.META, records.STORE_ID_KEY) is None
        self._last_seq = self.counters.seq

    def pass_numbers_over(self) -> None:
        """Go on beyond every name and fencing token that the last life of the store may have given out.

        Scheduler and workers are told of requests and leases while these are being written. A write that came to
        nothing leaves them with numbers that nothing later may have: a claim would find another request than credits
        were booked for, a completion count under another's lease. Raises StoreError if they cannot be written.
        """
        if not self._is_new:
            self.counters.seq += NUMBERS_SKIPPED
            self.counters.fencing_token += NUMBERS_SKIPPED
            # A compaction that began when the store was opened may have met damage meanwhile: it is spared then.
            counters = Write(records.META, records.COUNTERS_KEY, records.encode_counters(self.counters))
            write_reopening(self._store, [counters])

    def pages(self) -> Iterator[list[Entry]]:
        """Yield every live request once. One thread at a time may draw pages."""
        with _damage():
            yield from self._pages()

    def _pages(self) -> Iterator[list[Entry]]:
        apart: set[int] = set()
        for family, read in ((records.LEASES, _lease), (records.DEAD, _dead_letter)):
            for page in _row_pages(self._store, family):
                entries = [read(key, row) for key, row in page]
                self._describe(entries)
                for entry in entries:
                    if entry.seq in apart:
                        raise ValueError(f"request {entry.seq} is in two states")
                    apart.add(entry.seq)
                yield entries
        for page in _row_pages(self._store, records.REQUESTS, records.seq_key(self._last_seq + 1)):
            yield self._waiting(page, apart)

    def _describe(self, entries: Sequence[Entry]) -> None:
        """Give entries that were found by their state their metadata."""
        rows = self._store.get_many(records.REQUESTS, [records.seq_key(entry.seq) for entry in entries])
        for entry, row in zip(entries, rows, strict=True):
            if row is None:
                raise ValueError(f"request {entry.seq} has a state but no metadata")
            entry.meta = records.decode_meta(row)

    def _waiting(self, page: Sequence[Row], apart: set[int]) -> list[Entry]:
        """Return those of a page of metadata that wait: all that are not `apart`."""
        metas = records.decode_metas([row for _, row in page])
        found = [Entry(records.seq_of(key), meta) for (key, _), meta in zip(page, metas, strict=True)]
        rows = self._store.get_many(records.READY, [records.ready_key(entry) for entry in found])
        entries = []
        for entry, ready in zip(found, rows, strict=True):
            if (ready is None) is (entry.seq not in apart):
                text = "neither ready, leased nor dead" if ready is None else "in two states"
                raise ValueError(f"request {entry.seq} is {text}")
            if ready is not None:
                records.restore_ready(entry, ready)
                entries.append(entry)
        return entries


@contextmanager
def _damage() -> Iterator[None]:
    """Tell what a row that cannot be read means."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, struct.error) as error:
        raise StoreUnusableError(f"the store is damaged: {error}") from error


def recover(store: Store) -> Recovered:
    """Return every live request of `store`; raises StoreUnusableError if its rows contradict each other."""
    recovery = Recovery(store)
    entries = [entry for page in recovery.pages() for entry in page]
    return Recovered(recovery.counters, entries)


def _lease(key: bytes, row: bytes) -> Entry:
    entry = Entry(records.seq_of(key), EMPTY_META, State.ABSENT)
    records.restore_lease(entry, row)
    return entry


def _dead_letter(key: bytes, row: bytes) -> Entry:
    entry = Entry(records.dead_seq(row), EMPTY_META, State.ABSENT)
    records.restore_dead(entry, row)
    entry.completion_seq = records.completion_seq_of(key)
    return entry


def _row_pages(store: Store, family: str, end: bytes = b"") -> Iterator[list[Row]]:
    """Yield the rows of a family up to `end`, in key order."""
    start = b""
    while page := store.scan(family, start, end, PAGE_ROWS):
        yield page
        start = page[-1][0] + b"\0"


def _is_used(store: Store, family: str) -> bool:
    """Return whether a family has rows of a store that has been named."""
    rows = store.scan(family, b"", b"", 2)
    return any((family, key) != (records.META, records.SCHEMA_KEY) for key, _ in rows)


def store_id_of(store: Store, draw: Callable[[], str]) -> str:
    """Return the store's name; `draw` names a new store.

    Raises StoreUnusableError if the store is none: under another name whatever clients know of it would be unknown.
    """
    found = store.get(records.META, records.STORE_ID_KEY)
    if found is not None:
        return found.decode()
    held = [family for family in records.FAMILIES if _is_used(store, family)]
    if held:
        raise StoreUnusableError(
            f"the store is damaged: it has rows of {', '.join(held)} and no name. Acknowledged requests would be lost"
            f" silently: restore a backup"
        )
    store_id = draw()
    counters = records.encode_counters(Counters())
    store.write(
        [
            Write(records.META, records.STORE_ID_KEY, store_id.encode()),
            Write(records.META, records.COUNTERS_KEY, counters),
        ]
    )
    return store_id
