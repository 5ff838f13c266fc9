"""Places in the gateway's memory, or at what it does a few of at a time: as many as there is room for, had by turns.

An upload has one for the part that fills and the one on its way to the queue, a download one for each MiB that it
holds, and a look at a request or a count of a batch one while it is under way. Who finds none waits in its tenant's
line. An upload that comes too slowly, or a download that its client does not take, loses its place when others wait.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from penstock.limits import PART_BYTES
from services.gateway.limits import MAX_FILLING, PART_SLACK_S, PART_TIMEOUT_S
from services.rpc.waiters import Waiters

HELD_BYTES = 64 * 1024
"""Of an upload without a place: as much as the server reads of a connection whose request nobody reads."""

SHARE = 3
"""A tenant takes a place only while it has less than so many for each that is free: one alone has three quarters of
them, and a second finds one without waiting."""


class WantedError(Exception):
    """Others wait for a place, and too little comes for the part that it is for."""


class Places(Waiters):
    """All places of one kind that a gateway has."""

    def __init__(
        self, places: int = MAX_FILLING, part_timeout_s: float = PART_TIMEOUT_S, slack_s: float = PART_SLACK_S
    ) -> None:
        """Have so many, by default what there is for uploads.

        Where others wait for it, a part is to come as fast as one in `part_timeout_s`, but for pauses of `slack_s`.
        """
        super().__init__()
        self.most = places
        self._free = places
        self._byte_s = part_timeout_s / PART_BYTES
        self._slack_s = slack_s
        self._had: Counter[str] = Counter()
        """Places by tenant."""
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

    def is_wanted_of(self, tenant: str) -> bool:
        """Whether one waits who is to have a place of this tenant's: its own, or of a tenant that has fewer."""
        had = self._had[tenant]
        return tenant in self._lines or any(self._had[one] < had for one in self._lines)

    async def take(self, tenant: str, places: int = 1) -> None:
        """Wait for so many places of this tenant's, no more than there are, and have them."""
        waiter = self._join(tenant, places)
        self._watch()
        await self._until_in(waiter)

    def give(self, tenant: str, places: int = 1) -> None:
        """Leave so many places of this tenant's to the next."""
        self._free += places
        self._had[tenant] -= places
        if not self._had[tenant]:
            del self._had[tenant]
        self._let_in()

    def _give(self, tenant: str, amount: int) -> None:
        self.give(tenant, amount)

    def _take(self, tenant: str, amount: int) -> None:
        self._free -= amount
        self._had[tenant] += amount

    def _next(self, firsts: Iterator[tuple[str, int]]) -> str | None:
        """Return whose turn it is, None while nothing is free that one may have.

        Who wants more than is free is the next, and is passed by those alone who have little by then.
        """
        most = None
        for tenant, places in firsts:
            if not self._may_have(tenant, places):
                continue
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
        others = (self._had.keys() | self._lines.keys()) - {tenant}
        return max(self._had[tenant], (self.most - places) // max(1, len(others)))

    def _may_have(self, tenant: str, places: int) -> bool:
        """Whether a tenant may have so many more, once they are free."""
        return self._had[tenant] + places <= SHARE * max(self._free, places)

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
        if self._timer is not None or self.waiting <= len(self._ending):
            return
        due_s = min((place.due_s for place in self._wanted()), default=None)
        if due_s is not None:
            self._timer = asyncio.get_running_loop().call_at(due_s, self._end_latest)

    def _wanted(self) -> Iterator[Place]:
        return (place for place in self._listening if self.is_wanted_of(place.tenant))

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
    """What one of a tenant has of the places, or wants of them."""

    def __init__(self, places: Places, tenant: str) -> None:
        """Have none of them yet."""
        self._places = places
        self._had = 0
        """So many places."""
        self._left_s = 0.0
        """Of listening, until more is to have come."""
        self.tenant = tenant
        self.over = asyncio.timeout(None)
        self.due_s = 0.0
        """When that is over (loop's time)."""

    @property
    def is_wanted(self) -> bool:
        """Whether it is had, and others wait for it."""
        return self._had > 0 and self._places.is_wanted_of(self.tenant)

    async def take(self, places: int = 1) -> None:
        """Wait for it in the tenant's line, unless it is had; it may be several, up to all there are."""
        if not self._had:
            places = min(places, self._places.most)
            await self._places.take(self.tenant, places)
            self._had = places
            self._left_s = self._places.left_s(float("inf"), 0)

    def give(self) -> None:
        """Leave it to the next, if it is had."""
        if self._had:
            self.keep(0)
            self._places.ended(self)

    def keep(self, places: int) -> None:
        """Leave all but so many to the next."""
        had, self._had = self._had, min(self._had, places)
        if had > self._had:
            self._places.give(self.tenant, had - self._had)

    def end(self) -> None:
        """Be too late."""
        self.over.reschedule(asyncio.get_running_loop().time())

    def came(self, size_bytes: int) -> None:
        """Note that so much came."""
        self._left_s = self._places.left_s(self._left_s, size_bytes)

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
                with self._places.listening(self):
                    yield
        except TimeoutError:
            if not self.over.expired():
                raise
            raise WantedError from None
        else:
            self._places.stays(self)
        finally:
            self._left_s = self.due_s - now_s()
