"""The results of one batch after a cursor, as one watcher takes them: handed over while it keeps up, read otherwise."""

from __future__ import annotations

from services.queue.core.entry import BatchKey
from services.queue.storage.reader import Reader
from services.queue.watch.hub import Watcher
from services.queue.wire import StoredResult

PAGE_RESULTS = 256
"""Results read at once; pages end by size besides."""

FEWEST_ENTRIES = 16
"""Entries of the log read at once where results are so large that a page has one or two of them."""


class BatchLog:
    """Where one watcher is in a batch's completion log.

    Once it has read the log to its end, whatever ends is handed to it, in the log's order: nothing is read again until
    something could not be kept for it. To read takes another thread, which the loop and it hand the interpreter's lock
    back and forth for: several times what there is to read.
    """

    def __init__(self, reader: Reader, watcher: Watcher, batch: BatchKey, cursor: int) -> None:
        """Begin after `cursor`; `watcher` watches the batch already."""
        self._reader = reader
        self._watcher = watcher
        self._batch = batch
        self._cursor = cursor
        self._limit = PAGE_RESULTS
        self.at_end = False
        """Whether everything has been returned that had ended before the last call of `read`."""

    async def read(self) -> list[StoredResult]:
        """Return results that were not returned before, in order of completion; raises StoreError."""
        # Taken before the log is read: what ends meanwhile may be in both, and is in one of them.
        handed = self._watcher.take_results()
        if handed is None:
            results, self._cursor, self.at_end = await self._reader.page(self._batch, self._cursor, self._limit)
            # Of large results as many entries are read as the next page may have: to read 256 for each costs a tenth.
            self._limit = min(PAGE_RESULTS, max(FEWEST_ENTRIES, 4 * len(results))) if results else PAGE_RESULTS
            if not self.at_end:
                self._watcher.miss_results()  # the log is read on first
            return results
        results = [result for result in handed if result.cursor > self._cursor]
        if results:
            self._cursor = results[-1].cursor
        return results
