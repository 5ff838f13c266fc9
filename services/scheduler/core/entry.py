"""What the scheduler keeps of one request that has not been claimed yet."""

from __future__ import annotations

from services.scheduler.core.fleet import Group, Pool
from services.scheduler.core.lifecycle import State
from services.scheduler.core.messages import Announced

Wanted = tuple[Group, int, int]
"""A group of workers that may get a request, what the request would book there and what it is proven to need."""


class Options:
    """Where requests of one model that book alike may run: the groups of workers, in the order in which these came.

    One object serves all such requests; what it holds is to be read and not changed.
    """

    __slots__ = ("_by_pool", "booked_blocks", "by_group", "least_blocks", "needed_blocks", "pool", "serving", "wanted")

    def __init__(self, wanted: list[Wanted], booked_blocks: int, serving: list[Group]) -> None:
        """Take the groups that may get such a request, those that serve its model, and the least that the policy would
        book in any of these.

        That may be more than is booked: where no worker has what the policy books, the largest book all they have.
        """
        self.serving = serving
        """Those of all pools."""
        self.wanted = wanted
        self.booked_blocks = booked_blocks
        self.least_blocks = min((blocks for _, blocks, _ in wanted), default=0)
        """The smallest of the bookings."""
        self.by_group = {each[0]: each for each in wanted}
        self.needed_blocks = {group: max(blocks, least_blocks) for group, blocks, least_blocks in wanted}
        """What a worker must have to hold such a request, by group."""
        first = wanted[0][0].pool if wanted else None
        self.pool = first if all(group.pool is first for group in self.by_group) else None
        """The pool of all of them, None if they are of several."""
        self._by_pool: dict[Pool, Options] | None = None

    def in_pool(self, pool: Pool) -> Options:
        """Return those of one pool."""
        if self.pool is pool:
            return self
        if self._by_pool is None:
            found: dict[Pool, list[Wanted]] = {}
            for each in self.wanted:
                found.setdefault(each[0].pool, []).append(each)
            self._by_pool = {each: Options(wanted, self.booked_blocks, self.serving) for each, wanted in found.items()}
        return self._by_pool.get(pool) or Options([], self.booked_blocks, self.serving)


class Booked:
    """What a request books where tokens are counted into blocks alike, as far as that was asked for, of when the policy
    had learned `lessons`.

    `options` is where it may run, of when the fleet had changed `fleet_changes` times; None until asked for.
    """

    __slots__ = ("by_geometry", "fleet_changes", "lessons", "options")

    def __init__(self, lessons: int, fleet_changes: int) -> None:
        """Know nothing yet."""
        self.lessons = lessons
        self.fleet_changes = fleet_changes
        self.by_geometry: dict[int, tuple[int, int]] = {}
        self.options: Options | None = None


class Entry:
    """One request: what was announced of it, its state, and the epoch that holds credits for it (0: none).

    `request` is None for a request known from an inventory only. `booked` keeps what it books where, which a waiting
    head is asked for at every pass; None as long as nobody asked, as of nearly all that wait. `had_room_ns` is when
    lower tiers last left it room, -1 if they never did. `stepped_back` is whether what it had paid was paid back for
    an older one.
    """

    __slots__ = ("announced_ns", "booked", "epoch", "had_room_ns", "request", "request_id", "state", "stepped_back")

    def __init__(self, request_id: str) -> None:
        """Begin absent."""
        self.request_id = request_id
        self.state = State.ABSENT
        self.request: Announced | None = None
        self.announced_ns = 0
        self.had_room_ns = -1
        self.stepped_back = False
        self.epoch = 0
        self.booked: Booked | None = None

    @property
    def announced(self) -> Announced:
        """What was announced of it; raises LookupError if nothing was."""
        if self.request is None:
            raise LookupError(f"{self.request_id} has not been announced")
        return self.request

    def announce(self, request: Announced, now_ns: int) -> None:
        """Take new metadata, announced at `now_ns`."""
        self.request = request
        self.announced_ns = now_ns
        self.booked = None
