"""Virtual time: actions in order of the moment they are due. Nothing sleeps."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

MS = 1_000_000
SECOND_NS = 1_000_000_000


class Clock:
    """The one source of time of a simulated run; times in ns since its start."""

    def __init__(self) -> None:
        """Begin at 0 with nothing to do."""
        self.now_ns = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when_ns: int, action: Callable[[], None]) -> None:
        """Do `action` at `when_ns`, after what is due then already."""
        heapq.heappush(self._heap, (max(when_ns, self.now_ns), next(self._order), action))

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Do `action` in `delay_ns`."""
        self.at(self.now_ns + delay_ns, action)

    def step(self) -> bool:
        """Do the next action; False if there is none."""
        if not self._heap:
            return False
        self.now_ns, _, action = heapq.heappop(self._heap)
        action()
        return True
