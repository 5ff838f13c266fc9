"""Room for what of uploads is in memory: as many places as there is room for; who finds none waits, unread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from penstock.limits import PART_BYTES
from services.gateway.intake import CLOSE
from services.gateway.limits import MAX_FILLING, PART_TIMEOUT_S, RETRY_AFTER_S
from services.gateway.problem import Problem


class Room:
    """The places of all uploads of a gateway."""

    def __init__(self, places: int = MAX_FILLING, part_timeout_s: float = PART_TIMEOUT_S) -> None:
        """Have `places` uploads hold a part that fills and one that is being sent each.

        While others wait a part has `part_timeout_s` to fill, so that clients that send next to nothing keep no place.
        """
        self._free = asyncio.Semaphore(places)
        self._part_timeout_s = part_timeout_s
        self._since_s: dict[Place, float] = {}
        """When the part of each place began to fill (loop's time), the oldest first."""
        self._waiting = 0
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Place]:
        """Wait for a place, and have it."""
        place = Place(self)
        await self.take(place)
        try:
            yield place
        finally:
            if place.taken:
                self.give(place)

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for a place."""
        return self._waiting > 0

    async def take(self, place: Place) -> None:
        """Wait until there is a free place, and have it."""
        self._waiting += 1
        self._watch()
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        place.taken = True

    def give(self, place: Place) -> None:
        """Leave a place to the next."""
        place.taken = False
        self._free.release()

    @asynccontextmanager
    async def filling(self, place: Place) -> AsyncIterator[None]:
        """Read inside, part after part. Raises Problem when that takes longer than it may."""
        self.begin(place)
        try:
            async with place.over:
                yield
        except TimeoutError:
            if not place.over.expired():
                raise
            text = f"others wait to upload, and {PART_BYTES} bytes did not come in {self._part_timeout_s:g} s"
            raise Problem(503, text, "", "overloaded", {**CLOSE, "retry-after": str(RETRY_AFTER_S)}) from None
        finally:
            self._since_s.pop(place, None)

    def pause(self, place: Place) -> None:
        """Leave a place to the next while nothing is read."""
        self._since_s.pop(place, None)
        self.give(place)

    def begin(self, place: Place) -> None:
        """Note that another part begins to fill."""
        self._since_s.pop(place, None)
        if not place.over.expired():
            self._since_s[place] = asyncio.get_running_loop().time()
            self._watch()

    def _watch(self) -> None:
        """Look at the oldest part when its time is over, if anybody waits."""
        if self._timer is None and self._waiting and self._since_s:
            due_s = next(iter(self._since_s.values())) + self._part_timeout_s
            self._timer = asyncio.get_running_loop().call_at(due_s, self._end_oldest)

    def _end_oldest(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        place, since_s = next(iter(self._since_s.items()), (None, now_s))
        if self._waiting and place is not None and since_s + self._part_timeout_s <= now_s:
            del self._since_s[place]
            place.over.reschedule(now_s)
        self._watch()


class Place:
    """One upload's place."""

    def __init__(self, room: Room) -> None:
        """Have none of the places of `room` yet."""
        self._room = room
        self.over = asyncio.timeout(None)
        self.taken = False

    @property
    def wanted(self) -> bool:
        """Whether others wait for it."""
        return self._room.wanted

    def filling(self) -> AbstractAsyncContextManager[None]:
        """Return what to read in: it raises Problem when a part takes longer than it may."""
        return self._room.filling(self)

    async def go_on(self) -> None:
        """Begin another part, after those who wait: nothing is to be in memory if it is wanted."""
        if self.wanted:
            self._room.pause(self)
            await self._room.take(self)
        self._room.begin(self)
