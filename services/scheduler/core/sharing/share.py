"""What a channel is entitled to."""

from __future__ import annotations

from services.core.value import Value


class Share(Value):
    """What a channel is entitled to. Shares are parts of each worker's capacity, 0 to 1; a lower tier goes first."""

    def __init__(
        self, weight: float = 1.0, guaranteed_share: float = 0.0, ceiling_share: float = 1.0, tier: int = 0
    ) -> None:
        self.weight, self.guaranteed_share, self.ceiling_share = weight, guaranteed_share, ceiling_share
        self.tier = tier

    @property
    def has_ceiling(self) -> bool:
        """Whether there is something of a worker that it may not hold."""
        return self.ceiling_share < 1

    def guaranteed_blocks(self, capacity_blocks: int) -> int:
        """Return the blocks nobody else may hold while the channel has work."""
        return int(self.guaranteed_share * capacity_blocks)

    def guaranteed_sequences(self, most_sequences: int) -> int:
        """Return the completions nobody else may have run in place of the channel's while it has work.

        A guarantee is one at least: blocks without a place to run in would be none.
        """
        return max(int(self.guaranteed_share * most_sequences), 1) if self.guaranteed_share else 0

    def ceiling_blocks(self, capacity_blocks: int) -> int:
        """Return the most blocks the channel may hold."""
        return int(self.ceiling_share * capacity_blocks)
