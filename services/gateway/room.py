"""Room for what of uploads is in memory: as many places as there is room for; who finds none waits for its turn.

A place is for what fills a part or is on its way to the queue. Who has sent no more than any connection holds anyway
(`HELD_BYTES`) needs none, so that clients that send next to nothing keep none either.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple

from penstock.limits import PART_BYTES
from services.gateway.limits import MAX_FILLING, PART_SLACK_S, PART_TIMEOUT_S

HELD_BYTES = 64 * 1024
"""Of an upload without a place: as much as the server reads of a connection whose request nobody reads."""

SHARE = 3
"""A tenant takes a place only while it has less than so many for each that is free: one alone has three quarters of
them, and a second finds one without waiting."""


class WantedError(Exception):
    """Others wait for a place, and too little comes for the part that it is for."""


class Want(NamedTuple):
    """Of one who waits."""

    future: asyncio.Future[None]
    places: int


class Room:
    """The places of all uploads of a gateway."""

    def __init__(
        self, places: int = MAX_FILLING, part_timeout_s: float = PART_TIMEOUT_S, slack_s: float = PART_SLACK_S
    ) -> None:
        """Have `places` uploads hold a part that fills and one that is being sent each.

        Where others wait for it, a part is to come as fast as one in `part_timeout_s`, but for pauses of `slack_s`.
        """
        self.most = places
        self._free = places
        self._byte_s = part_timeout_s / PART_BYTES
        self._slack_s = slack_s
        self._had: Counter[str] = Counter()
        """Places by tenant."""
        self._waiting: dict[str, deque[Want]] = {}
        """By tenant, the next one first."""
        self._listening: set[Place] = set()
        self._ending: set[Place] = set()
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[Place]:
        """Have a place inside whenever it is taken."""
        place = Place(self, tenant)
        try:
            yield place
        finally:
            place.give()

    def is_wanted(self, tenant: str) -> bool:
        """Whether one waits who is to have a place of this tenant's: its own, or of a tenant that has fewer."""
        had = self._had[tenant]
        return tenant in self._waiting or any(self._had[one] < had for one in self._waiting)

    async def take(self, tenant: str, places: int = 1) -> None:
        """Wait for so many places of this tenant's, no more than there are, and have them."""
        want = Want(asyncio.get_running_loop().create_future(), places)
        self._waiting.setdefault(tenant, deque()).append(want)
        self._hand_out()
        self._watch()
        try:
            await want.future
        except asyncio.CancelledError:
            if want.future.cancelled():
                self._leave(tenant, want)
            else:
                self.give(tenant, places)  # they were had in the same moment
            raise

    def give(self, tenant: str, places: int = 1) -> None:
        """Leave so many places of this tenant's to the next."""
        self._free += places
        self._had[tenant] -= places
        if not self._had[tenant]:
            del self._had[tenant]
        self._hand_out()

    def _hand_out(self) -> None:
        """Let those who may have a place have it; tenants have turns."""
        while (tenant := self._next()) is not None:
            line = self._waiting.pop(tenant)
            future, places = line.popleft()
            if line:
                self._waiting[tenant] = line  # behind all others
            if not future.done():  # else who waited was stopped, and has not left yet
                self._free -= places
                self._had[tenant] += places
                future.set_result(None)

    def _next(self) -> str | None:
        """Return whose turn it is, None while nothing is free that one may have.

        Who wants more than is free is the next, and is passed by those alone who have little by then.
        """
        most = None
        for tenant in filter(self._may_have, self._waiting):
            places = self._waiting[tenant][0].places
            if places <= self._free and (most is None or self._had[tenant] + places <= most):
                return tenant
            if most is None:
                most = self._beside(tenant, places)
        return None

    def _beside(self, tenant: str, places: int) -> int:
        """Return how many places each other tenant may come to have before this one, which waits for so many.

        As many as this one has, which are fewer with each that it gives, as it is had by no more of its own meanwhile;
        and so many that all of them leave it what it waits for. So it waits for those that are had, and not for ever.
        """
        others = (self._had.keys() | self._waiting.keys()) - {tenant}
        return max(self._had[tenant], (self.most - places) // max(1, len(others)))

    def _may_have(self, tenant: str) -> bool:
        """Whether a tenant may have what the first of its line wants, once that is free."""
        places = self._waiting[tenant][0].places
        return self._had[tenant] + places <= SHARE * max(self._free, places)

    def _leave(self, tenant: str, want: Want) -> None:
        line = self._waiting.get(tenant, deque())
        if want in line:
            line.remove(want)
            if not line:
                del self._waiting[tenant]
            self._hand_out()  # to those that this one let not pass

    # ---- those that are too slow ----

    def left_s(self, left_s: float, size_bytes: int) -> float:
        """Return for how long more may be waited for when so much has come."""
        return min(left_s + size_bytes * self._byte_s, self._slack_s)

    @contextmanager
    def listening(self, place: Place) -> Iterator[None]:
        """Wait for more inside; what is too late then may be ended."""
        self._listening.add(place)
        self._watch()
        try:
            yield
        finally:
            self._listening.discard(place)

    def stays(self, place: Place) -> None:
        """Note that more came for it, were it in the moment in which it was to end."""
        if place in self._ending:
            self.ended(place)

    def ended(self, place: Place) -> None:
        """Note that what was to end has ended, or was given."""
        self._ending.discard(place)
        self._watch()

    def _watch(self) -> None:
        """Look at the places when the first of them is late, if there are more who wait than places that are ending."""
        if self._timer is not None or sum(map(len, self._waiting.values())) <= len(self._ending):
            return
        due_s = min((place.due_s for place in self._wanted()), default=None)
        if due_s is not None:
            self._timer = asyncio.get_running_loop().call_at(due_s, self._end_latest)

    def _wanted(self) -> Iterator[Place]:
        return (place for place in self._listening if self.is_wanted(place.tenant))

    def _end_latest(self) -> None:
        """End the latest, of the tenant that has the most places."""
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        late = [place for place in self._wanted() if place.due_s <= now_s]
        if late:
            latest = min(late, key=lambda place: (-self._had[place.tenant], place.due_s))
            self._listening.discard(latest)
            self._ending.add(latest)
            latest.end()
        self._watch()


class Place:
    """One upload's place, or the want of one."""

    def __init__(self, room: Room, tenant: str) -> None:
        """Have none of the places of `room` yet."""
        self._room = room
        self._had = 0
        """Places of the room."""
        self._left_s = 0.0
        """Of listening, until more is to have come."""
        self.tenant = tenant
        self.over = asyncio.timeout(None)
        self.due_s = 0.0
        """When that is over (loop's time)."""

    @property
    def is_wanted(self) -> bool:
        """Whether it is had, and others wait for it."""
        return self._had > 0 and self._room.is_wanted(self.tenant)

    async def take(self, places: int = 1) -> None:
        """Wait for it in the tenant's line, unless it is had; it may be several, up to all there are."""
        if not self._had:
            places = min(places, self._room.most)
            await self._room.take(self.tenant, places)
            self._had = places
            self._left_s = self._room.left_s(float("inf"), 0)

    def give(self) -> None:
        """Leave it to the next, if it is had."""
        if self._had:
            self.keep(0)
            self._room.ended(self)

    def keep(self, places: int) -> None:
        """Leave all but so many to the next."""
        had, self._had = self._had, min(self._had, places)
        if had > self._had:
            self._room.give(self.tenant, had - self._had)

    def end(self) -> None:
        """Be too late."""
        self.over.reschedule(asyncio.get_running_loop().time())

    def came(self, size_bytes: int) -> None:
        """Note that so much came."""
        self._left_s = self._room.left_s(self._left_s, size_bytes)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Wait for more inside. Raises WantedError when that takes too long for those who wait for the place."""
        if not self._had:
            yield
            return
        now_s = asyncio.get_running_loop().time
        self.due_s = now_s() + self._left_s
        try:
            async with asyncio.timeout(None) as self.over:
                with self._room.listening(self):
                    yield
        except TimeoutError:
            if not self.over.expired():
                raise
            raise WantedError from None
        else:
            self._room.stays(self)
        finally:
            self._left_s = self.due_s - now_s()
