"""Start-up: read from the store what lives, in pages, and never a payload."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.queue.core import records
from services.queue.core.effects import Write
from services.queue.core.entry import Entry, Recovered
from services.queue.core.lifecycle import State
from services.queue.store import Row, Store, StoreUnusableError

PAGE_ROWS = 4096
"""Rows read at once: a few MiB, and few enough calls."""


def rows_of(store: Store, family: str) -> Iterator[Row]:
    """Yield every row of a family in key order."""
    start = b""
    while True:
        page = store.scan(family, start, b"", PAGE_ROWS)
        yield from page
        if len(page) < PAGE_ROWS:
            return
        start = page[-1][0] + b"\0"


def recover(store: Store) -> Recovered:
    """Return every live request of `store`; raises StoreUnusableError if its rows contradict each other."""
    try:
        return _recover(store)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise StoreUnusableError(f"the store is damaged: {error}") from error


def _recover(store: Store) -> Recovered:
    row = store.get(records.META, records.COUNTERS_KEY)
    recovered = Recovered() if row is None else Recovered(records.decode_counters(row))
    entries: dict[int, Entry] = {}
    for key, value in rows_of(store, records.REQUESTS):
        seq = records.seq_of(key)
        entries[seq] = Entry(seq, records.decode_meta(value), State.ABSENT)
    for key, value in rows_of(store, records.READY):
        _restore(entries, records.ready_seq(key), value, records.restore_ready)
    for key, value in rows_of(store, records.LEASES):
        _restore(entries, records.seq_of(key), value, records.restore_lease)
    for key, value in rows_of(store, records.DEAD):
        entry = _restore(entries, records.dead_seq(value), value, records.restore_dead)
        entry.completion_seq = records.completion_seq_of(key)
    for entry in entries.values():
        if entry.state is State.ABSENT:
            raise ValueError(f"request {entry.seq} is neither ready, leased nor dead")
    recovered.entries = list(entries.values())
    return recovered


def _restore(entries: dict[int, Entry], seq: int, row: bytes, restore: Callable[[Entry, bytes], None]) -> Entry:
    entry = entries.get(seq)
    if entry is None:
        raise ValueError(f"request {seq} has a state but no metadata")
    if entry.state is not State.ABSENT:
        raise ValueError(f"request {seq} is in two states")
    restore(entry, row)
    return entry


def store_id_of(store: Store, draw: Callable[[], str]) -> str:
    """Return the store's name; `draw` names a new store."""
    found = store.get(records.META, records.STORE_ID_KEY)
    if found is not None:
        return found.decode()
    store_id = draw()
    store.write([Write(records.META, records.STORE_ID_KEY, store_id.encode())])
    return store_id
