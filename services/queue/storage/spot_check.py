"""The live audit of memory against disk: now and then a few requests are compared with their rows.

The rows are read on the thread that commits, before a batch is stepped: nothing is being written then, and the machine
does not move until they have been read, so that memory and disk are of the same moment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from services.queue.core import records
from services.queue.core.book import Book
from services.queue.core.entry import Entry
from services.queue.core.lifecycle import State
from services.queue.core.messages import Inspect
from services.queue.storage.store import Store, StoreError

REQUESTS_PER_LOOK = 32
"""Requests compared at once: some hundred reads, which hold the batch behind them up by about a millisecond."""

log = logging.getLogger(__name__)


class SpotCheck:
    """Compares the requests of a machine with a store in rounds, a few at each look."""

    def __init__(self, report: Callable[[int], None]) -> None:
        """Call `report` with the number of violations found, from the thread that reads."""
        self._report = report
        self._seqs: list[int] = []

    def look(self, store: Store, book: Book) -> Inspect:
        """Compare the next few requests, and return a message that asks for nothing."""
        try:
            found = list(self._compare(store, book))
        except StoreError:
            found = []  # a disk that cannot be read is noticed, and said, by those who need it
        for text in found:
            log.error("the audit found: %s", text)
        if found:
            self._report(len(found))
        return Inspect(0, ())

    def _compare(self, store: Store, book: Book) -> Iterator[str]:
        if not self._seqs:
            self._seqs = list(book.entries)
        chosen = [self._seqs.pop() for _ in range(min(REQUESTS_PER_LOOK, len(self._seqs)))]
        entries = [entry for seq in chosen if (entry := book.entries.get(seq)) is not None]
        yield from differences(store, entries)


def differences(store: Store, entries: Sequence[Entry]) -> Iterator[str]:
    """Yield a sentence for each row that is not what memory says it is. Raises StoreError."""
    keys = [records.seq_key(entry.seq) for entry in entries]
    requests = store.get_many(records.REQUESTS, keys)
    ready = store.get_many(records.READY, [records.ready_key(entry) for entry in entries])
    leases = store.get_many(records.LEASES, keys)
    dead = store.get_many(records.DEAD, [records.seq_key(entry.completion_seq) for entry in entries])
    for i, entry in enumerate(entries):
        leased = entry.state in (State.LEASED, State.STOPPING)
        is_dead = entry.state is State.DEAD
        rows = {
            records.REQUESTS: (requests[i], records.encode_meta(entry.meta)),
            records.READY: (ready[i], records.encode_ready(entry) if entry.state is State.READY else None),
            records.LEASES: (leases[i], records.encode_lease(entry) if leased else None),
            records.DEAD: (dead[i] if is_dead else None, records.encode_dead(entry) if is_dead else None),
        }
        for family, (found, meant) in rows.items():
            if found != meant:
                what = "differs" if found and meant else "is there" if found else "is missing"
                yield f"request {entry.seq} ({entry.state.value}): its row in {family} {what}"
