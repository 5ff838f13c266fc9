"""Bringing a store of an older schema up to the present one, a page at a time.

Every page is one synced write, and what is up to date is left alone, so that a migration that was killed goes on when
the queue is started again. The schema's number is written last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from services.queue.core import records
from services.queue.core.effects import Write
from services.queue.core.entry import DEFAULT_TENANT
from services.queue.storage.store import Row, Store

MIGRATED_VERSIONS = (b"1", b"2")
"""Schema versions that are brought up to the present one when the store is opened for writing."""

PAGE_ROWS = 2000
"""Small rows in one synced write."""

RESULTS_AT_ONCE = 16
"""Results read at once for the tenants in their heads: their bodies, which are read with them, may be large."""

_OLD_META_VERSION = 1
_NUMBER_BYTES = 8
_LENGTH_BYTES = 2


def migrate(store: Store) -> None:
    """Bring every row up to date; raises StoreError, and ValueError for a row that cannot be read."""
    # What is new in version 2 is families, and opening the store has made these.
    for page in _pages(store, records.REQUESTS):
        _write(store, _with_sizes(store, page))
    nobodys = records.idempotency_key("", "")
    for page in _pages(store, records.IDEMPOTENCY, nobodys, _after(nobodys)):
        _write(store, _owned_keys(store, page, nobodys))
    for page in _pages(store, records.COMPLETIONS):
        _write(store, _by_tenant(store, page))
    store.write([Write(records.META, records.SCHEMA_KEY, str(records.SCHEMA_VERSION).encode())])


def _with_sizes(store: Store, page: Sequence[Row]) -> Iterator[Write]:
    """Yield the rows of `requests` with a tenant and the size of the payload, which only the payload tells."""
    old = [(key, values) for key, row in page if (values := json.loads(row))[0] == _OLD_META_VERSION]
    for first in range(0, len(old), RESULTS_AT_ONCE):
        some = old[first : first + RESULTS_AT_ONCE]
        payloads = store.get_many(records.PAYLOADS, [key for key, _ in some])
        for (key, (_, tenant, *values, submitted_ns)), payload in zip(some, payloads, strict=True):
            now = [tenant or DEFAULT_TENANT, *values, len(payload or b""), submitted_ns]
            meta = records.meta_of_values(now)
            yield Write(records.REQUESTS, key, records.encode_meta(meta))


def _owned_keys(store: Store, page: Sequence[Row], nobodys: bytes) -> Iterator[Write]:
    """Yield the keys of no tenant as those of the default one; a key that this one has already keeps its request."""
    renamed = [records.idempotency_key(DEFAULT_TENANT, key[len(nobodys) :].decode()) for key, _ in page]
    taken = store.get_many(records.IDEMPOTENCY, renamed)
    for (key, row), name, other in zip(page, renamed, taken, strict=True):
        yield Write(records.IDEMPOTENCY, key, None)
        if other is None:
            yield Write(records.IDEMPOTENCY, name, row)
        elif other != row:
            yield from _without_key(store, row)


def _without_key(store: Store, seq_row: bytes) -> Iterator[Write]:
    """Yield the rows of a request without its key, which names another: deleting its result must leave that one's."""
    if (row := store.get(records.REQUESTS, seq_row)) is not None:
        meta = records.decode_meta(row).replace(idempotency_key="")
        yield Write(records.REQUESTS, seq_row, records.encode_meta(meta))
    if (row := store.get(records.RESULTS, seq_row)) is not None:
        head, body = records.decode_result(row)
        yield Write(records.RESULTS, seq_row, records.encode_result(head._replace(idempotency_key=""), body))


def _by_tenant(store: Store, page: Sequence[Row]) -> Iterator[Write]:
    """Yield the rows of the completion log under keys that begin with a tenant, which the results know."""
    old = [(key, seq_row) for key, seq_row in page if _is_old(key)]
    for first in range(0, len(old), RESULTS_AT_ONCE):
        some = old[first : first + RESULTS_AT_ONCE]
        results = store.get_many(records.RESULTS, [seq_row for _, seq_row in some])
        for (key, seq_row), result in zip(some, results, strict=True):
            batch = key[_LENGTH_BYTES:-_NUMBER_BYTES].decode()
            tenant = DEFAULT_TENANT if result is None else records.decode_result(result)[0].tenant
            yield Write(records.COMPLETIONS, key, None)
            place = records.completion_seq_of(key)
            yield Write(records.COMPLETIONS, records.completion_key((tenant, batch), place), seq_row)


def _is_old(key: bytes) -> bool:
    """Whether a key of the log is a batch and a place; a tenant before them makes it at least two bytes longer."""
    return len(key) == _LENGTH_BYTES + int.from_bytes(key[:_LENGTH_BYTES], "big") + _NUMBER_BYTES


def _pages(store: Store, family: str, start: bytes = b"", end: bytes = b"") -> Iterator[list[Row]]:
    while page := store.scan(family, start, end, PAGE_ROWS):
        yield page
        start = page[-1][0] + b"\0"


def _after(prefix: bytes) -> bytes:
    """Return the first key after all that begin with `prefix`, which does not end in 0xff."""
    return prefix[:-1] + bytes((prefix[-1] + 1,))


def _write(store: Store, writes: Iterator[Write]) -> None:
    page = list(writes)
    if page:
        store.write(page)
