"""A page of a list of files or records, put together in jobs that each look at a bounded number of rows.

Everybody's rows lie in one order, so a list of one tenant's, or of one purpose, passes over all the others. However
many those are, a job is short: whoever reads on the same threads waits for one job, and not for a list.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from services.queue.core.records import RECORDS
from services.queue.files.rows import END
from services.queue.storage.store import Row, Store, StoreDamagedError

PAGE_BYTES = 4 * 1024 * 1024
"""A page of records ends once it holds this much."""

LOOK_ROWS = 256
"""Rows looked at in one job: a page of the default size, and less than a millisecond, in which compiled code need not
let go of the interpreter's lock."""

LOOK_BYTES = 1024 * 1024
"""Of rows, after which a job ends with fewer: the largest record, or a part of a file, which ReadFile reads at once."""

FEW_RECORDS = 4
"""Records read in one go: they have up to a MiB each, and how much it was is known only then."""

T = TypeVar("T")
Scan = Callable[[str, bytes, bytes, int], list[Row]]


class Listing(Generic[T]):
    """A page of at most `limit` of what is `wanted` among the rows of a family; one job at a time works on it."""

    def __init__(
        self,
        store: Store,
        family: str,
        bounds: tuple[bytes, bytes],
        after: bytes,
        ascending: bool,
        limit: int,
        wanted: Callable[[bytes, bytes], T | None],
    ) -> None:
        """Begin behind the row of `after`, in the direction of the list, or at its end of `bounds` if that is empty."""
        self._store = store
        self._family = family
        self._bounds = bounds
        self._after = after
        self._ascending = ascending
        self._limit = limit
        self._wanted = wanted
        self._size_bytes = 0
        self._at_once = min(limit + 1, LOOK_ROWS)
        """Rows of the next scan; of the first no more than a page takes if it takes every row."""
        self.found: list[T] = []
        self.has_more = False
        """Whether something wanted is behind the page."""

    def look(self) -> bool:
        """Look at the next rows, LOOK_ROWS or LOOK_BYTES of them; return whether the page is complete.

        It ends before a row that fails its checksum; raises StoreDamagedError for one with which it would begin, and
        StoreError if the disk fails.
        """
        rows_seen = bytes_seen = 0
        while rows_seen < LOOK_ROWS and bytes_seen < LOOK_BYTES:
            try:
                rows = self._next_rows(LOOK_ROWS - rows_seen)
            except StoreDamagedError:
                if not self.found:
                    raise
                self.has_more = True
                return True
            if not rows or self._take(rows):
                return True
            rows_seen += len(rows)
            bytes_seen += sum(len(row) for _, row in rows)
        return False

    def _next_rows(self, most: int) -> list[Row]:
        start, end = self._bounds
        if self._after:
            start, end = (self._after + END, end) if self._ascending else (start, self._after)
        count = min(self._at_once, most, FEW_RECORDS if self._family == RECORDS else LOOK_ROWS)
        self._at_once = LOOK_ROWS
        scan = self._store.scan if self._ascending else self._store.scan_back
        return _up_to_damage(scan, self._family, (start, end), count)

    def _take(self, rows: list[Row]) -> bool:
        """Put what is wanted of these rows on the page; return whether it is complete."""
        for key, row in rows:
            item = self._wanted(key, row)
            if item is not None:
                if len(self.found) == self._limit or self._size_bytes >= PAGE_BYTES:
                    self.has_more = True
                    return True
                self.found.append(item)
                self._size_bytes += len(row)
            self._after = key
        return False


def _up_to_damage(scan: Scan, family: str, bounds: tuple[bytes, bytes], limit: int) -> list[Row]:
    """Return the next rows, or those before one that fails its checksum; raises StoreDamagedError if it is the next."""
    try:
        return scan(family, *bounds, limit)
    except StoreDamagedError:
        if rows := before_damage(scan, family, bounds, limit):
            return rows
        raise


def before_damage(scan: Scan, family: str, bounds: tuple[bytes, bytes], limit: int) -> list[Row]:
    """Return some of the next rows, of which one fails its checksum: up to half of those before it at least, or none.

    Of `limit` rows a half is tried, then a quarter, and so on.
    """
    while limit := limit // 2:
        with suppress(StoreDamagedError):
            return scan(family, *bounds, limit)
    return []
