"""The live audit of the book: what its indexes say of a request must agree, and their sizes must add up.

Totals are compared at every look. Requests are looked at one by one, a slice at a time, so that an audit never holds
the loop up however many wait. A round begins with a copy of the numbers of all live requests, a millisecond for
150,000 of them; those that come later are looked at in the next round.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.queue.core.book import Book
from services.queue.core.entry import Entry
from services.queue.core.lifecycle import State

ENTRIES_PER_LOOK = 256
"""Requests looked at each time: a third of a millisecond's work, and 100,000 waiting ones come round in 80 s."""

LEASED_STATES = (State.LEASED, State.STOPPING)


class Audit:
    """Walks the book. It only reads, and never waits for anything."""

    def __init__(self, book: Book) -> None:
        """Look at `book`."""
        self._book = book
        self._seqs: list[int] = []

    def look(self) -> tuple[str, ...]:
        """Check the totals and the next slice of requests; return one sentence per violation, none if all is well."""
        found = list(_totals(self._book))
        for entry in self._slice():
            found += faults_of(self._book, entry)
        return tuple(found)

    def whole(self) -> tuple[str, ...]:
        """Check the totals and every request at once; takes time with their number."""
        found = list(_totals(self._book))
        for entry in self._book.entries.values():
            found += faults_of(self._book, entry)
        return tuple(found)

    def _slice(self) -> Iterator[Entry]:
        if not self._seqs:
            self._seqs = list(self._book.entries)
        for _ in range(min(ENTRIES_PER_LOOK, len(self._seqs))):
            entry = self._book.entries.get(self._seqs.pop())
            if entry is not None:
                yield entry


def _totals(book: Book) -> Iterator[str]:
    waiting = sum(len(line) for line in book.lines.values())
    leased, dead, live = len(book.leases), len(book.dead), len(book.entries)
    if waiting + leased + dead != live:
        yield f"{waiting} waiting + {leased} leased + {dead} dead != {live} live requests"
    if book.names != live:
        yield f"{book.names} names != {live} live requests"
    held = sum(len(seqs) for seqs in book.holdings.values())
    if held != leased:
        yield f"workers hold {held} leases, there are {leased}"
    counted = sum(held.requests for held in book.waiting.by_tenant.values())
    if counted != waiting:
        yield f"{counted} requests of tenants are counted as waiting, {waiting} wait"
    in_channels = sum(book.leased_by_channel.values())
    if in_channels != leased or min(book.leased_by_channel.values(), default=0) < 0:
        yield f"channels count {dict(book.leased_by_channel)} leases, there are {leased}"
    if book.counters.results < 0:
        yield f"{book.counters.results} results are counted"
    for channel, line in book.lines.items():
        if line.announced > len(line):
            yield f"channel {channel}: {line.announced} announced of {len(line)} waiting"
        if not 0 <= line.bounded <= line.announced:
            yield f"channel {channel}: {line.bounded} for models that are not served of {line.announced} announced"


def faults_of(book: Book, entry: Entry) -> list[str]:
    """Return what the indexes say of one request that contradicts its state, a sentence each."""
    seq, state = entry.seq, entry.state
    line = book.lines.get(entry.meta.channel)
    places = {
        "its line": (line is not None and line.holds(seq, entry.meta.model), state is State.READY),
        "the leases": (seq in book.leases, state in LEASED_STATES),
        "its worker's leases": (seq in book.holdings.get(entry.worker_id, ()), state in LEASED_STATES),
        "the dead letters": (seq in book.dead, state is State.DEAD),
        "its batch": (seq in book.batches.get(entry.meta.batch_key, ()), state is not State.DEAD),
        "the names": (book.find(entry.name) is entry, True),
    }
    faults = [f"is {'' if there else 'not '}in {place}" for place, (there, wanted) in places.items() if there != wanted]
    if state not in LEASED_STATES and state not in (State.READY, State.DEAD):
        faults.append("is in the book")
    if (entry.stop_outcome is not None) != (state is State.STOPPING):
        faults.append(f"has the stop outcome {entry.stop_outcome}")
    if state in LEASED_STATES and not (entry.attempts >= 1 and 1 <= entry.fencing_token <= book.counters.fencing_token):
        faults.append(f"is in attempt {entry.attempts} with the fencing token {entry.fencing_token}")
    if not 1 <= seq <= book.counters.seq:
        faults.append(f"is not a number given out; the last is {book.counters.seq}")
    if state is State.DEAD and not 1 <= entry.completion_seq <= book.counters.completion_seq:
        faults.append(f"has the place {entry.completion_seq} in the completion log")
    return [f"request {seq} ({state.value}) {fault}" for fault in faults]
