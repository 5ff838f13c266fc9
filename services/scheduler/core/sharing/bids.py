"""What each channel would do next, and who goes first."""

from __future__ import annotations

from typing import Final

from services.core.value import Value
from services.scheduler.core.entry import Entry
from services.scheduler.core.fleet import Worker
from services.scheduler.core.sharing.channel import Account, Channel
from services.scheduler.core.sharing.savings import Saving

PAID_ROUNDS: Final = -(1 << 62)
"""Rank of a head that has saved: before all that have yet to pay, and among such those with most to spare."""


class Placement(Value):
    """Grant this entry on this worker, booking `blocks`; `goes_first` if its engine runs it before what does not."""

    def __init__(self, entry: Entry, channel: Channel, worker: Worker, blocks: int, goes_first: bool) -> None:
        self.entry, self.channel, self.worker, self.blocks = entry, channel, worker, blocks
        self.goes_first = goes_first


class Bid:
    """What a channel would do next, for `cost_block_ns`: place a request, or begin to save for one, or (neither) wait.

    `since_block_ns` is of a request that has paid, while it waited for a worker to save on (`deposits`): with all that
    its channel ever gained, what the channel would have in hand if it had spent nothing since. None for all others.

    `wants` is False if it has nothing to pay for; `takes_part` tells that it gains by a round: it has a head that a
    worker could run, also if that one has paid already.
    """

    __slots__ = (
        "account",
        "cost_block_ns",
        "placement",
        "saving",
        "since_block_ns",
        "takes_part",
        "wants",
    )

    def __init__(
        self,
        account: Account,
        wants: bool = True,
        cost_block_ns: int = 0,
        placement: Placement | None = None,
        saving: Saving | None = None,
        takes_part: bool = True,
        since_block_ns: int | None = None,
    ) -> None:
        """Say what was found for the account; it holds until `Arbiter` drops it."""
        self.account = account
        self.wants = wants
        self.cost_block_ns = cost_block_ns
        self.placement = placement
        self.saving = saving
        self.takes_part = takes_part
        self.since_block_ns = since_block_ns

    @property
    def affordable(self) -> bool:
        """Whether the channel can pay now; what has saved has paid."""
        return self.cost_block_ns <= self.account.deficit_block_ns or not self.cost_block_ns

    @property
    def rounds(self) -> int:
        """The rounds it takes until the channel can pay; negative for what it has to spare then."""
        if self.since_block_ns is not None:
            return -((self.since_block_ns + self.account.gained_block_ns) // self.account.quantum_block_ns)
        if not self.cost_block_ns:
            return PAID_ROUNDS - self.account.deficit_block_ns // self.account.quantum_block_ns
        return self.account.rounds_to_pay(self.cost_block_ns)


def soonest(bids: list[Bid]) -> Bid | None:
    """Return the bid of the channel that can pay soonest or has most to spare, None if there is none.

    So those that have saved up alike take turns, instead of one spending all of it first.
    """
    first: Bid | None = None
    least_rounds = 0
    for bid in bids:
        rounds = bid.rounds
        if first is None or rounds < least_rounds:
            first, least_rounds = bid, rounds
    return first
