"""What a channel would do next: whose turn it is within it, where that fits, and who may pass who does not.

The heads of its lines are looked at in the order in which they would leave. One that does not fit pays, and saves or
waits to (`deposits`); those behind it and the other lines go on.
"""

from __future__ import annotations

from bisect import insort
from typing import Final

from services.scheduler.core.admission.bookings import Bookings
from services.scheduler.core.admission.policy import Policy
from services.scheduler.core.entry import Entry
from services.scheduler.core.fleet import Fleet, Worker
from services.scheduler.core.sharing.aside import Aside
from services.scheduler.core.sharing.bids import Bid, Placement
from services.scheduler.core.sharing.channel import Account, Channel
from services.scheduler.core.sharing.deposits import Deposit, Deposits
from services.scheduler.core.sharing.holds import Holds
from services.scheduler.core.sharing.kept import NONE_KEPT, Kept
from services.scheduler.core.sharing.line import FRONT_REQUESTS, Key, Line, order
from services.scheduler.core.sharing.older import Older
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
        self._alone = False
        self._kept = NONE_KEPT
        """For heads that were looked at before, of the same channel, and wait for its ceiling."""
        self._no_worker: bool | None = None
        """Whether others save on all workers of the pool, None until that is asked in a look at heads."""
        self._known: dict[Account, Older] = {}
        """What heads are to younger ones, until anything is granted, saved, paid, paid back or set aside."""
        self._payments = 0
        """How many of those there had been."""

    def begin(self, now_ns: int) -> None:
        """Start a pass."""
        self._now_ns = now_ns
        self._known.clear()

    def bid(self, account: Account, alone: bool) -> Bid:
        """Return what the channel would do next in the pool; whoever nobody could run meanwhile is set aside.

        It is `alone` if no other has work there.
        """
        self._alone = alone
        channel = account.channel
        self._aside.look_again(channel)
        bid = self._look_at_heads(account)
        if bid.placement is None and bid.saving is None and channel.share.guaranteed_share:
            placement = self._place_guaranteed_behind(account)
            if placement is not None:
                cost_block_ns = self._cost_block_ns(account, placement.entry, placement.worker, placement.blocks)
                return Bid(account, cost_block_ns=cost_block_ns, placement=placement)
        return bid

    def _look_at_heads(self, account: Account) -> Bid:
        """Look at the heads in order until one can be placed, may save or cannot pay.

        Where one is set aside, or waits for the ceiling, its line's next has its turn among those that are younger: the
        older ones wait, whoever is aside.
        """
        takes_part, looked_at = False, 0
        self._no_worker = None
        self._known.clear()
        account.channel.set_unserved_aside(self._fleet.serving)
        bid = self._look_at_paid(account)
        if bid is not None:
            return bid
        self._kept = NONE_KEPT
        heads = self._heads_here(account)
        while looked_at < len(heads):
            line, head = heads[looked_at]
            looked_at += 1
            bid = self._look_at_head(account, line, head)
            if bid is None:
                self._known.clear()
                if (following := line.head()) is not None:
                    insort(heads, (line, self._head_here(account, line, following)), looked_at, key=_order_of)
                continue
            if bid.wants:
                return bid
            takes_part |= bid.takes_part
            if (following := self._next_in_turn(account, line, head)) is not None:
                insort(heads, (line, following), looked_at, key=_order_of)
        takes_part = takes_part or account.channel.waits_for_last(account.pool)
        return Bid(account, wants=False, takes_part=takes_part)

    def _look_at_head(self, account: Account, line: Line, head: Entry) -> Bid | None:
        """Return a bid for a head or those behind it, one that wants nothing if all wait, None if it was set aside."""
        channel, pool = account.channel, account.pool
        saving, deposit = self._savings.of(head), self._paid_for(account, head)
        if deposit is None and (saving is None or saving.account is not account):
            placement = self._places.find(channel, pool, head, self._now_ns, self._kept)
            if placement is not None:
                return self._bid_to_place(account, placement)
        has_paid = saving is not None or deposit is not None
        worker, blocks = None, 0
        if not has_paid:
            worker, blocks = self._places.to_save(channel, pool, head, self._now_ns, self._kept)
            could_save = blocks > 0
        else:
            could_save = saving is not None or self._places.could_save(channel, pool, head, self._now_ns, self._kept)
        if saving is None:
            front = line.head()
            kept_out = front is head and self._aside.takes(account, line, head, could_save=could_save)
            if line.head() is not front:
                return None
            if kept_out:
                return Bid(account, wants=False, takes_part=False)
        bid: Bid | None = None
        if blocks and not has_paid:
            bid = self._bid_for_head(account, line, head, worker, blocks)
        elif not could_save:
            self._kept = self._kept.with_those(self._kept_at_ceiling(channel, head))
        bid = bid or self._look_behind(account, line, head)
        return bid or Bid(account, wants=False, takes_part=has_paid or blocks > 0)

    def _next_in_turn(self, account: Account, line: Line, head: Entry) -> Entry | None:
        """Return the first behind a line's head if that waits for its channel's ceiling, and there is one."""
        if not account.channel.share.has_ceiling or head is not self._head_here(account, line, head):
            return None
        first = self.in_turn(account, line, 1)
        return first[0] if first and first[0] is not head else None

    def _heads_here(self, account: Account) -> list[tuple[Line, Entry]]:
        """Return the heads as they are in the pool: of a line that is in others too, the first that is for this one.

        That is none that has paid elsewhere, nor one that no worker here could hold.
        """
        heads = account.channel.heads(account.pool)
        if len(self._fleet.pools) < 2 or all(line.model for line, _ in heads):
            return heads
        heads = [(line, self._head_here(account, line, head)) for line, head in heads]
        heads.sort(key=_order_of)
        return heads

    def _head_here(self, account: Account, line: Line, head: Entry) -> Entry:
        """Return the head of a line as it is in the pool: the first that is for this one, its `head` if none is."""
        first = self.first_of(account, line, 1)
        return first[0] if first else head

    def first_of(self, account: Account, line: Line, count: int) -> list[Entry]:
        """Return so many of the first entries of a line, as they are in the pool of the account."""
        if line.model or len(self._fleet.pools) < 2:
            return line.first(count)
        return [entry for entry in line.first(FRONT_REQUESTS) if self._is_for(account, entry)][:count]

    def in_turn(self, account: Account, line: Line, count: int) -> list[Entry]:
        """Return so many of the first of a line whose turn it may be: those but for who waits for a channel's ceiling.

        Workers that are too small for these, and for older heads of other lines that wait for it, are for the others.
        """
        channel = account.channel
        if not channel.share.has_ceiling:
            return self.first_of(account, line, count)
        found: list[Entry] = []
        kept = NONE_KEPT
        if not (entries := self.first_of(account, line, FRONT_REQUESTS)):
            return []
        older = self._older(account, entries)
        for entry in entries:
            if len(found) == count:
                break
            paid = self._savings.of(entry) is not None or self._deposits.of(entry) is not None
            out = older.of(entry).kept.with_those(kept)
            if paid or self._places.could_save(channel, account.pool, entry, self._now_ns, out):
                found.append(entry)
            else:
                kept = kept.with_those(self._kept_at_ceiling(channel, entry))
        return found

    def _is_for(self, account: Account, entry: Entry) -> bool:
        """Return whether an entry may start or save in the pool, and has not paid elsewhere."""
        paid = self._savings.of(entry) or self._deposits.of(entry)
        if paid is not None:
            return paid.account is account
        return bool(self._bookings.of(entry, account.pool))

    def could_hold(self, account: Account, entry: Entry) -> bool:
        """Return whether any worker of the pool that takes grants could hold the entry once enough has ended."""
        return self._places.could_hold(account.channel, account.pool, entry, self._now_ns)

    def _bid_for_head(
        self, account: Account, line: Line, head: Entry, worker: Worker | None, blocks: int
    ) -> Bid | None:
        """Return a bid for a head that fits nowhere: to save on the worker, or as it cannot pay; None if it waits.

        It has paid by then, unless another head of the channel has that waits for the same workers.
        """
        groups = self._fleet.serving(line.model)
        if self._deposits.another_waits(account, head, groups):
            return None
        cost_block_ns = self._cost_block_ns(account, head, worker, blocks)
        if cost_block_ns > account.deficit_block_ns and self._paid_for(account, head) is None:
            return Bid(account, cost_block_ns=cost_block_ns)
        if worker is not None:
            return self._unless_in_vain(self._bid_to_save(account, line, head, worker, blocks))
        self._deposits.wait(account, line, head, cost_block_ns)
        return None

    def _paid_for(self, account: Account, entry: Entry) -> Deposit | None:
        """Return what was paid for the entry, if from this account."""
        deposit = self._deposits.of(entry)
        return deposit if deposit is not None and deposit.account is account else None

    def _kept_at_ceiling(self, channel: Channel, head: Entry) -> Kept:
        """Return where its ceiling keeps a head out: others of the channel would for ever, if they went before it."""
        if not channel.share.has_ceiling:
            return NONE_KEPT
        return Kept(self._bookings.options(head).needed_blocks)

    def savings_out_of_turn(self) -> list[Saving]:
        """Return savings that are to end, as others are first in their lines by now.

        Of a line with so many savings, and so many that have paid to wait, the first so many have them: who comes
        before them takes the last one's place. Where an older one waits it would be passed without a booked start.
        """
        found: list[Saving] = []
        for (line, account), savings in self._savings.by_line().items():
            waiting = len(self._deposits.in_line(account, line))
            present = account.channel.lines.get(line.model) is line
            first = self.in_turn(account, line, len(savings) + waiting) if present else []
            found += [
                saving
                for saving in savings
                if saving.entry not in first or self._kept_for_paid(account, saving).has(saving.worker)
            ]
        return found

    def capped_savings(self) -> list[Saving]:
        """Return savings where an older head waits for its channel's ceiling: it would for ever, if they started."""
        found: list[Saving] = []
        self._known.clear()  # savings have ended since
        for account in self._savings.accounts():
            if account.channel.share.has_ceiling:
                savings = self._savings.of_account(account)
                older = self._older(account, [saving.entry for saving in savings])
                found += [saving for saving in savings if older.of(saving.entry).kept.has(saving.worker)]
        return found

    def _older(self, account: Account, entries: list[Entry]) -> Older:
        """Return what heads of a channel with a ceiling are to younger entries, of which these are all."""
        channel, pool = account.channel, account.pool
        if not channel.share.has_ceiling:
            return Older([])
        if self._payments != self._deposits.payments:
            self._payments = self._deposits.payments
            self._known.clear()
        older = self._known.get(account)
        if older is None:
            older = self._known[account] = Older(self._heads_here(account))
        for line, head in older.look_before(max(map(order, entries))):
            if self._savings.of(head) is not None:
                continue
            if not self._places.could_save(channel, pool, head, self._now_ns, older.last.kept):
                older.add(order(head), self._kept_at_ceiling(channel, head), set())
            elif self._deposits.of(head) is None and not self._deposits.older_waits(account, head):
                older.add(order(head), NONE_KEPT, set(self._fleet.serving(line.model)))
        return older

    def _look_at_paid(self, account: Account) -> Bid | None:
        """Return a bid for a request that has paid, if one may start or save.

        It waits for none of its channel that cannot pay, or that its saving keeps out. It does where the channel's
        ceiling keeps out an older head; what was paid meanwhile is paid back, once, when that head could be paid for.
        """
        channel, pool = account.channel, account.pool
        savings, deposits = self._savings.of_account(account), self._deposits.of_account(account)
        if not savings and not deposits:
            return None
        older = self._older(account, [saving.entry for saving in savings] + [deposit.entry for deposit in deposits])
        for saving in savings:
            kept = older.of(saving.entry).kept.with_those(self._kept_for_paid(account, saving))
            placement = self._places.find(channel, pool, saving.entry, self._now_ns, kept)
            if placement is not None:
                return self._bid_to_place(account, placement)
        for deposit in deposits:
            before = older.of(deposit.entry)
            if not deposit.entry.stepped_back and not before.first.isdisjoint(self._deposits.groups(deposit)):
                deposit.entry.stepped_back = True
                account.refund(self._deposits.take(deposit.entry, account))
                channel.stepped_back(deposit.line)
                continue
            placement = self._places.find(channel, pool, deposit.entry, self._now_ns, before.kept)
            if placement is not None:
                return self._bid_to_place(account, placement)
            if all(self._savings.are_everywhere(group, channel) for group in self._deposits.groups(deposit)):
                continue
            worker, blocks = self._places.to_save(channel, pool, deposit.entry, self._now_ns, before.kept)
            if worker is not None:
                return self._bid_to_save(account, deposit.line, deposit.entry, worker, blocks)
        return None

    def _kept_for_paid(self, account: Account, saving: Saving) -> Kept:
        """Return the workers that could hold an older one of a saving's line that has paid to wait."""
        kept = NONE_KEPT
        for entry in self._deposits.in_line(account, saving.line):
            if order(entry) < order(saving.entry):
                kept = kept.with_those(self._could_hold(account, entry))
        return kept

    def _look_behind(self, account: Account, line: Line, head: Entry) -> Bid | None:
        """Return a bid for one behind a head that waits: it may pass, or save on another worker if that can be paid.

        Where the head has no booked start those behind it have what could never hold it. With one saving for each line
        a channel could not have more workers by its weight than it has lines. Where it is alone there are no others
        that its weight would have to hold against, and what is kept is kept from its own.
        """
        channel = account.channel
        has_start = self._savings.of(head) is not None
        kept = self._kept if has_start else self._kept.with_those(self._could_hold(account, head))
        placement = self._place_one_behind(account, line, kept, may_go_first=has_start)
        if placement is not None:
            return self._bid_to_place(account, placement)
        for entry in () if self._alone or self._others_save_everywhere(account) else line.behind():
            if self._savings.of(entry) is not None:
                continue
            worker, blocks = self._places.to_save(channel, account.pool, entry, self._now_ns, kept)
            if worker is None or self._cost_block_ns(account, entry, worker, blocks) > account.deficit_block_ns:
                return None
            return self._unless_in_vain(self._bid_to_save(account, line, entry, worker, blocks))
        return None

    def _unless_in_vain(self, bid: Bid) -> Bid | None:
        return None if bid.saving is None or self._aside.saves_in_vain(bid.saving) else bid

    def _others_save_everywhere(self, account: Account) -> bool:
        """Return whether savings keep the channel from every worker of the pool, found once for all its lines."""
        if self._no_worker is None:
            channel, savings = account.channel, self._savings
            self._no_worker = all(savings.are_everywhere(group, channel) for group in account.pool.groups)
        return self._no_worker

    def _could_hold(self, account: Account, head: Entry) -> Kept:
        """Return the workers of the pool that could hold the head."""
        return Kept(self._bookings.options(head, account.pool).needed_blocks)

    def _bid_to_place(self, account: Account, placement: Placement) -> Bid:
        """Return a bid for a placement, for nothing if that was paid for."""
        saving = self._savings.of(placement.entry)
        if saving is not None and saving.account is account:
            return Bid(account, placement=placement)
        if (deposit := self._paid_for(account, placement.entry)) is not None:
            return Bid(account, placement=placement, since_block_ns=deposit.since_block_ns)
        cost_block_ns = self._cost_block_ns(account, placement.entry, placement.worker, placement.blocks)
        return Bid(account, cost_block_ns=cost_block_ns, placement=placement)

    def _cost_block_ns(self, account: Account, entry: Entry, worker: Worker | None, blocks: int) -> int:
        """Return what the entry is expected to cost on a worker where it books `blocks`.

        While others save on all of them, so that there is no worker yet, it is what it may be at the least. What is
        paid too little is owed when that is known; what is paid too much comes back as turns in hand.
        """
        completions = entry.announced.completions
        if worker is not None:
            return self._holds.cost_block_ns(account, worker.charged_blocks(blocks, completions))
        groups = (group for group, _, _ in self._bookings.of(entry, account.pool))
        least_blocks = min(group.charged_blocks(blocks, completions) for group in groups)
        return self._holds.cost_block_ns(account, least_blocks)

    def _bid_to_save(self, account: Account, line: Line, head: Entry, worker: Worker, blocks: int) -> Bid:
        """Return a bid to save on the worker, for nothing if the head was paid for."""
        peak_blocks = self._policy.peak_blocks(head.announced, worker, blocks)
        if (deposit := self._paid_for(account, head)) is not None:
            saving = Saving(head, account, line, worker, blocks, peak_blocks, deposit.paid_block_ns)
            return Bid(account, saving=saving, since_block_ns=deposit.since_block_ns)
        cost_block_ns = self._cost_block_ns(account, head, worker, blocks)
        saving = Saving(head, account, line, worker, blocks, peak_blocks, cost_block_ns)
        return Bid(account, cost_block_ns=cost_block_ns, saving=saving)

    def _place_one_behind(self, account: Account, line: Line, kept: Kept, may_go_first: bool) -> Placement | None:
        """Return a placement for the first request that may pass the head."""
        channel, pool = account.channel, account.pool
        if all(kept.has_all(group) for group in self._fleet.serving(line.model) if group.pool is pool):
            return None
        for entry in line.behind():
            if self._places.is_worth_a_look(channel, pool, entry, kept):
                placement = self._places.find(channel, pool, entry, self._now_ns, kept, may_go_first)
                if placement is not None:
                    return placement
        return None

    def _place_guaranteed_behind(self, account: Account) -> Placement | None:
        """Return a placement for the first request that goes first behind a head that waits: its guarantee is free.

        What passes is charged to the deficit that the head pays from, and counts against their ceiling. So that it does
        not keep the head out for ever, nothing passes one that has waited for long.
        """
        channel, pool = account.channel, account.pool
        for line, head in channel.heads(pool):
            found = self._places.find_first(channel, pool, head, self._now_ns)
            if found is not None or self._has_waited(account, head):
                return found
            for entry in line.behind():
                placement = self._places.find_first(channel, pool, entry, self._now_ns)
                if placement is not None:
                    return placement
        return None

    def _has_waited(self, account: Account, head: Entry) -> bool:
        """Return whether a head has let those behind it pass for long enough.

        One that has paid loses nothing by them.
        """
        waited_ns = self._now_ns - head.announced_ns
        if not account.hold_time.known or waited_ns <= PASSED_HOLDS * account.hold_time.mean_ns:
            return False
        return self._savings.of(head) is None


def _order_of(pair: tuple[Line, Entry]) -> Key:
    return order(pair[1])
