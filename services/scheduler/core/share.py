"""What a channel is entitled to."""

from __future__ import annotations

from typing import NamedTuple


class Share(NamedTuple):
    """What a channel is entitled to. Shares are parts of each worker's capacity, 0 to 1; a lower tier goes first."""

    weight: float = 1.0
    guaranteed_share: float = 0.0
    ceiling_share: float = 1.0
    tier: int = 0

    def guaranteed_blocks(self, capacity_blocks: int) -> int:
        """Return the blocks nobody else may hold while the channel has work."""
        return int(self.guaranteed_share * capacity_blocks)

    def ceiling_blocks(self, capacity_blocks: int) -> int:
        """Return the most blocks the channel may hold."""
        return int(self.ceiling_share * capacity_blocks)
