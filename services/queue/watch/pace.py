"""How often watchers of batches are told: however many there are, the loop has time for others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

GAP_S = 0.0005
"""Between two watchers that are told, at least: to write a frame to one takes a fifth of a millisecond, so that all of
them together take less than half of the loop. What comes while one waits for its place is in the same frame: of a
thousand that watch one batch each is told at most twice a second what has ended in it."""

TOLD_AT_ONCE = 16
"""Watchers that need not wait for a gap after a while in which few were told."""


class Pace:
    """A line of watchers that have news, of whom one is let on after the other."""

    def __init__(
        self,
        gap_s: float = GAP_S,
        at_once: int = TOLD_AT_ONCE,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Let one on every `gap_s` seconds, and `at_once` together if none was for so many gaps; wait with `sleep`."""
        self._gap_s = gap_s
        self._unused_s = gap_s * (at_once - 1)
        self._sleep = sleep
        self._line = asyncio.Lock()
        self._due_s = -math.inf
        """When the next may be let on (loop's time); the first one any time."""

    async def place(self) -> None:
        """Wait for a place; one who is cancelled meanwhile takes none."""
        async with self._line:
            now_s = asyncio.get_running_loop().time()
            due_s = max(self._due_s, now_s - self._unused_s)
            if due_s > now_s:
                await self._sleep(due_s - now_s)
            self._due_s = due_s + self._gap_s
