"""Workers that are kept from some requests for others: those that could hold these.

What is too small for a request is kept for it in vain, whatever keeps that out elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from services.scheduler.core.fleet import Group, Worker
from services.scheduler.core.sharing.openings import ANY_SIZE


class Kept:
    """The workers that could hold any of some requests, by what the least of these needs in each group."""

    def __init__(self, needed_blocks: Mapping[Group, int]) -> None:
        """Say what is needed in each group where any of them may run."""
        self._needed_blocks = needed_blocks

    def has(self, worker: Worker) -> bool:
        """Return whether the worker is one of them."""
        needed_blocks = self._needed_blocks.get(worker.group)
        return needed_blocks is not None and worker.shape.capacity_blocks >= needed_blocks

    def has_all(self, group: Group) -> bool:
        """Return whether all workers of the group are."""
        needed_blocks = self._needed_blocks.get(group)
        return needed_blocks is not None and group.least_blocks >= needed_blocks

    def from_blocks(self, group: Group) -> int:
        """Return the size from which on workers of the group are: above all sizes if none is."""
        return self._needed_blocks.get(group, ANY_SIZE)

    def with_those(self, other: Kept) -> Kept:
        """Return these and the others."""
        mine, others = self._needed_blocks, other._needed_blocks.items()
        if not mine:
            return other
        smaller = {group: blocks for group, blocks in others if blocks < mine.get(group, ANY_SIZE)}
        return Kept({**mine, **smaller}) if smaller else self


NONE_KEPT: Final = Kept({})
"""No worker at all."""
