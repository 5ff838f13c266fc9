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
        paid_for = self._look_at_paid(channel)
        if paid_for is not None:
            return paid_for
        for line, head in heads:
            if self._savings.of(head) is not None:
                takes_part = True
                bid = self._look_behind(channel, line, capped, payer_waits)
                if bid is not None:
                    return bid
                continue
            placement = self._places.find(channel, head, self._now_ns, capped)
            if placement is not None:
                return self._bid_to_place(channel, placement, payer_waits)
            worker, blocks = self._places.to_save(channel, head, self._now_ns, capped)
            kept_out = self._aside.takes(channel, line, head, could_save=bool(blocks))
            if line.head() is not head:
                return None
            if kept_out or not blocks:
                capped |= set() if kept_out else self._where_capped(channel, head)
                continue
            bid = self._bid_for_head(channel, heads, line, head, worker, blocks, capped, payer_waits)
            if bid is not None:
                return bid
            takes_part = True
            payer_waits = len(heads) == 1
        return Bid(channel, payer_waits, wants=False, takes_part=takes_part)

    def _bid_for_head(
        self,
        channel: Channel,
        heads: list[tuple[Line, Entry]],
        line: Line,
        head: Entry,
        worker: Worker | None,
        blocks: int,
        capped: set[Group],
        payer_waits: bool,
    ) -> Bid | None:
        """Return a bid for a head that fits nowhere: to save on the worker, or as it cannot pay; None if it waits.

        It has paid by then, unless its line is alone, or another head of the channel has that waits for the same
        workers.
        """
        groups = self._fleet.serving(line.model)
        if self._deposits.another_waits(channel, head, groups):
            return None
        cost_block_ns = self._holds.cost_block_ns(channel, blocks)
        if cost_block_ns > channel.deficit_block_ns and not self._deposits.of(head):
            loan = self._find_loan(channel, heads, head, capped)
            return Bid(channel, payer_waits, cost_block_ns=cost_block_ns, loan=loan)
        if worker is not None:
            return self._bid_to_save(channel, line, head, worker, blocks, payer_waits)
        self._deposits.wait(channel, line, head, groups, cost_block_ns, alone=len(heads) == 1)
        return None

    def _where_capped(self, channel: Channel, head: Entry) -> set[Group]:
        """Return where its ceiling keeps a head out: others of the channel would for ever, if they went before it."""
        return {group for group, _, _ in self._bookings.of(head)} if channel.share.ceiling_share < 1 else set()

    def _look_at_paid(self, channel: Channel) -> Bid | None:
        """Return a bid for a request that has paid, if one may start or save.

        It waits for none of its channel that cannot pay, or that its saving keeps out.
        """
        for saving in self._savings.of_channel(channel):
            placement = self._places.find(channel, saving.entry, self._now_ns)
            if placement is not None:
                return self._bid_to_place(channel, placement)
        for deposit in self._deposits.of_channel(channel):
            placement = self._places.find(channel, deposit.entry, self._now_ns)
            if placement is not None:
                return self._bid_to_place(channel, placement)
            worker, blocks = self._places.to_save(channel, deposit.entry, self._now_ns, set())
            if worker is not None:
                return self._bid_to_save(channel, deposit.line, deposit.entry, worker, blocks)
        return None

    def _find_loan(
        self, channel: Channel, heads: list[tuple[Line, Entry]], head: Entry, capped: set[Group]
    ) -> Placement | None:
        """Return what one of the lines after that of a head that cannot pay could be lent elsewhere.

        The head saves up for other workers, and loses nothing by it.
        """
        later = iter(heads)
        for _, entry in later:
            if entry is head:
                break
        for _, entry in later:
            if self._savings.of(entry) is None and not self._deposits.of(entry):
                placement = self._places.find(channel, entry, self._now_ns, capped)
                if placement is not None:
                    return placement
        return None

    def _look_behind(self, channel: Channel, line: Line, capped: set[Group], payer_waits: bool) -> Bid | None:
        """Return a bid for one behind a head that saves: it may pass, or save on another worker if that can be paid.

        With one saving for each line a channel could not have more workers by its weight than it has lines.
        """
        placement = self._place_one_behind(channel, line)
        if placement is not None:
            return self._bid_to_place(channel, placement, payer_waits)
        for entry in line.behind():
            if self._savings.of(entry) is not None:
                continue
            worker, blocks = self._places.to_save(channel, entry, self._now_ns, capped)
            if worker is None or self._holds.cost_block_ns(channel, blocks) > channel.deficit_block_ns:
                return None
            bid = self._bid_to_save(channel, line, entry, worker, blocks, payer_waits)
            return None if bid.saving is None or self._aside.saves_in_vain(bid.saving) else bid
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
