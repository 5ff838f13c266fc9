"""Who is set aside: heads that no worker could start at present, so that those behind them have their turns.

Only workers that are away could hold them (`reach`), or lower tiers leave them no room (`tiers`). What those hold may
swing: who had room lately pays and saves all the same, and starts when it is least.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from services.scheduler.core.admission.bookings import Bookings
from services.scheduler.core.entry import Entry
from services.scheduler.core.fleet import Fleet, Group, Groups, Pool, Worker
from services.scheduler.core.geometry import GroupKey
from services.scheduler.core.sharing.channel import Account, Channel
from services.scheduler.core.sharing.line import Line
from services.scheduler.core.sharing.longest import Longest
from services.scheduler.core.sharing.places import Places
from services.scheduler.core.sharing.reach import Reach
from services.scheduler.core.sharing.savings import Saving
from services.scheduler.core.sharing.tiers import Tiers

HOPELESS_HOLDS: Final = 2
"""How long lower tiers must have left a head no room until it is set aside, in the longest usual hold times of those
that it waits for in its pool, of its own tier and of higher ones: what ran of them when it last had room has ended."""

MOST_ASIDE: Final = 32
"""Heads of a line that are set aside for lower tiers at once: whenever those leave room, all of them are looked at."""

AGAIN_NS: Final = 1_000_000_000
"""How often whoever is aside for lower tiers is looked at, whatever those leave: less may be expected of it by now."""

MOST_LOOKS: Final = 2_048
"""Requests that are set aside as out of reach in one pass, and one of each line whatever the others take: some twenty
milliseconds. Where there are more their line waits for another pass, which is to follow at once and where such lines
share alike; other lines have their turn meanwhile."""


class Aside:
    """Sets heads aside, and brings them back."""

    def __init__(self, bookings: Bookings, fleet: Fleet, places: Places, tiers: Tiers, longest: Longest) -> None:
        """Start with nobody aside."""
        self._bookings = bookings
        self._fleet = fleet
        self._places = places
        self._tiers = tiers
        self._longest = longest
        self._reach = Reach()
        self._now_ns = 0
        self._looks_left = 0
        self._looks: dict[Line, int] = {}
        """Those each line has left of its part in this pass."""
        self._to_come: dict[Line, Channel] = {}
        """Lines that the last pass left, which have not asked for their part yet."""
        self.unfinished = False
        """Whether more are to be set aside than the pass could."""
        self.left: dict[Line, Channel] = {}
        """The lines of which they are, with their channels: whoever is behind those waits until they are."""
        self._least_tiers: dict[Pool, int] = {}
        """The lowest tier of such lines in each pool: those above it wait as well."""
        self._largest: Groups | None = None
        """The groups of which it is known what those out of reach need there, None if that holds nowhere."""
        self._fleet_changes = 0
        self._gone: dict[GroupKey, Group] = {}
        """Groups whose last worker has gone since the last pass."""
        self._had_room_ns: dict[Account, int] = {}
        """When lower tiers had left the first of those heads room that wait, as far as was looked: whoever takes it
        since tells nobody."""

    def begin(self, now_ns: int, channels: Iterable[Channel]) -> None:
        """Start a pass: look at all that may need something else by now, before anybody is granted anything."""
        self._now_ns = now_ns
        self._reach.begin(now_ns)
        self._looks_left = MOST_LOOKS
        self._looks.clear()
        self._to_come.clear()
        if self.unfinished:
            self.unfinished = False
            self._to_come, self.left = self.left, self._to_come
            self._least_tiers.clear()
        self._gone.clear()
        models = self._models_in_doubt()
        if models is None or models:
            for channel in channels:
                self._find_needs(channel, models)

    def _models_in_doubt(self) -> set[str] | None:
        """Return which models groups serve whose largest worker is another than at the last pass; None for any model.

        What an entry needs follows from the largest of each group that serves its model, and from the policy.
        """
        if self._largest is not None and self._fleet_changes == self._fleet.changes:
            return set()
        before, now = self._largest, self._fleet.largest_blocks()
        self._largest, self._fleet_changes = now, self._fleet.changes
        if before is None:
            return None
        changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        return {model for key in changed for model in key.models}

    def _find_needs(self, channel: Channel, models: set[str] | None) -> None:
        """Bring back who is within reach by what it needs, and who can be held by no worker there is at all.

        Who needs the same as before is not, or a worker would have brought it back.
        """
        for (line, entry), before in channel.beyond.asking_for(models):
            needed_blocks = self._needed_blocks(entry)
            if needed_blocks == before:
                continue
            channel.beyond.discard(entry)
            if needed_blocks and not self._reach.holds(needed_blocks):
                channel.beyond.add(line, entry, dict(needed_blocks))
            else:
                channel.bring_back_from_beyond([(line, entry)])

    def opened(self, worker: Worker, channels: Iterable[Channel]) -> None:
        """Note a new worker: where a group has only gone and come, what was found for it holds."""
        gone = self._gone.pop(worker.group.key, None)
        if gone is not None:
            for channel in channels:
                channel.beyond.replace(gone, worker.group)

    def ended(self, worker: Worker, channels: Iterable[Channel]) -> None:
        """Note that a worker is gone: what lower tiers keep out may be tried on the largest left of its group."""
        group = worker.group
        if not group.workers:
            self._gone[group.key] = group
        if worker.shape.capacity_blocks > group.shape.capacity_blocks:
            for channel in channels:
                channel.bring_back(group)

    def learned(self) -> None:
        """Note that the policy has learned something: what those out of reach need is to be found anew."""
        self._largest = None

    def ends_with(self, tier: int, pool: Pool) -> bool:
        """Return whether those above the tier wait: who is behind what is left of it may have what they would take."""
        least_tier = self._least_tiers.get(pool)
        return least_tier is not None and least_tier <= tier

    def takes(self, account: Account, line: Line, head: Entry, could_save: bool) -> bool:
        """Return whether the head is not to be considered now; `could_save` if some worker could hold it.

        It is set aside, unless many of its line are, and so are those behind it that are out of reach as well.
        """
        channel = account.channel
        if not could_save and self._takes_out_of_reach(account, line):
            return True
        if not self._tiers.has_lower(channel):
            return False
        kept_out = self._places.kept_out(channel, head, self._now_ns)
        if not self._is_hopeless(account, head, not kept_out):
            self._had_room_ns[account] = min(self._had_room_ns.get(account, head.had_room_ns), head.had_room_ns)
            return False
        channel.note_kept_out(kept_out, max(head.announced.n, 1))
        if channel.below(line) < MOST_ASIDE:
            channel.set_head_aside(line, None)
        return True

    def _takes_out_of_reach(self, account: Account, line: Line) -> bool:
        """Set heads of the line aside for as long as they are out of reach, or wait for a worker that has no other on
        its last attempt; return whether any was.

        Where a pass has had its looks it is `unfinished`: the head stays, and the line is looked at in the next.
        """
        channel = account.channel
        found = False
        while (head := line.head()) is not None:
            needed_blocks = self._needed_blocks(head)
            for_last = self._places.waits_for_last(channel, head, needed_blocks, self._now_ns)
            if not for_last and not self._reach.ends_before(needed_blocks, self._fleet.serving(line.model)):
                break
            found = True
            if not self._has_look(line):
                self._leave(account, line)
                break
            channel.set_head_aside(line, dict(needed_blocks), for_last)
        return found

    def _has_look(self, line: Line) -> bool:
        """Take one of a line's looks, if it has any left: its part, with those to come, of what others left, or one."""
        part = self._looks.get(line)
        if part is None:
            self._to_come.pop(line, None)
            part = max(self._looks_left // (len(self._to_come) + 1), 1)
        elif part == 0 or self._looks_left <= 0:
            return False
        self._looks[line] = part - 1
        self._looks_left -= 1
        return True

    def take_hopeless(self) -> list[Account]:
        """Return, once, whose heads may have become hopeless by time alone, which nothing else tells."""
        if not self._had_room_ns:
            return []
        found = [account for account, since_ns in self._had_room_ns.items() if self._is_long_ago(account, since_ns)]
        for account in found:
            del self._had_room_ns[account]
        return found

    def _leave(self, account: Account, line: Line) -> None:
        """Leave the rest of the line to the next pass."""
        self.unfinished = True
        self.left[line] = account.channel
        pool, tier = account.pool, account.channel.share.tier
        self._least_tiers[pool] = min(self._least_tiers.get(pool, tier), tier)

    def saves_in_vain(self, saving: Saving) -> bool:
        """Return whether a head that lower tiers leave no room keeps others from what they do leave."""
        if not self._tiers.has_lower(saving.channel):
            return False
        entry = saving.entry
        has_room = self._places.has_room_beside_lower(saving.worker, saving.channel, entry, saving.blocks)
        return self._is_hopeless(saving.account, entry, has_room)

    def bring_back(self, workers: Iterable[Worker], away: Collection[Worker], channels: Sequence[Channel]) -> None:
        """Look again at whom none but the workers could hold, now that these take grants.

        `away` are they and those that take none. Each is away for those before it.
        """
        largest: dict[Group, int] = {}
        for worker in workers:
            group, capacity_blocks = worker.group, worker.shape.capacity_blocks
            most_blocks = largest.get(group)
            if most_blocks is None:
                most_blocks = self._reach.most_blocks_beside(group, away)
            for channel in channels:
                channel.reach_grew(worker)
                if capacity_blocks > most_blocks:
                    channel.bring_back(group)
            largest[group] = max(most_blocks, capacity_blocks)

    def room_grew(self, worker: Worker, channel: Channel) -> None:
        """Note that lower tiers may leave more room, which have their turn of it before that is looked at, and bring
        back who waits for a worker without another on its last attempt.
        """
        if channel.beyond.last_attempts and self._places.has_room_for_last(worker, channel, self._now_ns):
            channel.reach_grew(worker)
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

    def is_somebody_there(self, line: Line) -> bool:
        """Return whether any worker takes grants for the line in this pass."""
        return any(map(self._reach.takes_grants, self._fleet.serving(line.model)))

    def _needed_blocks(self, entry: Entry) -> dict[Group, int]:
        """Return what a worker must have to hold the entry, in the groups that may get it; to be read alone."""
        return self._bookings.options(entry).needed_blocks

    def _is_hopeless(self, account: Account, entry: Entry, has_room: bool) -> bool:
        """Return whether lower tiers leave a head no room and have left it none for long, if they ever did."""
        if has_room:
            entry.had_room_ns = self._now_ns
            return False
        return entry.had_room_ns < 0 or self._is_long_ago(account, entry.had_room_ns)

    def _is_long_ago(self, account: Account, had_room_ns: int) -> bool:
        """Return whether what a head of the account waits for has ended since: that of lower tiers it does not."""
        longest_ns = self._longest.of_ns(account.pool, account.channel.share.tier)
        return self._longest.known and self._now_ns - had_room_ns > HOPELESS_HOLDS * longest_ns
