"""What the scheduler keeps of one request that has not been claimed yet."""

from __future__ import annotations

from services.scheduler.core.fleet import Group, Pool
from services.scheduler.core.lifecycle import State
from services.scheduler.core.messages import Announced

Wanted = tuple[Group, int, int]
"""A group of workers that may get a request, what the request would book there and what it is proven to need."""


class Booked:
    """What a request books in the groups of workers looked at so far, of when the policy had learned `lessons`.

    `wanted` are the groups that may get it and `by_pool` the same for each of several pools, of when the fleet had
    changed `fleet_changes` times; None until asked for.
    """

    __slots__ = ("by_group", "by_pool", "fleet_changes", "lessons", "wanted")

    def __init__(self, lessons: int, fleet_changes: int) -> None:
        """Know nothing yet."""
        self.lessons = lessons
        self.fleet_changes = fleet_changes
        self.by_group: dict[Group, tuple[int, int]] = {}
        self.wanted: list[Wanted] | None = None
        self.by_pool: dict[Pool, list[Wanted]] | None = None


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
