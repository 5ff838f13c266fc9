"""Who is set aside: heads that no worker could start at present, so that those behind them have their turns.

Only workers that are away could hold them (`reach`), or lower tiers leave them no room (`tiers`). What those hold may
swing: who had room lately pays and saves all the same, and starts when it is least.
"""

from __future__ import annotations

from typing import Final

from services.scheduler.core.admission.bookings import Bookings
from services.scheduler.core.backlog import Entry
from services.scheduler.core.fleet import Fleet, Worker
from services.scheduler.core.sharing.channel import Channel
from services.scheduler.core.sharing.holds import Holds
from services.scheduler.core.sharing.line import Line
from services.scheduler.core.sharing.places import Places
from services.scheduler.core.sharing.reach import Reach
from services.scheduler.core.sharing.savings import Saving
from services.scheduler.core.sharing.tiers import Tiers

HOPELESS_HOLDS: Final = 2
"""How long, in usual hold times, lower tiers must have left a head no room until it is set aside: what ran beside them
when they last did has ended by then."""

MOST_ASIDE: Final = 32
"""Heads of a line that are set aside for lower tiers at once: whenever those leave room, all of them are looked at."""

AGAIN_NS: Final = 1_000_000_000
"""How often whoever is aside for lower tiers is looked at, whatever those leave: less may be expected of it by now."""


class Aside:
    """Sets heads aside, and brings them back."""

    def __init__(self, bookings: Bookings, fleet: Fleet, places: Places, tiers: Tiers, holds: Holds) -> None:
        """Start with nobody aside."""
        self._bookings = bookings
        self._fleet = fleet
        self._places = places
        self._tiers = tiers
        self._holds = holds
        self._reach = Reach()
        self._now_ns = 0

    def begin(self, now_ns: int) -> None:
        """Start a pass."""
        self._now_ns = now_ns
        self._reach.begin(now_ns)

    def takes(self, channel: Channel, line: Line, head: Entry, could_save: bool) -> bool:
        """Return whether the head is not to be considered now; `could_save` if some worker could hold it.

        It is set aside, unless many of its line are.
        """
        if could_save or not self._is_out_of_reach(head):
            if not self._tiers.has_lower(channel):
                return False
            kept_out = self._places.kept_out(channel, head, self._now_ns)
            if not self._is_hopeless(head, not kept_out):
                return False
            channel.note_kept_out(kept_out, max(head.announced.n, 1))
            if line.aside >= MOST_ASIDE:
                return True
        channel.set_head_aside(line)
        return True

    def saves_in_vain(self, saving: Saving) -> bool:
        """Return whether a head that lower tiers leave no room keeps others from what they do leave."""
        entry, channel, worker = saving.entry, saving.channel, saving.worker
        has_room = self._places.has_room_beside_lower(worker, channel, entry, saving.blocks)
        return self._is_hopeless(entry, has_room)

    def grows_with(self, worker: Worker, away: set[Worker]) -> bool:
        """Return whether the worker is larger than all others of its group that take grants and are not `away`."""
        return self._reach.grows_with(worker, away)

    def room_grew(self, worker: Worker, channel: Channel) -> None:
        """Note that lower tiers may leave more room; they have their turn of it before that is looked at."""
        if worker.group in channel.kept_out:
            channel.grown.add(worker)

    def look_again(self, channel: Channel) -> None:
        """Bring back whom lower tiers kept out: if they leave room for the smallest now, and all now and then."""
        if channel.kept_out and self._now_ns - channel.brought_back_ns >= AGAIN_NS:
            channel.brought_back_ns = self._now_ns
            for group in list(channel.kept_out):
                channel.bring_back(group)
        if not channel.grown:
            return
        grown, channel.grown = channel.grown, set()
        for worker in grown:
            needs = channel.kept_out.get(worker.group, {}).items()
            if any(self._tiers.leave_room(worker, channel, blocks, completions) for completions, blocks in needs):
                channel.bring_back(worker.group)

    def _is_out_of_reach(self, entry: Entry) -> bool:
        """Return whether none of the workers that take grants now could ever hold the entry."""
        needed = {group: max(blocks, least_blocks) for group, blocks, least_blocks in self._bookings.of(entry)}
        return self._reach.ends_before(needed, self._fleet.serving(entry.announced.model))

    def _is_hopeless(self, entry: Entry, has_room: bool) -> bool:
        """Return whether lower tiers leave a head no room and have left it none for long, if they ever did."""
        if has_room:
            entry.had_room_ns = self._now_ns
            return False
        usual_ns = self._holds.usual_ns
        if entry.had_room_ns < 0:
            return True
        return usual_ns is not None and self._now_ns - entry.had_room_ns > HOPELESS_HOLDS * usual_ns
