"""One waiting line: requests of one channel for one model, in the order in which they may leave."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from itertools import islice

from services.scheduler.core.backlog import Entry

FRONT_REQUESTS = 9
"""Requests at the front that are looked at: the head, and eight that may pass it while it waits for its booked start.
Looking deeper costs every pass and finds little: what fits is usually near."""

STALE_ALLOWANCE = 64
"""Left-over heap items tolerated on top of as many as there are live ones, before the heap is rebuilt."""

Key = tuple[int, int, str]


def order(entry: Entry) -> Key:
    """Return what the line is ordered by; the name makes it total."""
    return entry.announced.priority, entry.announced.position, entry.request_id


class Line:
    """Waiting requests, lowest (priority, position) first.

    The first few are kept sorted, all behind them in a heap; none in the heap comes before one in front. Removal from
    the heap only forgets the name; what is left there is skipped when it surfaces. Every operation takes O(log n).
    """

    def __init__(self, model: str) -> None:
        """Make an empty line of requests that ask for `model` ("" accepts any)."""
        self.model = model
        self._front: list[Key] = []
        self._heap: list[Key] = []
        self._live: dict[str, Entry] = {}

    def __len__(self) -> int:
        """Return the number of requests in line."""
        return len(self._live)

    def __contains__(self, entry: Entry) -> bool:
        """Return whether the entry is in line."""
        return self._live.get(entry.request_id) is entry

    def sample(self, most: int) -> list[Entry]:
        """Return at most so many of the entries, those that entered first."""
        return list(islice(self._live.values(), most))

    def enter(self, entry: Entry) -> bool:
        """Put the entry at its position; return whether that is (or may be) in front."""
        key = order(entry)
        self._live[entry.request_id] = entry
        if self._heap and (not self._front or key > self._front[-1]):
            heapq.heappush(self._heap, key)
            return len(self._front) < FRONT_REQUESTS
        insort(self._front, key)
        if len(self._front) <= FRONT_REQUESTS:
            return True
        last = self._front.pop()
        heapq.heappush(self._heap, last)
        return last != key

    def leave(self, entry: Entry) -> bool:
        """Take the entry out, which must be in line; return whether it was in front."""
        del self._live[entry.request_id]
        key = order(entry)
        index = bisect_left(self._front, key)
        if index < len(self._front) and self._front[index] == key:
            del self._front[index]
            return True
        if len(self._heap) > 2 * len(self._live) + STALE_ALLOWANCE:
            front = set(self._front)
            self._heap = [key for live in self._live.values() if (key := order(live)) not in front]
            heapq.heapify(self._heap)
        return False

    def head(self) -> Entry | None:
        """Return the entry whose turn it is, None if the line is empty."""
        if not self._front:
            self._fill()
        return self._live[self._front[0][2]] if self._front else None

    def behind(self) -> list[Entry]:
        """Return the few entries behind the head that may pass it, in order."""
        if len(self._front) < FRONT_REQUESTS:
            self._fill()
        return [self._live[key[2]] for key in self._front[1:]]

    def _fill(self) -> None:
        """Move the first of the heap to the front; one that entered twice under the same key counts once."""
        while self._heap and len(self._front) < FRONT_REQUESTS:
            key = heapq.heappop(self._heap)
            entry = self._live.get(key[2])
            if entry is not None and order(entry) == key and key not in self._front:
                self._front.append(key)
