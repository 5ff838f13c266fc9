"""What a channel may still take of one pool of workers before the others have had their turn.

It is counted in **block-nanoseconds**: blocks held, times how long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.fleet import Pool

if TYPE_CHECKING:
    from services.scheduler.core.sharing.channel import Channel


class Account:
    """A channel's standing at a pool.

    Without work there a channel does not save, but it still owes, at most its last charge when it returns.
    """

    __slots__ = ("channel", "deficit_block_ns", "gained_block_ns", "last_charge_block_ns", "pool", "unpaid_block_ns")

    def __init__(self, channel: Channel, pool: Pool) -> None:
        """Open it with nothing in hand."""
        self.channel = channel
        self.pool = pool
        self.deficit_block_ns = 0
        self.last_charge_block_ns = 0
        self.gained_block_ns = 0
        """All that rounds have given it, or would have."""
        self.unpaid_block_ns = 0
        """What it was lent beyond what it ever pays, less what rounds of loans gave it: how far it is from its turn to
        borrow, beside the deficit."""

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
        self.unpaid_block_ns = 0

    def leaves(self) -> None:
        """Note that the channel has no more work."""
        self.deficit_block_ns = min(self.deficit_block_ns, 0)

    def rounds_to_pay(self, cost_block_ns: int) -> int:
        """Return the rounds it takes until the channel can pay; 0 or less if it can now."""
        return -((self.deficit_block_ns - cost_block_ns) // self.quantum_block_ns)

    def gain(self, rounds: int, most_block_ns: int | None = None) -> None:
        """Take the quanta of so many rounds; if `most_block_ns` is given, up to that."""
        self.gained_block_ns += rounds * self.quantum_block_ns
        before = self.deficit_block_ns
        after = before + rounds * self.quantum_block_ns
        self.deficit_block_ns = after if most_block_ns is None else max(min(after, most_block_ns), before)

    def pay(self, cost_block_ns: int, most_debt_block_ns: int | None = None) -> int:
        """Pay and return what was paid: beyond a debt of `most_debt_block_ns`, if given, the rest is forgiven."""
        before = self.deficit_block_ns
        after = before - cost_block_ns
        self.deficit_block_ns = after if most_debt_block_ns is None else max(after, min(before, -most_debt_block_ns))
        return before - self.deficit_block_ns

    def refund(self, block_ns: int) -> None:
        """Take back what was paid too much; a channel without work does not save."""
        self.deficit_block_ns += block_ns
        if not self.has_work:
            self.leaves()
