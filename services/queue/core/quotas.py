"""How much of each tenant waits, and how much may.

Counted where a request enters and leaves its line, so a restart, which lets every waiting request enter its line,
counts anew without reading anything else. What goes back to its line was let in before and is not refused again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from typing import Final, NamedTuple

from services.queue.core.entry import Failure, RequestMeta

OVER_QUOTA = "insufficient_quota"
"""Code of a request that its tenant's quota does not let in now, as OpenAI's API calls it."""

LARGER_THAN_QUOTA = "larger_than_quota"
"""Code of a request that takes more than its tenant's quota, were nothing else waiting: to wait would not help."""


MOST_ALIKE: Final = 1000
"""Tenants of one size that are looked at to find those of which most waits: of more any are as good, being within a
factor of two of each other, and the look keeps nobody waiting however many tenants there are."""


class Quota(NamedTuple):
    """Most that may wait of a tenant; None: as much as there is room for."""

    requests: int | None = None
    bytes: int | None = None


@dataclass(slots=True)
class Held:
    """What waits of one tenant."""

    requests: int = 0
    bytes: int = 0


class Waits(NamedTuple):
    """How much waits of a tenant; the more, the greater."""

    requests: int
    bytes: int
    tenant: str


class Waiting:
    """Counts by tenant; one of whom nothing waits is not in it."""

    def __init__(self) -> None:
        """Nothing waits."""
        self.by_tenant: dict[str, Held] = {}
        self._sizes: dict[int, dict[str, None]] = {}
        """Tenants by the number of binary digits of their requests: it changes where a power of two is passed, which is
        seldom, and those of which most waits are found without a look at all."""

    def enter(self, meta: RequestMeta) -> None:
        """Count a request that begins to wait."""
        held = self.by_tenant.get(meta.tenant)
        if held is None:
            held = self.by_tenant[meta.tenant] = Held()
        held.requests += 1
        held.bytes += meta.payload_bytes
        if not held.requests & (held.requests - 1):
            self._resize(meta.tenant, held.requests - 1, held.requests)

    def leave(self, meta: RequestMeta) -> None:
        """Count a request out."""
        held = self.by_tenant[meta.tenant]
        held.requests -= 1
        held.bytes -= meta.payload_bytes
        if not held.requests & (held.requests + 1):
            self._resize(meta.tenant, held.requests + 1, held.requests)
        if not held.requests:
            del self.by_tenant[meta.tenant]

    def _resize(self, tenant: str, before: int, now: int) -> None:
        """Put a tenant with `now` requests among those of its size."""
        if before:
            del self._sizes[before.bit_length()][tenant]
        if now:
            self._sizes.setdefault(now.bit_length(), {})[tenant] = None

    def most(self, count: int) -> list[Waits]:
        """Return so many tenants, those of which most requests wait first."""
        found: list[Waits] = []
        for size in sorted(self._sizes, reverse=True):
            for tenant in islice(self._sizes[size], MOST_ALIKE):
                held = self.by_tenant[tenant]
                found.append(Waits(held.requests, held.bytes, tenant))
            if len(found) >= count:
                break
        return nlargest(count, found)

    def refusal(self, metas: Iterable[RequestMeta], quotas: Mapping[str, Quota]) -> Failure | None:
        """Return why these requests may not begin to wait together, or None if they may.

        Of several reasons one that no waiting would end.
        """
        found: Failure | None = None
        wanted = Waiting()
        for meta in metas:
            wanted.enter(meta)
        for tenant, more in wanted.by_tenant.items():
            quota = quotas.get(tenant)
            if quota is None:
                continue
            held = self.by_tenant.get(tenant) or Held()
            for unit, most, now, added in (
                ("requests", quota.requests, held.requests, more.requests),
                ("bytes", quota.bytes, held.bytes, more.bytes),
            ):
                if most is not None and now + added > most:
                    failure = _failure(f"max_waiting_{unit} of tenant {tenant} is {most}", most, now, added)
                    if failure.code == LARGER_THAN_QUOTA:
                        return failure
                    found = found or failure
        return found


def _failure(quota: str, most: int, now: int, added: int) -> Failure:
    # A quota of nothing is a tenant that is kept out for a while.
    if 0 < most < added:
        return Failure(LARGER_THAN_QUOTA, f"{quota}; {added} were sent at once")
    return Failure(OVER_QUOTA, f"{quota}; {now} wait already, {added} more were sent")
