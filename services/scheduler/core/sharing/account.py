"""What a channel may still take of one pool of workers before the others have had their turn.

It is counted in **block-nanoseconds**: blocks that are charged for, times how long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.fleet import Pool
from services.scheduler.core.sharing.hold_time import HoldTime

if TYPE_CHECKING:
    from services.scheduler.core.sharing.channel import Channel


class Account:
    """A channel's standing at a pool.

    Without work there a channel does not save, but it still owes, at most its last charge when it returns.
    """

    __slots__ = (
        "channel", "deficit_block_ns", "gained_block_ns", "hold_time", "last_charge_block_ns", "pool", "running",
    )  # fmt: skip

    def __init__(self, channel: Channel, pool: Pool) -> None:
        """Open it with nothing in hand."""
        self.channel = channel
        self.pool = pool
        self.deficit_block_ns = 0
        self.last_charge_block_ns = 0
        self.gained_block_ns = 0
        """All that rounds have given it."""
        self.hold_time = HoldTime()
        """How long its requests hold blocks there."""
        self.running = 0
        """How many of them do."""

    @property
    def quantum_block_ns(self) -> int:
        """What it gains a round."""
        return self.channel.quantum_block_ns

    @property
    def has_work(self) -> bool:
        """Whether the channel has requests in line that workers of the pool serve."""
        return self.channel.asks(self.pool)

    def returns(self) -> None:
        """Note that the channel has work again.

        It was away: what ran beyond its estimate then kept nobody waiting that this would still be owed to.
        """
        self.deficit_block_ns = max(self.deficit_block_ns, -self.last_charge_block_ns)

    def leaves(self) -> None:
        """Note that the channel has no more work."""
        self.deficit_block_ns = min(self.deficit_block_ns, 0)

    def rounds_to_pay(self, cost_block_ns: int) -> int:
        """Return the rounds it takes until the channel can pay; 0 or less if it can now."""
        return -((self.deficit_block_ns - cost_block_ns) // self.quantum_block_ns)

    @property
    def has_in_hand(self) -> bool:
        """Whether it has another turn in hand: what its last request was charged, and no mere part of a round."""
        return self.deficit_block_ns >= max(self.quantum_block_ns, self.last_charge_block_ns)

    def rounds_until(self, most_block_ns: int) -> int:
        """Return the rounds after which it has so much in hand, and no more."""
        return max((most_block_ns - self.deficit_block_ns) // self.quantum_block_ns, 0)

    def gain(self, rounds: int) -> None:
        """Take the quanta of so many rounds."""
        self.gained_block_ns += rounds * self.quantum_block_ns
        self.deficit_block_ns += rounds * self.quantum_block_ns

    def pay(self, cost_block_ns: int) -> int:
        """Pay and return the cost; what is not in hand is owed."""
        self.deficit_block_ns -= cost_block_ns
        return cost_block_ns

    def refund(self, block_ns: int) -> None:
        """Take back what was paid too much; a channel without work does not save."""
        self.deficit_block_ns += block_ns
        if not self.has_work:
            self.leaves()
