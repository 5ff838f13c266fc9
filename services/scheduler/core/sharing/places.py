"""Where an entry of a channel fits now, and where it may save if it fits nowhere.

First where there is room for it. Only if there is none anywhere, what is within its channel's guarantee takes a place
on a worker whose engine makes room for it, by preempting what is not guaranteed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from operator import itemgetter
from typing import Final

from services.scheduler.core.admission.bookings import Bookings
from services.scheduler.core.admission.policy import Policy
from services.scheduler.core.entry import Entry, Options, Wanted
from services.scheduler.core.fleet import Group, Pool, Worker
from services.scheduler.core.sharing.bids import Placement
from services.scheduler.core.sharing.channel import Channel
from services.scheduler.core.sharing.guarantees import Guarantees
from services.scheduler.core.sharing.kept import NONE_KEPT, Kept
from services.scheduler.core.sharing.openings import Kind, Openings, kind_of
from services.scheduler.core.sharing.precedence import Precedence
from services.scheduler.core.sharing.rules import Claim, Rules, below_ceiling
from services.scheduler.core.sharing.savings import Savings
from services.scheduler.core.sharing.tiers import Tiers
from services.scheduler.core.sharing.widest import AllRooms

CHOICES: Final = 2
"""Workers with room that are compared: the second look brings most of what comparing all would (Mitzenmacher, "The
power of two choices", 2001)."""

SAVE_LOOKS: Final = 64
"""Workers among which a head that fits nowhere looks for one to save on; those with most room come first."""

Look = tuple[Worker, Openings, int, int]
"""A worker that may have room, where it is refused if it has none, what the entry books there and needs at least."""


class Places:
    """Finds places. Owns where something was kept for a guarantee, to be looked at again when it may be less."""

    def __init__(
        self,
        rules: Rules,
        policy: Policy,
        bookings: Bookings,
        savings: Savings,
        guarantees: Guarantees,
        precedence: Precedence,
        tiers: Tiers,
    ) -> None:
        """Look for places under what these say."""
        self._rules = rules
        self._policy = policy
        self._tiers = tiers
        self._engines_preempt = policy.reserve_output_tokens > 0
        self._bookings = bookings
        self._savings = savings
        self._guarantees = guarantees
        self._precedence = precedence
        self._fenced: set[Worker] = set()
        self._kept_out: set[Worker] = set()

    def find(
        self,
        channel: Channel,
        pool: Pool,
        entry: Entry,
        now_ns: int,
        kept: Kept = NONE_KEPT,
        may_go_first: bool = True,
    ) -> Placement | None:
        """Return where in the pool the entry fits now, the roomier of the first CHOICES workers; None if nowhere.

        Not on those that are `kept` for older requests of the channel. Unless it `may_go_first` it needs free blocks.
        """
        best: Placement | None = None
        best_room, looks = 0.0, 0
        for worker, openings, blocks, least_blocks in self._roomiest_first(channel, pool, entry, now_ns, kept):
            if worker.shape.capacity_blocks < least_blocks or entry.request_id in worker.ledger:
                continue
            if self._rules.is_last_taken(worker, channel, entry):
                continue
            claim = self._rules.claim(worker, channel, entry, blocks, now_ns)
            room = self._room_blocks(channel, entry, worker, blocks, claim, now_ns)
            if room < blocks:
                # What another head of the channel saves keeps out says nothing about that head.
                if not self._savings.is_of_another(worker, channel, entry):
                    openings.refuse(worker, 1 if claim is Claim.SHUT else blocks)
                continue
            if room / blocks > best_room:
                first = claim is Claim.GUARANTEED and self._precedence.goes_first(
                    worker, channel, entry.announced, blocks
                )
                best, best_room = Placement(entry, channel, worker, blocks, first), room / blocks
            looks += 1
            if looks == CHOICES:
                return best
        if best is not None or not may_go_first:
            return best
        return self.find_first(channel, pool, entry, now_ns, kept)

    def _roomiest_first(self, channel: Channel, pool: Pool, entry: Entry, now_ns: int, kept: Kept) -> Iterator[Look]:
        """Return looks at the workers of the pool that may have room for the entry, most room first.

        Room counts in bookings of the entry, which in groups of other block sizes are other numbers of blocks.
        """
        options, kind = self._bookings.options(entry, pool), self.kind(entry)
        wanted = self._may_have_room(channel.rooms, pool, entry, options)
        if len(wanted) == 1:
            return _looks(channel, wanted[0], kind, kept, now_ns)
        return _merged([_looks(channel, each, kind, kept, now_ns) for each in wanted])

    def _may_have_room(self, rooms: AllRooms, pool: Pool, entry: Entry, options: Options) -> list[Wanted]:
        """Return those of an entry's options in the pool where any worker may have room for it."""
        wanted = options.wanted
        if len(wanted) < 2:
            return wanted
        widest = rooms.widest(self.kind(entry), entry.announced.model, pool, options.serving)
        by_group = options.by_group
        groups = widest.may_have_room(options.least_blocks)
        return [by_group[group] for group in groups if group in by_group]

    def is_worth_a_look(self, channel: Channel, pool: Pool, entry: Entry, kept: Kept) -> bool:
        """Return whether any worker of the pool but those that are `kept` may have room for the entry."""
        options, kind, booked = self._bookings.options(entry, pool), self.kind(entry), self._bookings.in_group
        groups = options.serving
        if len(groups) > 1:
            groups = channel.rooms.widest(kind, entry.announced.model, pool, groups).may_have_room(
                options.booked_blocks
            )
        return any(
            booked(entry, group)[0] <= channel.openings(group, kind).most_blocks(kept.from_blocks(group))
            for group in groups
        )

    def find_first(
        self, channel: Channel, pool: Pool, entry: Entry, now_ns: int, kept: Kept = NONE_KEPT
    ) -> Placement | None:
        """Return where in the pool the entry may go first with nothing free: on the least full of the first few."""
        if not self._engines_preempt or not channel.share.guaranteed_share:
            return None
        best: Placement | None = None
        options = self._bookings.options(entry, pool)
        for group, blocks, least_blocks in self._may_have_room(channel.guaranteed_rooms, pool, entry, options):
            if kept.has_all(group):
                continue
            for worker in self._able(channel, entry, group, (blocks, least_blocks), kept, now_ns):
                if best is None or worker.reach_blocks > best.worker.reach_blocks:
                    best = Placement(entry, channel, worker, blocks, True)
        return best

    def _able(
        self, channel: Channel, entry: Entry, group: Group, wanted: tuple[int, int], kept: Kept, now_ns: int
    ) -> list[Worker]:
        """Return the first CHOICES workers of the group where the entry may go first, its channel's rest largest.

        It books the first of what is `wanted`, and is proven to need the second.
        """
        blocks, least_blocks = wanted
        guaranteed = channel.guaranteed_rooms.openings(group, self.kind(entry))
        able: list[Worker] = []
        for worker in guaranteed.roomiest_first(blocks, now_ns, below_blocks=kept.from_blocks(group)):
            if entry.request_id in worker.ledger or worker.shape.capacity_blocks < least_blocks:
                continue
            if self._rules.is_last_taken(worker, channel, entry):
                continue
            claim = self._rules.claim(worker, channel, entry, blocks, now_ns)
            if claim is Claim.GUARANTEED and self._precedence.goes_first(worker, channel, entry.announced, blocks):
                able.append(worker)
                if len(able) == CHOICES:
                    break
            else:
                guaranteed.refuse(worker, blocks)
        return able

    def kind(self, entry: Entry) -> Kind:
        """Return the requests that are refused as this one is."""
        return kind_of(entry.announced, self._engines_preempt)

    def _room_blocks(
        self, channel: Channel, entry: Entry, worker: Worker, blocks: int, claim: Claim, now_ns: int
    ) -> int:
        """Return how large a booking of this channel the worker has room for, 0 if it may have none."""
        room, fence = self._rules.room(worker, channel, entry, blocks, claim, now_ns)
        if room < blocks and self._guarantees.keep_from(channel):
            (self._fenced if fence else self._kept_out).add(worker)
        return room

    # ---- savings ----

    def to_save(self, channel: Channel, pool: Pool, head: Entry, now_ns: int, kept: Kept) -> tuple[Worker | None, int]:
        """Return the worker of the pool with most room on which the head may save, and its booking.

        None that is `kept`, and only where lower tiers leave it room, if they do anywhere.

        No worker: others save on all of them. No blocks: no worker may take it whatever ends, so there is nothing to
        save for.
        """
        best: Worker | None = None
        wanted_blocks = 0
        below, has_room = self._tiers.has_lower(channel), False
        for group, blocks, least_blocks in self._bookings.of(head, pool):
            # Where others save on all of them, the first tells what there is to tell: that the head might.
            nobody_free = not below and self._savings.are_everywhere(group, channel)
            no_more = not below and self._has_no_more(channel, group, head, best)
            if kept.has_all(group) or (nobody_free and wanted_blocks) or no_more:
                continue
            workers = self._large_enough(channel, head, group, max(blocks, least_blocks), now_ns, kept, None)
            for worker, is_taken in self._some_of_each(channel, head, workers):
                if head.request_id in worker.ledger or not below_ceiling(worker, channel, blocks):
                    continue
                if below and self.has_room_beside_lower(worker, channel, head, blocks) != has_room:
                    if has_room:
                        continue
                    best, wanted_blocks, has_room = None, 0, True
                if is_taken:
                    wanted_blocks = wanted_blocks or blocks
                    if nobody_free:
                        break
                elif best is None or worker.reach_blocks > best.reach_blocks:
                    best, wanted_blocks = worker, blocks
        return best, wanted_blocks

    def _has_no_more(self, channel: Channel, group: Group, head: Entry, best: Worker | None) -> bool:
        """Return whether no worker of a group has more room than one of another, if that is told by few looks."""
        if best is None or len(group.workers) > SAVE_LOOKS:
            return False
        if not channel.openings(group, self.kind(head)).all_taken:
            return False
        best_blocks = best.reach_blocks
        return all(worker.reach_blocks <= best_blocks for worker in group.workers.values())

    def _some_of_each(self, channel: Channel, head: Entry, workers: Iterator[Worker]) -> Iterator[tuple[Worker, bool]]:
        """Yield SAVE_LOOKS workers that others save on and as many that nobody does, and which of them it is.

        What others save piles up, so that where many do theirs have most room and come first.
        """
        left = {True: SAVE_LOOKS, False: SAVE_LOOKS}
        for worker in workers:
            saving = self._savings.on(worker)
            is_taken = saving is not None and saving.binds(channel, head)
            if left[is_taken]:
                left[is_taken] -= 1
                yield worker, is_taken
            elif not is_taken:
                return

    def could_save(self, channel: Channel, pool: Pool, head: Entry, now_ns: int, kept: Kept) -> bool:
        """Return whether some worker may take the head once enough has ended: whether `to_save` tells blocks."""
        for group, blocks, least_blocks in self._bookings.of(head, pool):
            if kept.has_all(group):
                continue
            for worker in self._large_enough(channel, head, group, max(blocks, least_blocks), now_ns, kept):
                if head.request_id not in worker.ledger and below_ceiling(worker, channel, blocks):
                    return True
        return False

    def _large_enough(
        self,
        channel: Channel,
        head: Entry,
        group: Group,
        blocks: int,
        now_ns: int,
        kept: Kept = NONE_KEPT,
        most: int | None = SAVE_LOOKS,
    ) -> Iterator[Worker]:
        """Return so many workers of the group that could hold `blocks`, roughly those with most room first."""
        openings = channel.openings(group, self.kind(head))
        least_blocks = 0 if group.least_blocks >= blocks else blocks
        workers = openings.most_room(now_ns, least_blocks, kept.from_blocks(group))
        if head.announced.last_attempt:
            workers = (worker for worker in workers if not self._rules.is_last_taken(worker, channel, head))
        return islice(workers, most)

    def has_room_for_last(self, worker: Worker, channel: Channel, now_ns: int) -> bool:
        """Return whether the worker takes grants, and has none on its last attempt that would keep out another."""
        return worker.takes_grants(now_ns) and not self._rules.has_last(worker, channel)

    def waits_for_last(self, channel: Channel, entry: Entry, needed_blocks: Mapping[Group, int], now_ns: int) -> bool:
        """Return whether all workers that could hold the entry have another that is on its last attempt as it is."""
        if not entry.announced.last_attempt:
            return False
        able = [
            worker
            for group, blocks in needed_blocks.items()
            for worker in group.workers.values()
            if worker.shape.capacity_blocks >= blocks and worker.takes_grants(now_ns)
        ]
        return bool(able) and all(self._rules.is_last_taken(worker, channel, entry) for worker in able)

    def could_hold(self, channel: Channel, pool: Pool, entry: Entry, now_ns: int) -> bool:
        """Return whether any worker of the pool that takes grants could hold the entry once enough has ended."""
        for group, blocks, least_blocks in self._bookings.of(entry, pool):
            for _worker in self._large_enough(channel, entry, group, max(blocks, least_blocks), now_ns):
                return True
        return False

    def kept_out(self, channel: Channel, head: Entry, now_ns: int) -> dict[Group, int]:
        """Return where lower tiers leave the head no room, with what it needs, if nothing else keeps it out anywhere.

        Empty if any worker that could hold it has room for it beside them, or if its ceiling keeps it out of one.
        """
        found: dict[Group, int] = {}
        for group, blocks, least_blocks in self._bookings.of(head):
            for worker in self._large_enough(channel, head, group, max(blocks, least_blocks), now_ns):
                capped = not below_ceiling(worker, channel, blocks)
                if capped or self.has_room_beside_lower(worker, channel, head, blocks):
                    return {}
                found[group] = self._policy.peak_blocks(head.announced, worker, blocks)
        return found

    def has_room_beside_lower(self, worker: Worker, channel: Channel, head: Entry, blocks: int) -> bool:
        """Return whether lower tiers leave the head room on the worker, as they must within its channel's guarantee."""
        peak_blocks = self._policy.peak_blocks(head.announced, worker, blocks)
        if self._guarantees.may_hold(worker, channel, peak_blocks, head.announced.n):
            return True
        return self._tiers.leave_room(worker, channel, peak_blocks, head.announced.n)

    # ---- where something was kept for a guarantee ----

    def take_fenced(self, all_kept_out: bool = False) -> set[Worker]:
        """Return where a fence kept somebody out since this was asked last, or what was kept of the peak as well."""
        fenced, self._fenced = self._fenced, set()
        if all_kept_out:
            fenced |= self._kept_out
            self._kept_out.clear()
        return fenced

    def forget(self, worker: Worker) -> None:
        """Forget a worker that is gone."""
        self._fenced.discard(worker)
        self._kept_out.discard(worker)


def _looks(channel: Channel, wanted: tuple[Group, int, int], kind: Kind, kept: Kept, now_ns: int) -> Iterator[Look]:
    """Yield looks at the workers of a group that may have room, most room first; each may be refused meanwhile."""
    group, blocks, least_blocks = wanted
    if kept.has_all(group):
        return
    openings = channel.openings(group, kind)
    for worker in openings.roomiest_first(blocks, now_ns, below_blocks=kept.from_blocks(group)):
        yield worker, openings, blocks, least_blocks


def _merged(found: list[Iterator[Look]]) -> Iterator[Look]:
    """Yield the looks of several groups in one: of the first of each the one with most room."""
    firsts = [(look[0].reach_blocks / look[2], look, looks) for looks in found if (look := next(looks, None))]
    while firsts:
        first = max(firsts, key=itemgetter(0))
        yield first[1]
        firsts.remove(first)
        if look := next(first[2], None):
            firsts.append((look[0].reach_blocks / look[2], look, first[2]))
