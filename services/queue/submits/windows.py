"""How much of what one stream submits may be under way: its reader waits while it is too much."""

from __future__ import annotations

import asyncio


class Window:
    """What is under way of one stream, which alone waits for it."""

    def __init__(self, most: int) -> None:
        """Have room while less than `most` is under way."""
        self._most = most
        self._count = 0
        self._room = asyncio.Event()
        self._room.set()

    async def enter(self, count: int) -> None:
        """Wait for room, and take `count` of it, which may be more than there is."""
        while not self._room.is_set():
            await self._room.wait()
        self._count += count
        if self._count >= self._most:
            self._room.clear()

    def leave(self, count: int) -> None:
        """Give back what was taken."""
        self._count -= count
        if self._count < self._most:
            self._room.set()
