"""How large a request the workers could hold that take grants now.

A head beyond all of them is set aside (`channel`) instead of holding up those behind it. Whoever is aside needs more
than any worker of its groups has that takes grants, so that it is looked at again only for a larger one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from services.scheduler.core.fleet import Group, Worker


class Reach:
    """The largest worker of each group that takes grants, found once in a pass."""

    def __init__(self) -> None:
        """Nothing has been asked for yet."""
        self._now_ns = 0
        self._largest: dict[Group, int] = {}

    def begin(self, now_ns: int) -> None:
        """Start a pass: workers may have come, gone or paused."""
        self._now_ns = now_ns
        self._largest.clear()

    def ends_before(self, needed_blocks: Mapping[Group, int], groups: Iterable[Group]) -> bool:
        """Return whether workers of `groups` take grants and none of them could ever hold what a request needs there.

        A group that cannot take it at all is not in `needed_blocks`. Where nobody takes grants, nobody behind the
        request could have its turn either, and all stay where they are.
        """
        others = False
        for group in groups:
            largest_blocks = self._largest_of(group)
            if group in needed_blocks and needed_blocks[group] <= largest_blocks:
                return False
            others |= largest_blocks >= 0
        return others

    def holds(self, needed_blocks: Mapping[Group, int]) -> bool:
        """Return whether any worker that takes grants could hold what needs so much in these groups."""
        return any(blocks <= self._largest_of(group) for group, blocks in needed_blocks.items())

    def takes_grants(self, group: Group) -> bool:
        """Return whether any worker of the group does."""
        return self._largest_of(group) >= 0

    def most_blocks_beside(self, group: Group, away: Collection[Worker]) -> int:
        """Return the capacity in blocks of the group's largest that takes grants and is not `away`, -1 without any."""
        return self._most_blocks(worker for worker in group.workers.values() if worker not in away)

    def _largest_of(self, group: Group) -> int:
        found = self._largest.get(group)
        if found is None:
            found = self._largest[group] = self._most_blocks(group.workers.values())
        return found

    def _most_blocks(self, workers: Iterable[Worker]) -> int:
        """Return the capacity in blocks of the largest of those that take grants now, -1 without any."""
        now_ns = self._now_ns
        return max((worker.shape.capacity_blocks for worker in workers if worker.takes_grants(now_ns)), default=-1)
