"""Who is set aside: heads that no worker could start at present, so that those behind them have their turns.

Only workers that are away could hold them (`reach`), or lower tiers leave them no room (`tiers`). What those hold may
swing: who had room lately pays and saves all the same, and starts when it is least.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from services.scheduler.core.admission.bookings import Bookings
from services.scheduler.core.backlog import Entry
from services.scheduler.core.fleet import Fleet, Group, Worker
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

MOST_LOOKS: Final = 2_048
"""Requests that are set aside as out of reach in one pass, or looked at because what they need is in doubt: some twenty
milliseconds. The rest has its turn in the passes after it, of which there are five a second at least."""


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
        self._looks_left = 0
        self._doubtful: dict[Channel, None] = {}
        """Channels with some in doubt, the one whose turn it is first."""

    def begin(self, now_ns: int) -> None:
        """Start a pass, and look at some of those in doubt."""
        self._now_ns = now_ns
        self._reach.begin(now_ns)
        self._looks_left = MOST_LOOKS
        while self._doubtful and self._looks_left:
            channel = next(iter(self._doubtful))
            del self._doubtful[channel]
            self._look_at_doubtful(channel)
            if channel.beyond.in_doubt:
                self._doubtful[channel] = None

    def _look_at_doubtful(self, channel: Channel) -> None:
        """Bring back who is within reach by what it needs, and who can be held by no worker there is at all."""
        places = channel.beyond.take_doubtful(self._looks_left)
        self._looks_left -= len(places)
        for line, entry in places:
            needed_blocks = self._needed_blocks(entry)
            if needed_blocks and not self._reach.holds(needed_blocks):
                channel.beyond.add(line, entry, needed_blocks)
            else:
                channel.bring_back_from_beyond([(line, entry)])

    def opened(self, worker: Worker, channels: Iterable[Channel]) -> None:
        """Note a new worker: if it is larger than all others of its group, other requests may go there than before."""
        others = (other.shape.capacity_blocks for other in worker.group.workers.values() if other is not worker)
        if worker.shape.capacity_blocks > max(others, default=-1):
            self.doubt(channels, worker.group)

    def ended(self, worker: Worker, channels: Iterable[Channel]) -> None:
        """Note that a worker is gone: what no other is known to hold may be tried on the largest left of its group."""
        if worker.shape.capacity_blocks > worker.group.shape.capacity_blocks:
            for channel in channels:
                channel.bring_back(worker.group)
            self.doubt(channels, worker.group)

    def doubt(self, channels: Iterable[Channel], group: Group | None = None) -> None:
        """Note that whoever is out of reach may need something else, if it may run in the group; None for all."""
        models = None if group is None else set(group.models)
        for channel in channels:
            channel.beyond.doubt(models)
            if channel.beyond.in_doubt:
                self._doubtful[channel] = None

    def takes(self, channel: Channel, line: Line, head: Entry, could_save: bool) -> bool:
        """Return whether the head is not to be considered now; `could_save` if some worker could hold it.

        It is set aside, unless many of its line are, and so are those behind it that are out of reach as well.
        """
        if not could_save and self._takes_out_of_reach(channel, line):
            return True
        if not self._tiers.has_lower(channel):
            return False
        kept_out = self._places.kept_out(channel, head, self._now_ns)
        if not self._is_hopeless(head, not kept_out):
            return False
        channel.note_kept_out(kept_out, max(head.announced.n, 1))
        if channel.below(line) < MOST_ASIDE:
            channel.set_head_aside(line, None)
        return True

    def _takes_out_of_reach(self, channel: Channel, line: Line) -> bool:
        """Set heads of the line aside for as long as they are out of reach; return whether any was.

        Where a pass has had its looks the head stays, for none to consider it, and the line is looked at in the next.
        """
        found = False
        while (head := line.head()) is not None:
            needed_blocks = self._needed_blocks(head)
            if not self._reach.ends_before(needed_blocks, self._fleet.serving(line.model)):
                break
            found = True
            if not self._looks_left:
                channel.changed.add(line.model)
                break
            self._looks_left -= 1
            channel.set_head_aside(line, needed_blocks)
        return found

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

    def _needed_blocks(self, entry: Entry) -> dict[Group, int]:
        """Return what a worker must have to hold the entry, in the groups that may get it."""
        return {group: max(blocks, least_blocks) for group, blocks, least_blocks in self._bookings.of(entry)}

    def _is_hopeless(self, entry: Entry, has_room: bool) -> bool:
        """Return whether lower tiers leave a head no room and have left it none for long, if they ever did."""
        if has_room:
            entry.had_room_ns = self._now_ns
            return False
        usual_ns = self._holds.usual_ns
        if entry.had_room_ns < 0:
            return True
        return usual_ns is not None and self._now_ns - entry.had_room_ns > HOPELESS_HOLDS * usual_ns
