"""Every request the scheduler knows of that has not been claimed yet, each where the table (`lifecycle`) has it."""

from __future__ import annotations

from collections import defaultdict
from itertools import takewhile

from services.scheduler.core.entry import Entry
from services.scheduler.core.lifecycle import LIFECYCLE, Event, State
from services.scheduler.core.messages import Announced
from services.scheduler.core.roster import Roster

GONE_WITHIN_NS = 2_000_000_000
"""How long after a completion ACK the queue's `Gone` is waited for. The queue says it when it takes the claim, before
the run begins; it comes later only on a Backlog stream far behind the Credits stream, and then a claim is refused."""


class Backlog:
    """The entries by request name. Owns their states and all that follows from these (`LIFECYCLE`)."""

    def __init__(self, roster: Roster) -> None:
        """Start empty; requests wait in the lines of the channels of `roster`."""
        self._roster = roster
        self._entries: dict[str, Entry] = {}
        self.waiting: defaultdict[str, int] = defaultdict(int)
        """How many wait, by channel."""
        self.refused: defaultdict[str, int] = defaultdict(int)
        """What the table refused, by event."""
        self._parted_ns: dict[str, int] = {}
        """Since when each parted one is, in the order in which they parted."""

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

    def apply(
        self, request_id: str, event: Event, now_ns: int, request: Announced | None = None, epoch: int = 0
    ) -> Entry | None:
        """Move the request through the table; return its entry, None if the table refuses.

        `request` is what is announced of it by the event, `epoch` the one that holds credits for it from the event on.
        An entry that is absent by now still names the epoch that holds credits for it.
        """
        entry = self._entries.get(request_id) or Entry(request_id)
        after = LIFECYCLE.get((entry.state, event))
        if after is None:
            self.refused[event.value] += 1
            return None
        self._take_out(entry)
        entry.state = after
        if request is not None:
            entry.announce(request, now_ns)
        if epoch:
            entry.epoch = epoch
        self._put_in(entry, now_ns)
        return entry

    def _take_out(self, entry: Entry) -> None:
        """Undo what the entry's state implies, before it has another or is announced anew."""
        if entry.state is State.WAITING:
            channel = entry.announced.channel
            self.waiting[channel] -= 1
            self._roster.channel(channel).leave(entry)
        elif entry.state is State.PARTED:
            del self._parted_ns[entry.request_id]
        elif entry.state is State.ABSENT:
            self._entries[entry.request_id] = entry

    def _put_in(self, entry: Entry, now_ns: int) -> None:
        """Do what the entry's new state implies."""
        if entry.state is State.WAITING:
            entry.epoch = 0
            channel = entry.announced.channel
            self.waiting[channel] += 1
            self._roster.channel(channel).enter(entry)
        elif entry.state is State.PARTED:
            entry.epoch = 0
            self._parted_ns[entry.request_id] = now_ns
        elif entry.state is State.ABSENT:
            del self._entries[entry.request_id]

    def is_parted(self, entry: Entry) -> bool:
        """Return whether it is noted since when the entry is parted."""
        return entry.request_id in self._parted_ns

    def overdue(self, now_ns: int) -> list[str]:
        """Return the parted requests that the queue should have said `Gone` of by now."""
        return [*takewhile(lambda name: now_ns - self._parted_ns[name] >= GONE_WITHIN_NS, self._parted_ns)]
