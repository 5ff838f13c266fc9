"""Every request the scheduler knows of that has not been claimed yet, and where it is in that part of its life.

    absent ── announced ──▶ waiting ── booked ──▶ granted ── claimed ──▶ absent

The two streams a request is heard of on, Backlog and Credits, are ordered each
in itself but not with each other, and both can break. Three more states keep that
harmless. The rule behind them: *a request may wait only if the queue announced
it on the present Backlog stream*, because only then will `Gone` tell of its end.

- unlisted: a worker holds credits for it, the queue has not announced it on the present stream
  (it was granted under an earlier one, or is known from a worker's inventory only);
- relisted: a worker holds credits for it, and the queue has announced it since. If the credits come home for
  whatever reason and the queue has not said `Gone`, it still waits. A claim too many is refused by the queue;
  a request forgotten here would wait for ever;
- parted: its credits came home as if it had been claimed, and the queue's `Gone` is on its way. If that does not
  come, the worker was wrong, and it still waits.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from itertools import takewhile
from typing import Final

from services.scheduler.core.fleet import Group, Pool
from services.scheduler.core.messages import Announced


class State(enum.Enum):
    """Where a request is between its announcement and its claim."""

    __hash__ = object.__hash__  # as good for singletons as Enum's own, which is a call into Python at every look-up

    ABSENT = "absent"
    WAITING = "waiting"
    GRANTED = "granted"
    UNLISTED = "unlisted"
    RELISTED = "relisted"
    PARTED = "parted"


class Event(enum.Enum):
    """What can happen to it."""

    __hash__ = object.__hash__  # as good for singletons as Enum's own, which is a call into Python at every look-up

    ANNOUNCED = "announced"  # for the first time, or again with the attempt that is known
    REATTEMPTED = "reattempted"  # announced with a higher attempt: the granted one has failed meanwhile
    BOOKED = "booked"
    ADOPTED = "adopted"  # a worker's inventory names it
    CLAIMED = "claimed"
    ENDED = "ended"
    RETURNED = "returned"  # its credits came home and nobody has claimed it
    RELEASED = "released"  # its credits came home after the claim, or because the claim was refused
    BACKLOG_LOST = "backlog_lost"
    OVERDUE = "overdue"  # the queue has not said that a parted one is gone


class Action(enum.Enum):
    """What the machine must do besides changing the state."""

    __hash__ = object.__hash__  # as good for singletons as Enum's own, which is a call into Python at every look-up

    NONE = "none"
    ENTER = "enter"  # its line, at its position
    LEAVE = "leave"  # its line
    REENTER = "reenter"  # leave, take the new metadata, enter
    RECALL = "recall"  # the grant, from its worker


LIFECYCLE: Final[dict[tuple[State, Event], tuple[State, Action]]] = {
    (State.ABSENT, Event.ANNOUNCED): (State.WAITING, Action.ENTER),
    (State.ABSENT, Event.ADOPTED): (State.UNLISTED, Action.NONE),
    (State.WAITING, Event.ANNOUNCED): (State.WAITING, Action.REENTER),
    (State.WAITING, Event.BOOKED): (State.GRANTED, Action.LEAVE),
    (State.WAITING, Event.ADOPTED): (State.RELISTED, Action.LEAVE),
    (State.WAITING, Event.CLAIMED): (State.ABSENT, Action.LEAVE),
    (State.WAITING, Event.ENDED): (State.ABSENT, Action.LEAVE),
    (State.WAITING, Event.BACKLOG_LOST): (State.ABSENT, Action.LEAVE),
    (State.GRANTED, Event.ANNOUNCED): (State.RELISTED, Action.NONE),
    (State.GRANTED, Event.REATTEMPTED): (State.WAITING, Action.ENTER),
    (State.GRANTED, Event.CLAIMED): (State.ABSENT, Action.NONE),
    (State.GRANTED, Event.ENDED): (State.ABSENT, Action.RECALL),
    (State.GRANTED, Event.RETURNED): (State.WAITING, Action.ENTER),
    (State.GRANTED, Event.RELEASED): (State.PARTED, Action.NONE),
    (State.GRANTED, Event.BACKLOG_LOST): (State.UNLISTED, Action.NONE),
    (State.UNLISTED, Event.ANNOUNCED): (State.RELISTED, Action.NONE),
    (State.UNLISTED, Event.REATTEMPTED): (State.WAITING, Action.ENTER),
    (State.UNLISTED, Event.RETURNED): (State.ABSENT, Action.NONE),
    (State.UNLISTED, Event.RELEASED): (State.ABSENT, Action.NONE),
    (State.UNLISTED, Event.BACKLOG_LOST): (State.UNLISTED, Action.NONE),
    (State.RELISTED, Event.ANNOUNCED): (State.RELISTED, Action.NONE),
    (State.RELISTED, Event.REATTEMPTED): (State.WAITING, Action.ENTER),
    (State.RELISTED, Event.CLAIMED): (State.ABSENT, Action.NONE),
    (State.RELISTED, Event.ENDED): (State.ABSENT, Action.RECALL),
    (State.RELISTED, Event.RETURNED): (State.WAITING, Action.ENTER),
    (State.RELISTED, Event.RELEASED): (State.WAITING, Action.ENTER),
    (State.RELISTED, Event.BACKLOG_LOST): (State.UNLISTED, Action.NONE),
    (State.PARTED, Event.ANNOUNCED): (State.WAITING, Action.ENTER),
    (State.PARTED, Event.REATTEMPTED): (State.WAITING, Action.ENTER),
    (State.PARTED, Event.ADOPTED): (State.RELISTED, Action.NONE),
    (State.PARTED, Event.CLAIMED): (State.ABSENT, Action.NONE),
    (State.PARTED, Event.ENDED): (State.ABSENT, Action.NONE),
    (State.PARTED, Event.BACKLOG_LOST): (State.ABSENT, Action.NONE),
    (State.PARTED, Event.OVERDUE): (State.WAITING, Action.ENTER),
}
"""(state, event) -> (next state, action). A pair that is absent is refused: it changes nothing and is counted."""


GONE_WITHIN_NS = 2_000_000_000
"""How long after a completion ACK the queue's `Gone` is waited for. The queue says it when it takes the claim, before
the run begins; it comes later only on a Backlog stream far behind the Credits stream, and then a claim is refused."""


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


class Backlog:
    """The entries by request name, and how many wait in each channel."""

    def __init__(self) -> None:
        """Start empty."""
        self._entries: dict[str, Entry] = {}
        self.waiting: defaultdict[str, int] = defaultdict(int)
        self.refused: defaultdict[str, int] = defaultdict(int)
        self._parted_ns: dict[str, int] = {}

    def __len__(self) -> int:
        """Return the number of requests known."""
        return len(self._entries)

    def get(self, request_id: str) -> Entry | None:
        """Return the entry of the request, None if it is absent."""
        return self._entries.get(request_id)

    def entries(self) -> list[Entry]:
        """Return all entries; a copy, so that they may change state while it is read."""
        return list(self._entries.values())

    def names(self) -> list[str]:
        """Return the names of all entries."""
        return list(self._entries)

    def apply(self, request_id: str, event: Event) -> tuple[Entry, Action] | None:
        """Move the request through the table; None if the table refuses.

        The entry's channel and epoch are its caller's to keep, the waiting counts are kept here.
        """
        entry = self._entries.get(request_id) or Entry(request_id)
        step = LIFECYCLE.get((entry.state, event))
        if step is None:
            self.refused[event.value] += 1
            return None
        if entry.state is State.WAITING:
            self.waiting[entry.announced.channel] -= 1
        elif entry.state is State.PARTED:
            del self._parted_ns[request_id]
        was_absent = entry.state is State.ABSENT
        entry.state, action = step
        if entry.state is State.ABSENT:
            self._entries.pop(request_id, None)
        elif was_absent:
            self._entries[request_id] = entry
        return entry, action

    def part(self, entry: Entry, now_ns: int) -> None:
        """Note since when an entry is parted; it is no epoch's any more."""
        entry.epoch = 0
        self._parted_ns[entry.request_id] = now_ns

    def is_parted(self, entry: Entry) -> bool:
        """Return whether it is noted since when the entry is parted."""
        return entry.request_id in self._parted_ns

    def overdue(self, now_ns: int) -> list[str]:
        """Return the parted requests that the queue should have said `Gone` of by now."""
        return [*takewhile(lambda name: now_ns - self._parted_ns[name] >= GONE_WITHIN_NS, self._parted_ns)]

    def count(self, entry: Entry) -> None:
        """Count an entry that now stands in its line."""
        self.waiting[entry.announced.channel] += 1
