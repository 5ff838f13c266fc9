"""What bodies may have in memory, shared by tenants: none has so much of it that others find nothing."""

from __future__ import annotations

from collections import Counter

from services.gateway.places import HELD_BYTES, SHARE

RESERVE = 8
"""Of all bytes one in so many is not for what bodies have beyond `HELD_BYTES`: it is left to those that have less."""


class Shares:
    """The bytes of all bodies of a gateway."""

    def __init__(self, most_bytes: int) -> None:
        """Have so many in all."""
        self._most_bytes = most_bytes
        self._had: Counter[tuple[str, bool]] = Counter()
        """By tenant, and whether small bodies have them."""
        self.had_bytes = 0
        """Of all tenants."""

    def take(self, tenant: str, small: bool, size_bytes: int, outgrown_bytes: int = 0) -> bool:
        """Have so many more of a tenant's, for a body that is `small` with them; return whether they are to be had.

        One that is not any more has `outgrown_bytes` as a small one. As with places of uploads a tenant comes to no
        more than `SHARE` times what is free. Its small bodies do not pay for its large ones.
        """
        free_bytes = self._most_bytes - self.had_bytes - (0 if small else self._most_bytes // RESERVE)
        after_bytes = self._had[tenant, small] + outgrown_bytes + size_bytes
        if size_bytes and (size_bytes > free_bytes or after_bytes > SHARE * free_bytes):  # a body may end with no more
            return False
        self.give(tenant, True, outgrown_bytes)
        self._had[tenant, small] = after_bytes
        self.had_bytes += outgrown_bytes + size_bytes
        return True

    def give(self, tenant: str, small: bool, size_bytes: int) -> None:
        """Have so many less."""
        self._had[tenant, small] -= size_bytes
        self.had_bytes -= size_bytes
        if not self._had[tenant, small]:
            del self._had[tenant, small]


class Body:
    """What one body has of them."""

    def __init__(self, shares: Shares, tenant: str) -> None:
        """Have nothing yet."""
        self._shares = shares
        self._tenant = tenant
        self._had_bytes = 0

    @property
    def _small(self) -> bool:
        return self._had_bytes <= HELD_BYTES

    def take(self, size_bytes: int) -> bool:
        """Have so many more; return whether they are to be had."""
        small = self._had_bytes + size_bytes <= HELD_BYTES
        outgrown_bytes = self._had_bytes if self._small and not small else 0
        taken = self._shares.take(self._tenant, small, size_bytes, outgrown_bytes)
        if taken:
            self._had_bytes += size_bytes
        return taken

    def give(self) -> None:
        """Have nothing any more."""
        self._shares.give(self._tenant, self._small, self._had_bytes)
        self._had_bytes = 0
