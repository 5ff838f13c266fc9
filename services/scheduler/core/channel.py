"""One virtual channel: its waiting lines, its share of the blocks, its deficit.

Within a channel requests leave strictly by (priority, position). A channel has
one line per model asked for, because requests for different models do not
compete for the same engines: a request that waits for a model nobody serves
must not hold up the others.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from services.scheduler.core.backlog import Entry

STALE_ALLOWANCE = 64
"""Left-over heap items tolerated on top of as many as there are live ones, before the heap is rebuilt."""


class Share(NamedTuple):
    """What a channel is entitled to. Shares are parts of each worker's capacity, 0 to 1."""

    weight: float = 1.0
    guaranteed_share: float = 0.0
    ceiling_share: float = 1.0

    def guaranteed_blocks(self, capacity_blocks: int) -> int:
        """Return the blocks nobody else may hold while the channel has work."""
        return int(self.guaranteed_share * capacity_blocks)

    def ceiling_blocks(self, capacity_blocks: int) -> int:
        """Return the most blocks the channel may hold."""
        return int(self.ceiling_share * capacity_blocks)


class Line:
    """Waiting requests of one channel for one model, lowest (priority, position) first.

    Removal only forgets the name; what is left in the heap is skipped when it
    surfaces, so every operation takes O(log n).
    """

    def __init__(self, model: str) -> None:
        """Make an empty line of requests that ask for `model` ("" accepts any)."""
        self.model = model
        self._heap: list[tuple[int, int, str]] = []
        self._live: dict[str, Entry] = {}

    def __len__(self) -> int:
        """Return the number of requests in line."""
        return len(self._live)

    def enter(self, entry: Entry) -> None:
        """Put the entry at its position."""
        self._live[entry.request_id] = entry
        heapq.heappush(self._heap, order(entry))

    def leave(self, entry: Entry) -> None:
        """Take the entry out; it must be in line."""
        del self._live[entry.request_id]
        if len(self._heap) > 2 * len(self._live) + STALE_ALLOWANCE:
            self._heap = [order(live) for live in self._live.values()]
            heapq.heapify(self._heap)

    def head(self) -> Entry | None:
        """Return the entry whose turn it is, None if the line is empty."""
        while self._heap:
            entry = self._live.get(self._heap[0][2])
            if entry is not None and order(entry) == self._heap[0]:
                return entry
            heapq.heappop(self._heap)
        return None


def order(entry: Entry) -> tuple[int, int, str]:
    """Return what the line is ordered by; the name makes it total."""
    return entry.announced.priority, entry.announced.position, entry.request_id


class Channel:
    """A channel's lines and its standing with the arbiter.

    `deficit_blocks` is what the channel may still take in this round; a refund
    gives back what it was charged too much. An empty channel neither saves nor owes.
    """

    def __init__(self, name: str, share: Share, quantum_blocks: int) -> None:
        """Make an empty channel that gains `quantum_blocks` a round."""
        self.name = name
        self.share = share
        self.quantum_blocks = quantum_blocks
        self.deficit_blocks = 0
        self.lines: dict[str, Line] = {}
        self._waiting = 0

    def __len__(self) -> int:
        """Return the number of requests waiting."""
        return self._waiting

    def enter(self, entry: Entry) -> None:
        """Put an announced entry into its line."""
        model = entry.announced.model
        line = self.lines.get(model)
        if line is None:
            line = self.lines[model] = Line(model)
        line.enter(entry)
        self._waiting += 1

    def leave(self, entry: Entry) -> None:
        """Take an entry out of its line."""
        line = self.lines[entry.announced.model]
        line.leave(entry)
        self._waiting -= 1
        if not line:
            del self.lines[line.model]
        if not self._waiting:
            self.deficit_blocks = 0

    def heads(self) -> list[tuple[Line, Entry]]:
        """Return each line with its head, in the order in which the heads would leave."""
        found = [(line, head) for line in self.lines.values() if (head := line.head()) is not None]
        if len(found) > 1:
            found.sort(key=lambda pair: order(pair[1]))
        return found

    def charge(self, blocks: int, most_debt_blocks: int) -> None:
        """Pay for a grant; what idle blocks were lent beyond the deficit is owed up to a bound."""
        self.deficit_blocks = max(self.deficit_blocks - blocks, -most_debt_blocks)

    def refund(self, blocks: int) -> None:
        """Take back what a grant was charged too much; a channel without work does not save."""
        if self._waiting:
            self.deficit_blocks += blocks
