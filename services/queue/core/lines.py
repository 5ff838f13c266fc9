"""The waiting line of one channel: who waits, in which order, and which of them the scheduler knows.

Order is (priority, seq). A requeued request keeps its seq, and so returns to
the front. Heaps are lazy: an element whose request has left is skipped when it
comes up, and a heap that is mostly such elements is rebuilt.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

HEAP_SLACK = 64
"""Elements a heap may have beyond twice what it needs before it is rebuilt: keeps rebuilding O(1) per change."""


class Line:
    """Requests of one channel that are ready."""

    __slots__ = ("_announced", "_by_age", "_unannounced", "_waiting", "limit")

    def __init__(self) -> None:
        """Make an empty line with a closed window."""
        self.limit = 0
        """Most requests that may be announced and still waiting at once."""
        self._waiting: dict[int, int] = {}
        self._announced: set[int] = set()
        self._unannounced: list[tuple[int, int]] = []
        self._by_age: list[int] = []

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._waiting)

    def __contains__(self, seq: int) -> bool:
        """Return whether request `seq` waits here."""
        return seq in self._waiting

    @property
    def announced(self) -> int:
        """Number of waiting requests that the scheduler knows."""
        return len(self._announced)

    def enter(self, seq: int, priority: int) -> None:
        """Let request `seq` wait; it is not announced yet."""
        self._waiting[seq] = priority
        heapq.heappush(self._unannounced, (priority, seq))
        heapq.heappush(self._by_age, seq)
        self._trim()

    def leave(self, seq: int) -> bool:
        """Take request `seq` out; return whether it was announced."""
        del self._waiting[seq]
        announced = seq in self._announced
        self._announced.discard(seq)
        return announced

    def forget_announcements(self) -> None:
        """Start over with a scheduler that knows nothing: no window, nothing announced."""
        self.limit = 0
        self._announced.clear()
        self._rebuild_unannounced()

    def announce(self) -> Iterator[int]:
        """Yield, in order, the requests that the window lets through now, and mark them announced."""
        while len(self._announced) < self.limit and self._unannounced:
            _, seq = heapq.heappop(self._unannounced)
            if seq in self._waiting and seq not in self._announced:
                self._announced.add(seq)
                yield seq

    def oldest(self) -> int | None:
        """Return the waiting request that was submitted first, or None."""
        while self._by_age and self._by_age[0] not in self._waiting:
            heapq.heappop(self._by_age)
        return self._by_age[0] if self._by_age else None

    def _trim(self) -> None:
        most = 2 * len(self._waiting) + HEAP_SLACK
        if len(self._by_age) > most:
            self._by_age = sorted(self._waiting)
        if len(self._unannounced) > most:
            self._rebuild_unannounced()

    def _rebuild_unannounced(self) -> None:
        waiting = self._waiting.items()
        self._unannounced = sorted((priority, seq) for seq, priority in waiting if seq not in self._announced)
