"""Whose request is granted next, and on which worker.

Tiers come strictly one after the other. Within a tier channels take turns by
deficit round robin (Shreedhar and Varghese, SIGCOMM '95) in **block-nanoseconds**, at each pool of workers
that compete for the same requests as at an output port of a switch: a
round gives every channel with work there a quantum proportional to its weight; a grant is charged
what it is expected to occupy, corrected by what it really does (`holds`). A new round
begins only when every channel that could be served has used up its deficit.

What a channel may take of one worker (`rules`):

- never past its ceiling, except that a channel holding nothing there may always start one request (or a
  request larger than the ceiling could never run);
- up to its guarantee, of blocks and of sequences, whatever others want: that part is fenced off from the others
  while it has work here, so what ends there is its own again;
- beyond that, whatever neither a fence nor a saving keeps.

**Nobody starves.** A head that can pay but fits nowhere pays, and *saves* on one of the workers with most room
(`savings`): its start is booked, and others pass it there only if they do not delay it. Guarantees that would leave
the head too little room bend, in proportion, while it saves. One head saves per worker; those behind it in its line
may on others. Another that can pay does, and waits for the savings before it and for channels with more to spare
(`deposits`). There is an end to both: rounds that begin meanwhile bring its turn nearer as they do those of others.

**Nothing idles for fairness' sake.** While those that have paid do not fit, rounds go on for whoever fits, who pays for
what it takes; those that wait gain no more by them than they can use. What estimates were wrong by is owed in full
while a channel has work, or weights would not divide what is occupied; after a pause no more than a charge is left of
it.

**Nothing is looked at twice.** A worker that has no room for a channel is left alone until something ends there
(`openings`), and a pass before which nothing ended and nobody came to the front of a line does nothing. A grant
takes O(channels), amortised, however many wait and however many workers there are; of groups of workers it looks at
those that may have room (`widest`).
"""

from __future__ import annotations

from typing import Final

from services.scheduler.core.admission.bookings import Bookings
from services.scheduler.core.admission.policy import Policy
from services.scheduler.core.entry import Entry
from services.scheduler.core.fleet import Fleet, Pool, Worker
from services.scheduler.core.messages import Announced, ReleaseCause, WorkerOpened
from services.scheduler.core.sharing.aside import Aside
from services.scheduler.core.sharing.bids import Bid, Placement, soonest
from services.scheduler.core.sharing.channel import Account, Channel
from services.scheduler.core.sharing.claims import Claims
from services.scheduler.core.sharing.deposits import Deposits
from services.scheduler.core.sharing.guarantees import Guarantees
from services.scheduler.core.sharing.heads import Heads
from services.scheduler.core.sharing.holds import Holds
from services.scheduler.core.sharing.line import Line
from services.scheduler.core.sharing.longest import Longest
from services.scheduler.core.sharing.places import Places
from services.scheduler.core.sharing.precedence import Precedence
from services.scheduler.core.sharing.rules import Rules, Spare
from services.scheduler.core.sharing.savings import Saving, Savings
from services.scheduler.core.sharing.tiers import Tiers

GUARDS_LOOK_NS: Final = 1_000_000_000
"""How often a look past fences is taken again: what a guarantee used lately is forgotten with time, untold."""


class Arbiter:
    """Deficit round robin over channels, with tiers, guarantees, ceilings and savings. Owns deficits and savings."""

    def __init__(self, policy: Policy, fleet: Fleet) -> None:
        """Arbitrate over channels that are added, which are taken in that order within a round."""
        self._policy = policy
        self._fleet = fleet
        self._ring: list[Channel] = []
        self._tiers = Tiers(policy)
        self._holds = Holds()
        self._savings = Savings(self._holds)
        self._deposits = Deposits(fleet)
        self._bookings = Bookings(policy, fleet)
        self._guarantees = Guarantees(self._savings, policy, self._bookings)
        self._precedence = Precedence(policy, self._guarantees)
        self._rules = Rules(self._savings, policy, self._guarantees)
        self._places = Places(
            self._rules, policy, self._bookings, self._savings, self._guarantees, self._precedence, self._tiers
        )
        self._now_ns = 0
        self._news: dict[Pool, None] = {}
        """Pools to be looked at: something ended there, or somebody came to the front of a line."""
        self._bids: dict[Pool, dict[Channel, Bid]] = {}
        self._longest = Longest(self._holds, self._tiers)
        self._claims = Claims(self._longest, self._savings, self._deposits)
        self._guards_looked_ns = 0
        self._alone = False
        self._paused: set[Worker] = set()
        self._back: dict[Worker, None] = {}
        """Workers of which it was said since the last pass that they take grants again."""
        self._lessons = policy.lessons
        self._aside = Aside(self._bookings, fleet, self._places, self._tiers, self._longest)
        self._heads = Heads(
            policy, fleet, self._holds, self._savings, self._deposits, self._bookings, self._places, self._aside
        )

    def add(self, channel: Channel) -> None:
        """Take one more channel into the ring of its tier."""
        self._ring.append(channel)
        self._tiers.sort(self._ring)
        self._guarantees.add(channel)
        self._look_again_everywhere()

    def reshared(self) -> None:
        """Note that channels have other shares than before: what was booked and found out under those is void.

        Heads that saved have their payment back and save again by the new shares, if they still have to.
        """
        self._tiers.sort(self._ring)
        for pool in self._fleet.pools:
            for ring in self._tiers.rings:
                self._claims.hold_to_weights(ring, pool)
        for saving in self._savings:
            self._cancel(saving)
        self._guarantees.reshared(self._ring)
        self._places.take_fenced()
        for worker in self._fleet:
            for channel in self._ring:
                channel.bring_back(worker.group)  # who was kept out by its tier
            self.room_grew(worker)
        self._look_again_everywhere()

    # ---- what happens between passes ----

    def opened(self, worker: Worker) -> None:
        """Note a new worker."""
        self._cancel_outdated()
        self._precedence.opened(worker)
        self._aside.opened(worker, self._ring)
        self.came_back(worker)
        self._look_again_everywhere()

    def comes_again(self, before: Worker, opened: WorkerOpened) -> None:
        """Note that an epoch is about to end as its worker has opened another: what runs in both goes on."""
        self._holds.hand_over(before, opened)
        self._guarantees.hand_over(before, opened)

    def adopted(self, worker: Worker, request_id: str, channel: Channel, now_ns: int) -> None:
        """Charge a request that a worker has brought along: as before, or from now on if nobody was."""
        self._holds.adopted(worker, request_id, channel.account(worker.group.pool), now_ns)
        self._guarantees.note_use(worker, channel, now_ns)

    def ended(self, worker: Worker, now_ns: int) -> None:
        """Note that an epoch is over; its worker is no longer in the fleet."""
        if (saving := self._savings.on(worker)) is not None:
            self._cancel(saving)
        self._holds.drop(worker, now_ns)
        self._guarantees.forget(worker)
        self._precedence.forget(worker)
        self._places.forget(worker)
        self._paused.discard(worker)
        self._back.pop(worker, None)
        for channel in self._ring:
            channel.worker_left(worker)
            channel.look_again_at_lasts()
            channel.close_accounts()
        self._aside.ended(worker, self._ring)
        self._look_again_everywhere()

    def came_back(self, worker: Worker) -> None:
        """Note that the worker takes grants again, or for the first time; the next pass asks whether it still does."""
        self._back[worker] = None

    def went_away(self) -> None:
        """Note that some worker takes no grants for a while."""
        for channel in self._ring:
            channel.look_again_at_lasts()
        self._look_again_everywhere()

    def spare(self, worker: Worker, channel: Channel, now_ns: int) -> Spare:
        """Return what the channel could take of the worker that is kept for nobody else."""
        return self._rules.spare(worker, channel, now_ns)

    def may_start(self, channel: Channel, line: Line) -> bool:
        """Return whether any of the line could start if there were room, as of the last pass."""
        return channel.has_turn(line) and self._aside.is_somebody_there(line)

    def goes_first(self, worker: Worker, channel: Channel, request: Announced, blocks: int) -> bool:
        """Return whether the worker's engine would run a request first: its channel's guarantee, bent, has room."""
        within = self._guarantees.is_within(worker, channel, request, blocks)
        return within and self._precedence.goes_first(worker, channel, request, blocks)

    def met(self, worker: Worker, request_id: str, channel: Channel, blocks: int, now_ns: int) -> None:
        """Charge a request that met a standing grant; nothing waited for what it takes."""
        self._precedence.granted(worker, request_id, blocks)
        self._guarantees.note_use(worker, channel, now_ns)
        self._holds.granted(worker, request_id, channel.account(worker.group.pool), blocks, 0, now_ns)

    def settled(self, worker: Worker, request_id: str, held_blocks: int, now_ns: int) -> None:
        """Note that a request holds `held_blocks` from now on."""
        self._precedence.holds(worker, request_id, held_blocks)
        channel = self._holds.changed(worker, request_id, held_blocks, now_ns)
        if channel is not None:
            self._guarantees.note_use(worker, channel, now_ns)

    def released(self, worker: Worker, request_id: str, cause: ReleaseCause, now_ns: int) -> None:
        """Note that a request holds nothing any more."""
        self._holds.ended(worker, request_id, cause, now_ns)
        self._savings.ended(worker, request_id)
        self._precedence.ended(worker, request_id)
        if worker.paused_until_ns > now_ns:
            self._deposits.in_doubt |= worker not in self._paused
            self._paused.add(worker)
        self.room_grew(worker)

    def room_grew(self, worker: Worker) -> None:
        """Note that the worker may have more room than at the last pass."""
        for channel in self._ring:
            channel.room_grew(worker)
            self._aside.room_grew(worker, channel)
        self._look_again(worker.group.pool)

    def _look_again(self, pool: Pool) -> None:
        self._news[pool] = None
        self._bids.pop(pool, None)

    def _look_again_everywhere(self) -> None:
        self._news = dict.fromkeys(self._fleet.pools)
        self._bids.clear()
        self._deposits.in_doubt = True

    def _look_elsewhere(self, channel: Channel, pool: Pool) -> None:
        """Look again what a channel would do in other pools, as an entry has left or saves that was in line there."""
        if (line := channel.lines.get("")) is not None:
            channel.moved[line] = None
        for other in self._fleet.pools:
            if other is not pool:
                self._bids.get(other, {}).pop(channel, None)
                self._news[other] = None

    def _look_on(self) -> None:
        """Look again at lines left for this pass, wherever they may run; what other channels would do there stands."""
        for line, channel in self._aside.left.items():
            for pool in self._fleet.pools_serving(line.model):
                self._bids.get(pool, {}).pop(channel, None)
                self._news[pool] = None

    # ---- a pass ----

    def begin(self, now_ns: int) -> None:
        """Start a pass: end savings whose head or worker is no longer there, and see whether there is anything new."""
        self._now_ns = now_ns
        self._claims.begin()
        self._heads.begin(now_ns)
        if self._lessons != self._policy.lessons:
            self._lessons = self._policy.lessons
            self._bring_all_back()
        if self._aside.unfinished:
            self._look_on()
        self._take_back()
        self._aside.begin(now_ns, self._ring)
        for account in self._aside.take_hopeless():
            self._bids.get(account.pool, {}).pop(account.channel, None)
            self._news[account.pool] = None
        self._deposits.return_in_vain(self._ring, self._heads.in_turn, self._heads.could_hold)
        self._end_savings()
        ended = [worker for worker in self._paused if now_ns >= worker.paused_until_ns]
        self._paused.difference_update(ended)
        self._back.update(dict.fromkeys(ended))
        self._take_back()
        for channel in self._ring:
            for model in channel.changed:
                for pool in self._fleet.pools_serving(model):
                    self._look_again(pool)
            channel.changed.clear()
            self._lift_fence(channel)
        if now_ns - self._guards_looked_ns >= GUARDS_LOOK_NS:
            self._guards_looked_ns = now_ns
            self._look_past_fences(all_kept_out=True)

    def _take_back(self) -> None:
        """Bring back whom only those could hold that take grants again; one that is away since brings nobody."""
        if not self._back:
            return
        away = self._paused | self._back.keys()
        back = [worker for worker in reversed(self._back) if worker.takes_grants(self._now_ns)]
        self._back.clear()
        self._aside.bring_back(back, away, self._ring)
        for worker in back:
            self.room_grew(worker)

    def _end_savings(self) -> None:
        """End those whose head is behind others or waits for its ceiling by now, or whose worker is not there."""
        for saving in self._heads.savings_out_of_turn():
            self._cancel(saving)
        for saving in self._heads.capped_savings():
            self._cancel(saving)
        for saving in self._savings:
            moved = saving.worker.group.pool is not saving.account.pool
            taken = self._rules.is_last_taken(saving.worker, saving.channel, saving.entry)
            if moved or taken or not saving.worker.takes_grants(self._now_ns) or self._aside.saves_in_vain(saving):
                self._cancel(saving)

    def _bring_all_back(self) -> None:
        """Look again at everybody: what they book is not what it was, and what was saved for them may be too little."""
        for saving in self._savings:
            self._cancel(saving)
        for channel in self._ring:
            for worker in self._fleet:
                channel.bring_back(worker.group)
        self._aside.learned()
        self._look_again_everywhere()

    def next(self) -> Placement | None:
        """Return the next grant of this pass, None if nothing more fits. `placed` must follow each placement."""
        while self._news:
            pool = next(iter(self._news))  # until nothing more fits there: what is new elsewhere meanwhile waits
            self._alone = sum(channel.asks(pool) for channel in self._ring) == 1
            for ring in self._tiers.rings if pool.present else ():
                placement = self._next_of(ring, pool)
                if placement is not None:
                    return placement
                if self._aside.unfinished and self._aside.ends_with(ring[0].share.tier, pool):
                    break
            del self._news[pool]
        return None

    @property
    def unfinished(self) -> bool:
        """Whether lines wait for another pass, which is to follow at once."""
        return self._aside.unfinished

    def placed(self, placement: Placement) -> None:
        """Charge a placement that was booked; the entry has left its line."""
        entry, channel, worker, blocks = placement.entry, placement.channel, placement.worker, placement.blocks
        account = channel.account(worker.group.pool)
        self._savings.passed(worker, entry, channel, blocks)
        prepaid_block_ns = self._deposits.take(entry, account) + self._take_saving(entry, account)
        peak_blocks = self._policy.peak_blocks(entry.announced, worker, blocks)
        self._precedence.granted(worker, entry.request_id, peak_blocks)
        self._guarantees.note_use(worker, channel, self._now_ns)
        completions = entry.announced.completions
        self._holds.granted(worker, entry.request_id, account, blocks, prepaid_block_ns, self._now_ns, completions)
        self._drop_bids(channel, worker)
        if not entry.announced.model:
            self._look_elsewhere(channel, account.pool)  # it was in line for every pool
        channel.changed.discard(entry.announced.model)
        self._lift_fence(channel)

    def _drop_bids(self, channel: Channel, worker: Worker) -> None:
        """Drop the channel's bid and those for the worker. The others stand: nobody has less room elsewhere."""
        bids = self._bids.get(worker.group.pool, {})
        for other, bid in list(bids.items()):
            found = bid.placement or bid.saving
            if other is channel or (found is not None and found.worker is worker):
                del bids[other]

    def _take_saving(self, entry: Entry, account: Account) -> int:
        """End the saving of an entry that starts, if it has one; return what was paid from the account.

        What was paid from another goes back there.
        """
        saving = self._savings.of(entry)
        if saving is None:
            return 0
        if saving.account is not account:
            self._cancel(saving)
            return 0
        self._savings.remove(saving)
        self.room_grew(saving.worker)
        return saving.paid_block_ns

    def _lift_fence(self, channel: Channel) -> None:
        """If a line has ended, nothing is fenced off for it any more: look again where something was."""
        if channel.line_ended:
            channel.line_ended = False
            if channel.share.guaranteed_share:
                self._look_past_fences()

    def _look_past_fences(self, all_kept_out: bool = False) -> None:
        """Look again where something was kept for a guarantee: there may be less kept by now."""
        for worker in self._places.take_fenced(all_kept_out):
            self.room_grew(worker)

    # ---- turns ----

    def _next_of(self, ring: list[Channel], pool: Pool) -> Placement | None:
        """Return the next grant of a tier in a pool."""
        while True:
            bids = [self._bid(channel.account(pool)) for channel in ring if channel.asks(pool)]
            first = soonest([bid for bid in bids if bid.wants and bid.affordable])
            if first is not None:
                if first.saving is None:
                    return first.placement
                self._save(first.saving)
                continue
            soonest_to_pay = soonest([bid for bid in bids if bid.wants])
            if soonest_to_pay is None:
                return None
            self._claims.begin_rounds(bids, soonest_to_pay.rounds)

    def _bid(self, account: Account) -> Bid:
        """Return what the channel would do next in a pool, as found before if nothing has changed for it there."""
        bids = self._bids.setdefault(account.pool, {})
        bid = bids.get(account.channel)
        waited = bid is not None and bid.wants and bid.placement is None and bid.saving is None
        if bid is None or (waited and bid.affordable):
            bid = bids[account.channel] = self._heads.bid(account, self._alone)
            if account.channel.uncovered:
                account.channel.uncovered = False
                self._look_elsewhere(account.channel, account.pool)
        return bid

    # ---- savings ----

    def _save(self, saving: Saving) -> None:
        """Pay and begin to save, in place of a lower tier's head if one saves there."""
        if not self._deposits.take(saving.entry, saving.account):
            saving.account.pay(saving.paid_block_ns)
        if (lower := self._savings.on(saving.worker)) is not None:
            self._cancel(lower)
        self._savings.add(saving)
        if not saving.entry.announced.model:
            self._look_elsewhere(saving.channel, saving.account.pool)
        saving.channel.room_grew(saving.worker)
        self._drop_bids(saving.channel, saving.worker)

    def _cancel_outdated(self) -> None:
        """End savings for what their heads would not book there any more, as where only a larger worker has come."""
        for saving in self._savings:
            found = self._bookings.options(saving.entry).by_group.get(saving.worker.group)
            if found is None or found[1] != saving.blocks:
                self._cancel(saving)

    def _cancel(self, saving: Saving) -> None:
        self._savings.remove(saving)
        saving.account.refund(saving.paid_block_ns)
        if not saving.entry.announced.model:
            self._look_elsewhere(saving.channel, saving.worker.group.pool)
        self.room_grew(saving.worker)
