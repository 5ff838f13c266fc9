"""How long at most, by what is usual, those hold their blocks that compete for a pool of workers."""

from __future__ import annotations

from services.scheduler.core.fleet import Pool
from services.scheduler.core.sharing.holds import Holds
from services.scheduler.core.sharing.tiers import Tiers


class Longest:
    """The longest usual hold times of those who hold or want blocks, as when first asked for in a pass."""

    def __init__(self, holds: Holds, tiers: Tiers) -> None:
        """Know nothing yet."""
        self._holds = holds
        self._tiers = tiers
        self._found: dict[tuple[Pool, int | None], int] = {}

    def begin(self) -> None:
        """Start a pass: ask anew."""
        self._found.clear()

    @property
    def known(self) -> bool:
        """Whether anything is: any request has ended."""
        return self._holds.known

    def of_ns(self, pool: Pool, tier: int | None = None) -> int:
        """Return that of a pool: of all channels, or of those of a tier and of the tiers that go after it."""
        longest_ns = self._found.get((pool, tier))
        if longest_ns is None:
            found = [channel.account_if_any(pool) for channel in self._tiers.from_tier(tier)]
            concerned = [account for account in found if account is not None and (account.running or account.has_work)]
            longest_ns = self._found[pool, tier] = self._holds.longest_ns(concerned)
        return longest_ns
