"""One waiting line: requests of one channel for one model, in the order in which they may leave."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from itertools import islice
from typing import Final

from services.scheduler.core.entry import Entry

FRONT_REQUESTS: Final = 9
"""Requests at the front that are looked at: the head, and eight that may pass it while it waits for its booked start.
Looking deeper costs every pass and finds little: what fits is usually near."""

STALE_ALLOWANCE: Final = 64
"""Left-over keys tolerated on top of as many as there are live ones, before they are thrown out."""

Key = tuple[int, int, str]


def order(entry: Entry) -> Key:
    """Return what the line is ordered by; the name makes it total."""
    return entry.announced.priority, entry.announced.position, entry.request_id


class Line:
    """Waiting requests, lowest (priority, position) first.

    The first few are kept sorted in front, and none behind comes before them. Behind, those that enter in order, as
    nearly all do, are a queue, the others a heap, all of them before the queue's last. Leaving from behind only
    forgets the name; the key left there is skipped when it surfaces. Every operation takes O(log n), one in order O(1).

    An entry can be set *aside*: it is in line, but its turn does not come until it is brought back.

    Of those on their last attempt, of which a worker takes one at a time, one has its turn or waits for a worker: those
    behind it wait until it is out of their way. So a worker that takes one again costs one look, however many wait.
    """

    def __init__(self, model: str) -> None:
        """Make an empty line of requests that ask for `model` ("" accepts any)."""
        self.model = model
        self._front: list[Key] = []
        self._rising: deque[Key] = deque()
        self._heap: list[Key] = []
        self._live: dict[str, Entry] = {}
        self._aside: dict[str, Entry] = {}
        self._last = ""
        """The one on its last attempt that others wait behind."""
        self._behind_last: dict[str, Entry] = {}
        self._lasts: list[Key] = []
        """Heap of their keys, and of some that have left."""

    def __len__(self) -> int:
        """Return the number of requests in line."""
        return len(self._live)

    def __contains__(self, entry: Entry) -> bool:
        """Return whether the entry is in line."""
        return self._live.get(entry.request_id) is entry

    def sample(self, most: int) -> list[Entry]:
        """Return at most so many of the entries, those that entered first."""
        return list(islice(self._live.values(), most))

    def entries(self) -> list[Entry]:
        """Return all entries, in the order in which they entered; a copy, so that they may leave while it is read."""
        return list(self._live.values())

    def enter(self, entry: Entry) -> bool:
        """Put the entry at its position; return whether that is (or may be) in front."""
        self._live[entry.request_id] = entry
        return self._take_in(entry)

    def _take_in(self, entry: Entry) -> bool:
        """Put the entry at its position, or behind the one on its last attempt that it is to wait for."""
        if entry.announced.last_attempt:
            before = self._live.get(self._last)
            if before is not None and order(before) < order(entry):
                self._behind_last[entry.request_id] = entry
                heapq.heappush(self._lasts, order(entry))
                return False
            self._last = entry.request_id
        return self._insert(order(entry))

    def _insert(self, key: Key) -> bool:
        """Put a key at its position; return whether that is (or may be) in front."""
        if not self._front or key > self._front[-1]:
            self._put_behind(key)
            return len(self._front) < FRONT_REQUESTS
        insort(self._front, key)
        if len(self._front) <= FRONT_REQUESTS:
            return True
        last = self._front.pop()
        self._put_behind(last)
        return last != key

    def leave(self, entry: Entry) -> bool:
        """Take the entry out, which must be in line; return whether it was in front."""
        del self._live[entry.request_id]
        if self._behind_last and self._behind_last.pop(entry.request_id, None) is not None:
            return False
        if self._aside and self._aside.pop(entry.request_id, None) is not None:
            return False
        key = order(entry)
        index = bisect_left(self._front, key)
        if index < len(self._front) and self._front[index] == key:
            del self._front[index]
            return True
        if len(self._rising) + len(self._heap) > 2 * len(self._live) + STALE_ALLOWANCE:
            # Whoever is aside has no key behind, or it would stand there twice when it is brought back.
            placed = {key[2] for key in self._front} | self._aside.keys() | self._behind_last.keys()
            self._rising = deque(sorted(order(live) for name, live in self._live.items() if name not in placed))
            self._heap.clear()
        return False

    def head(self) -> Entry | None:
        """Return the entry whose turn it is, None if the line is empty."""
        if not self._front:
            self._fill()
        return self._live[self._front[0][2]] if self._front else None

    def first(self, count: int) -> list[Entry]:
        """Return so many of the first entries, or as many as are looked at."""
        head = self.head()
        if head is None or count == 1:
            return [] if head is None else [head]
        return [head, *self.behind()[: count - 1]]

    @property
    def aside(self) -> int:
        """How many are set aside, or wait behind one on its last attempt."""
        return len(self._aside) + len(self._behind_last)

    @property
    def last_is_aside(self) -> bool:
        """Whether the one on its last attempt that others wait behind is set aside."""
        return self._last in self._aside

    def set_head_aside(self) -> Entry:
        """Let the entry whose turn it is wait aside, and return it; there must be one."""
        key = self._front.pop(0)
        entry = self._aside[key[2]] = self._live[key[2]]
        return entry

    def bring_back(self, entry: Entry) -> None:
        """Give one that is set aside its position again."""
        del self._aside[entry.request_id]
        self._take_in(entry)

    def let_next_last(self, entry: Entry) -> bool:
        """Let the next on its last attempt have its turn, if the entry was in its way and is not any more.

        Return whether that is (or may be) in front.
        """
        if self._last != entry.request_id:
            return False
        self._last = ""
        while self._lasts:
            key = heapq.heappop(self._lasts)
            if self._behind_last.pop(key[2], None) is not None:
                self._last = key[2]
                return self._insert(order(self._live[key[2]]))
        return False

    def behind(self) -> list[Entry]:
        """Return the few entries behind the head that may pass it, in order."""
        if len(self._front) < FRONT_REQUESTS:
            self._fill()
        return [self._live[key[2]] for key in self._front[1:]]

    def _fill(self) -> None:
        """Move the first from behind to the front; one that entered twice under the same key counts once."""
        front = self._front
        while self._rising and len(front) < FRONT_REQUESTS:
            key = self._take_first_behind()
            entry = self._live.get(key[2])
            if entry is None or key[2] in self._aside or key[2] in self._behind_last or order(entry) != key:
                continue
            # They surface in order, and none comes before one in front: the same key can only be the last there.
            if not front or front[-1] != key:
                front.append(key)

    def _put_behind(self, key: Key) -> None:
        if not self._rising or key > self._rising[-1]:
            self._rising.append(key)
        else:
            heapq.heappush(self._heap, key)

    def _take_first_behind(self) -> Key:
        if self._heap and self._heap[0] <= self._rising[0]:
            return heapq.heappop(self._heap)
        return self._rising.popleft()
