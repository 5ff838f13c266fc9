"""What a channel would do next: whose turn it is within it, where that fits, and who may pass who does not.

The heads of its lines are looked at in the order in which they would leave. What has paid, because it saves or waits
to (`deposits`), waits for none that cannot pay; where one can and waits, the others go on.
"""

from __future__ import annotations

from typing import Final

from services.scheduler.core.admission.bookings import Bookings
from services.scheduler.core.admission.policy import Policy
from services.scheduler.core.backlog import Entry
from services.scheduler.core.fleet import Fleet, Group, Worker
from services.scheduler.core.sharing.aside import Aside
from services.scheduler.core.sharing.bids import Bid, Placement
from services.scheduler.core.sharing.channel import Channel
from services.scheduler.core.sharing.deposits import Deposits
from services.scheduler.core.sharing.holds import Holds
from services.scheduler.core.sharing.line import Line
from services.scheduler.core.sharing.places import Places
from services.scheduler.core.sharing.savings import Saving, Savings

PASSED_HOLDS: Final = 2
"""How long, in its channel's usual hold times, a head that waits is passed within the channel's guarantee."""


class Heads:
    """Finds bids. Owns nothing."""

    def __init__(
        self,
        policy: Policy,
        fleet: Fleet,
        holds: Holds,
        savings: Savings,
        deposits: Deposits,
        bookings: Bookings,
        places: Places,
        aside: Aside,
    ) -> None:
        """Look at heads by what these say."""
        self._policy = policy
        self._fleet = fleet
        self._holds = holds
        self._savings = savings
        self._deposits = deposits
        self._bookings = bookings
        self._places = places
        self._aside = aside
        self._now_ns = 0

    def bid(self, channel: Channel, now_ns: int) -> Bid:
        """Return what the channel would do next; whoever nobody could run meanwhile is set aside."""
        self._now_ns = now_ns
        self._aside.look_again(channel)
        while (bid := self._look_at_heads(channel)) is None:
            pass
        if bid.placement is None and bid.saving is None and channel.share.guaranteed_share:
            placement = self._place_guaranteed_behind(channel)
            if placement is not None:
                cost_block_ns = self._holds.cost_block_ns(channel, placement.blocks)
                return Bid(channel, bid.payer_waits, cost_block_ns=cost_block_ns, placement=placement)
        return bid

    def _look_at_heads(self, channel: Channel) -> Bid | None:
        """Look at the heads in order until one can be placed, may save or cannot pay; None if one was set aside."""
        takes_part = False
        capped: set[Group] = set()
        channel.set_unserved_aside(self._fleet.serving)
        heads = channel.heads()
        payer_waits = False
        paid_for = self._look_at_paid(channel, heads)
        if paid_for is not None:
            return paid_for
        for line, head in heads:
            placement = self._places.find(channel, head, self._now_ns, capped)
            if placement is None and self._savings.of(head) is None:
                worker, blocks = self._places.to_save(channel, head, self._now_ns, capped)
                kept_out = self._aside.takes(channel, line, head, could_save=bool(blocks))
                if line.head() is not head:
                    return None
                if kept_out or not blocks:
                    capped |= set() if kept_out else self._where_capped(channel, head)
                    continue
                cost_block_ns = self._holds.cost_block_ns(channel, blocks)
                if cost_block_ns > channel.deficit_block_ns and not self._deposits.of(head):
                    return Bid(channel, payer_waits, cost_block_ns=cost_block_ns)
                if worker is not None:
                    return self._bid_to_save(channel, line, head, worker, blocks, payer_waits)
                takes_part = True
                payer_waits = len(heads) == 1
                self._deposits.wait(channel, line, head, cost_block_ns, alone=payer_waits)
            elif placement is None:
                takes_part = True
                placement = self._place_one_behind(channel, line)
            if placement is not None:
                return self._bid_to_place(channel, placement, payer_waits)
        return Bid(channel, payer_waits, wants=False, takes_part=takes_part)

    def _where_capped(self, channel: Channel, head: Entry) -> set[Group]:
        """Return where its ceiling keeps a head out: others of the channel would for ever, if they went before it."""
        return {group for group, _, _ in self._bookings.of(head)} if channel.share.ceiling_share < 1 else set()

    def _look_at_paid(self, channel: Channel, heads: list[tuple[Line, Entry]]) -> Bid | None:
        """Return a bid for a head that has paid, if one may start or save.

        It waits for no other line of its channel that cannot pay, or that its saving keeps out.
        """
        for line, head in heads if len(heads) > 1 else ():
            waits = self._deposits.of(head) > 0
            if not waits and self._savings.of(head) is None:
                continue
            placement = self._places.find(channel, head, self._now_ns)
            if placement is not None:
                return self._bid_to_place(channel, placement)
            if waits:
                worker, blocks = self._places.to_save(channel, head, self._now_ns, set())
                if worker is not None:
                    return self._bid_to_save(channel, line, head, worker, blocks)
        return None

    def _bid_to_place(self, channel: Channel, placement: Placement, payer_waits: bool = False) -> Bid:
        """Return a bid for a placement, for nothing if that has paid."""
        if self._savings.of(placement.entry) is not None:
            return Bid(channel, payer_waits, placement=placement)
        if self._deposits.of(placement.entry):
            return Bid(
                channel, payer_waits, placement=placement, since_block_ns=self._deposits.since_block_ns(placement.entry)
            )
        cost_block_ns = self._holds.cost_block_ns(channel, placement.blocks)
        return Bid(channel, payer_waits, cost_block_ns=cost_block_ns, placement=placement)

    def _bid_to_save(
        self, channel: Channel, line: Line, head: Entry, worker: Worker, blocks: int, payer_waits: bool = False
    ) -> Bid:
        """Return a bid to save on the worker, for nothing if the head has paid."""
        peak_blocks = self._policy.peak_blocks(head.announced, worker, blocks)
        if paid_block_ns := self._deposits.of(head):
            saving = Saving(head, channel, line, worker, blocks, peak_blocks, paid_block_ns)
            return Bid(channel, payer_waits, saving=saving, since_block_ns=self._deposits.since_block_ns(head))
        cost_block_ns = self._holds.cost_block_ns(channel, blocks)
        saving = Saving(head, channel, line, worker, blocks, peak_blocks, cost_block_ns)
        return Bid(channel, payer_waits, cost_block_ns=cost_block_ns, saving=saving)

    def _place_one_behind(self, channel: Channel, line: Line) -> Placement | None:
        """Return a placement for the first request that may pass the head."""
        groups = self._fleet.serving(line.model)
        for entry in line.behind():
            kind, booked = self._places.kind(entry), self._bookings.in_group
            if not any(booked(entry, group)[0] <= channel.openings(group, kind).most_blocks() for group in groups):
                continue
            placement = self._places.find(channel, entry, self._now_ns)
            if placement is not None:
                return placement
        return None

    def _place_guaranteed_behind(self, channel: Channel) -> Placement | None:
        """Return a placement for the first request that goes first behind a head that waits: its guarantee is free.

        What passes is charged to the deficit that the head pays from, and counts against their ceiling. So that it does
        not keep the head out for ever, nothing passes one that has waited for long.
        """
        for line, head in channel.heads():
            found = self._places.find_first(channel, head, self._now_ns)
            if found is not None or self._has_waited(channel, head):
                return found
            for entry in line.behind():
                placement = self._places.find_first(channel, entry, self._now_ns)
                if placement is not None:
                    return placement
        return None

    def _has_waited(self, channel: Channel, head: Entry) -> bool:
        """Return whether a head has let those behind it pass for long enough.

        One that has paid loses nothing by them.
        """
        waited_ns = self._now_ns - head.announced_ns
        if not channel.hold_time.known or waited_ns <= PASSED_HOLDS * channel.hold_time.mean_ns:
            return False
        return self._savings.of(head) is None
