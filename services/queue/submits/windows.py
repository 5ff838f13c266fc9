"""How much of what clients submit may be under way: readers of streams, and calls, wait while it is too much."""

from __future__ import annotations

import asyncio
from collections import OrderedDict


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


class SharedWindow:
    """What is under way of all tenants. They take turns at what room there is, each with what waits longest of it.

    So a tenant with thousands of calls that wait for room keeps another's single call waiting for one of them.
    """

    def __init__(self, most: int) -> None:
        """Have room while less than `most` is under way."""
        self._most = most
        self._count = 0
        self._lines: OrderedDict[str, OrderedDict[asyncio.Future[None], int]] = OrderedDict()
        """Who waits for how much, by tenant; the tenant whose turn is next is first."""

    async def enter(self, tenant: str, count: int, goes_on: bool = False) -> None:
        """Wait for room, and take `count` of it, which may be more than there is.

        What `goes_on` with something that had its turn comes before what else waits of its tenant.
        """
        if self._count < self._most and not self._lines:
            self._count += count
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line = self._lines.setdefault(tenant, OrderedDict())
        line[turn] = count
        if goes_on:
            line.move_to_end(turn, last=False)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(tenant, turn)
            else:  # it was let in, and went before it knew
                self.leave(count)
            raise

    def leave(self, count: int) -> None:
        """Give back what was taken, and let those in whose turn it is."""
        self._count -= count
        while self._lines and self._count < self._most:
            tenant, line = self._lines.popitem(last=False)
            turn, wanted = line.popitem(last=False)
            while turn.cancelled() and line:  # it has gone, which costs its tenant no turn
                turn, wanted = line.popitem(last=False)
            if line:
                self._lines[tenant] = line
            if not turn.cancelled():
                self._count += wanted
                turn.set_result(None)

    def _forget(self, tenant: str, turn: asyncio.Future[None]) -> None:
        """Keep nothing of one that went while it waited."""
        line = self._lines.get(tenant)
        if line is not None and turn in line:
            del line[turn]
            if not line:
                del self._lines[tenant]
