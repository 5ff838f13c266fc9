"""What running requests have really occupied, in block-nanoseconds, and what their channels are charged for it.

At the grant a channel is charged an estimate: the blocks booked, for as long as its
requests usually hold theirs. Each ACK corrects it to what has been used so far plus what
is held now for the time that is still expected, and the end to what was used. So
over time a channel pays for exactly what it occupied (loans aside), whatever it booked and however
wrong the estimate was; in between it is off by no more than its running requests are.
"""

from __future__ import annotations

from typing import Final

from services.scheduler.core.fleet import Worker
from services.scheduler.core.sharing.account import Account
from services.scheduler.core.sharing.channel import Channel
from services.scheduler.core.sharing.hold_time import HoldTime

LEAST_HOLD_NS: Final = 1_000_000
"""What a grant is charged at least: about one step of the fastest engine, so that no grant is free."""


class Hold:
    """One reservation that is charged for: what it holds since when, what it used before, what was charged and paid.

    What was `lent` is paid up to a bound of the channel's debt only, so that `paid_block_ns` may stay below the charge;
    of what was `lent_aside`, past a head of the channel that saves up for other workers, nothing is.
    """

    __slots__ = (
        "account", "blocks", "charge_block_ns", "granted_ns", "lent", "lent_aside", "paid_block_ns", "since_ns",
        "used_block_ns",
    )  # fmt: skip

    def __init__(
        self, account: Account, blocks: int, prepaid_block_ns: int, lent: bool, lent_aside: bool, now_ns: int
    ) -> None:
        """Begin a hold of `blocks`, for which nothing but the prepaid is charged yet."""
        self.account = account
        self.granted_ns = now_ns
        self.blocks = blocks
        self.since_ns = now_ns
        self.used_block_ns = 0
        self.charge_block_ns = prepaid_block_ns
        self.paid_block_ns = prepaid_block_ns
        self.lent = lent
        self.lent_aside = lent_aside

    @property
    def channel(self) -> Channel:
        """Whom it is charged to."""
        return self.account.channel

    def use(self, now_ns: int) -> None:
        """Count what has been held since the last change."""
        self.used_block_ns += self.blocks * (now_ns - self.since_ns)
        self.since_ns = now_ns

    def correct(self, charge_block_ns: int) -> None:
        """Let the channel pay the difference to a new charge, or get back what it paid above it.

        What it could pay for at the grant it pays in full, or a channel whose estimates are wrong both ways would gain:
        those too high come back in full. Only of what was lent the debt has a bound; what is beyond that counts where
        loans take turns.
        """
        unpaid_block_ns = self.charge_block_ns - self.paid_block_ns
        if charge_block_ns > self.charge_block_ns:
            more_block_ns = charge_block_ns - self.charge_block_ns
            if not self.lent_aside:
                self.paid_block_ns += self.account.pay(more_block_ns, charge_block_ns if self.lent else None)
        elif charge_block_ns < self.paid_block_ns:
            self.account.refund(self.paid_block_ns - charge_block_ns)
            self.paid_block_ns = charge_block_ns
        self.charge_block_ns = charge_block_ns
        if self.lent:
            self.account.unpaid_block_ns += charge_block_ns - self.paid_block_ns - unpaid_block_ns


class Holds:
    """The holds of every epoch by request. One that a worker brought along is charged to nobody and not in here."""

    def __init__(self) -> None:
        """Start with no hold."""
        self._by_epoch: dict[int, dict[str, Hold]] = {}
        self._any_channel = HoldTime()

    @property
    def known(self) -> bool:
        """Whether any request has ended yet, so that ends can be expected."""
        return self._any_channel.known

    @property
    def usual_ns(self) -> int | None:
        """How long requests of all channels usually hold their blocks, None while nothing is known."""
        return self._any_channel.mean_ns if self._any_channel.known else None

    def cost_block_ns(self, channel: Channel, blocks: int) -> int:
        """Return what a grant of so many blocks is expected to occupy."""
        return blocks * max(self.usual_of_ns(channel), LEAST_HOLD_NS)

    def granted(
        self,
        worker: Worker,
        request_id: str,
        channel: Channel,
        blocks: int,
        prepaid_block_ns: int,
        now_ns: int,
        lent_aside: bool = False,
    ) -> None:
        """Begin a hold and charge it; `prepaid_block_ns` the channel has paid already."""
        charge_block_ns = self.cost_block_ns(channel, blocks)
        account = channel.account(worker.group.pool)
        lent = lent_aside or (not prepaid_block_ns and charge_block_ns > account.deficit_block_ns)
        hold = Hold(account, blocks, prepaid_block_ns, lent, lent_aside, now_ns)
        self._by_epoch.setdefault(worker.epoch, {})[request_id] = hold
        account.last_charge_block_ns = charge_block_ns
        hold.correct(charge_block_ns)

    def changed(self, worker: Worker, request_id: str, blocks: int, now_ns: int) -> Channel | None:
        """Note that the request holds `blocks` from now on; return whom it is charged to if those are more."""
        hold = self._by_epoch.get(worker.epoch, {}).get(request_id)
        if hold is None:
            return None
        hold.use(now_ns)
        grew = blocks > hold.blocks
        hold.blocks = blocks
        left_ns = max(hold.granted_ns + self.usual_of_ns(hold.channel) - now_ns, 0)
        hold.correct(max(hold.used_block_ns + blocks * left_ns, blocks * LEAST_HOLD_NS))
        return hold.channel if grew else None

    def ended(self, worker: Worker, request_id: str, ran: bool, now_ns: int) -> None:
        """End the hold at what it used; one that never ran costs nothing and says nothing about hold times."""
        hold = self._by_epoch.get(worker.epoch, {}).pop(request_id, None)
        if hold is None:
            return
        if not ran:
            hold.correct(0)
            return
        hold.use(now_ns)
        hold.correct(max(hold.used_block_ns, hold.blocks * LEAST_HOLD_NS))
        hold.channel.hold_time.observe(now_ns - hold.granted_ns)
        self._any_channel.observe(now_ns - hold.granted_ns)

    def drop(self, worker: Worker, now_ns: int) -> None:
        """End all holds of an epoch at what they used."""
        for hold in self._by_epoch.pop(worker.epoch, {}).values():
            hold.use(now_ns)
            hold.correct(hold.used_block_ns)

    def count(self, worker: Worker) -> int:
        """Return how many holds the worker has."""
        return len(self._by_epoch.get(worker.epoch, ()))

    def expected_ns(self, worker: Worker, blocks: int) -> int:
        """Return how long it takes until so many blocks have come home, if they come in a steady flow.

        By Little's law what is held comes home once in the mean hold time.
        """
        return self._any_channel.mean_ns * blocks // max(worker.ledger.held_blocks, 1)

    def expected_ends(self, worker: Worker, now_ns: int) -> list[tuple[int, int]]:
        """Return when each hold is expected to end and what it frees, soonest first; one that is late, now."""
        holds = self._by_epoch.get(worker.epoch, {}).values()
        return sorted((max(hold.granted_ns + self.usual_of_ns(hold.channel), now_ns), hold.blocks) for hold in holds)

    def usual_of_ns(self, channel: Channel) -> int:
        """Return how long requests of the channel usually hold their blocks; nothing while no request has ended.

        What is charged too little is owed in the end. What is charged too much comes back as turns in hand, for which
        a channel that comes meanwhile waits: a guess that is too long would let the first to come go on alone.
        """
        time = channel.hold_time if channel.hold_time.known else self._any_channel
        return time.mean_ns if time.known else 0
