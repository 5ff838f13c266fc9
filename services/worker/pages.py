"""Which pages of a file are taken: the lowest free ones first, so that the file is as short as what is in it allows."""

from __future__ import annotations

from typing import Final

PAGE_BYTES: Final = 4096
"""What file systems take from a disk at once, so that rounding up to it costs nothing more."""


class Pages:
    """The pages of one file. A taker gets the runs of pages that are free, wherever they are.

    As a page is taken only when all below it are, there are never more pages than were once taken together; and the
    last page is always a taken one.
    """

    def __init__(self) -> None:
        """Begin with a file that is empty."""
        self._taken = bytearray()
        """A byte for each page: 1 if it is taken."""
        self._first_free = 0
        """No page below this one is free."""

    def __len__(self) -> int:
        """Return how long the file is, in pages."""
        return len(self._taken)

    def take(self, count: int) -> list[range]:
        """Take `count` pages; return them as runs of neighbours."""
        runs: list[range] = []
        while count > 0:
            start = self._taken.find(0, self._first_free)
            start = len(self._taken) if start < 0 else start
            stop = self._taken.find(1, start, start + count)
            stop = start + count if stop < 0 else stop
            self._taken[start:stop] = b"\x01" * (stop - start)
            runs.append(range(start, stop))
            count -= stop - start
            self._first_free = stop
        return runs

    def give_back(self, runs: list[range]) -> None:
        """Give back pages that were taken; those at the end of the file are no longer part of it."""
        for run in runs:
            self._taken[run.start : run.stop] = bytes(len(run))
            self._first_free = min(self._first_free, run.start)
        end = self._taken.rfind(1) + 1
        del self._taken[end:]
        self._first_free = min(self._first_free, end)
