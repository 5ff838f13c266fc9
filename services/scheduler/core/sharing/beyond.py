"""Requests of one channel that are aside because none of the workers that take grants could hold them.

They are kept by what they need, so that a worker that comes back costs a look at those alone that it could hold. What
they need may be another once a group has another largest worker, or the policy has learned something: then they are
*in doubt*, and stay aside until they are looked at, a part of them in each pass.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from services.scheduler.core.backlog import Entry
from services.scheduler.core.fleet import Group
from services.scheduler.core.sharing.line import Line

Place = tuple[Line, Entry]
"""An entry that is aside, and in which line."""


class Beyond:
    """The entries, by name and by what they need in each group."""

    def __init__(self) -> None:
        """Start with none."""
        self._found: dict[str, tuple[Place, dict[Group, int]]] = {}
        self._sizes: dict[Group, dict[int, dict[str, None]]] = {}
        self._doubtful: dict[str, None] = {}

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._found)

    @property
    def in_doubt(self) -> bool:
        """Whether any of them may need something else than when it was looked at."""
        return bool(self._doubtful)

    def add(self, line: Line, entry: Entry, needed_blocks: dict[Group, int]) -> None:
        """Add an entry with what a worker of each group must have to hold it; it must not be among them."""
        name = entry.request_id
        self._found[name] = ((line, entry), needed_blocks)
        for group, blocks in needed_blocks.items():
            self._sizes.setdefault(group, {}).setdefault(blocks, {})[name] = None

    def discard(self, entry: Entry) -> None:
        """Forget an entry that leaves its line, if it is among them."""
        if entry.request_id in self._found:
            self._take(entry.request_id)

    def take_within(self, group: Group, capacity_blocks: int) -> list[Place]:
        """Take out those that a worker of the group with so many blocks could hold."""
        sizes = self._sizes.get(group)
        if sizes is None:
            return []
        names = [name for blocks, names in sizes.items() if blocks <= capacity_blocks for name in names]
        return [self._take(name) for name in names]

    def doubt(self, models: Collection[str] | None) -> None:
        """Note that those which ask for one of the models, or for any, may need something else; None for all."""
        for name, ((line, _), _) in self._found.items():
            if models is None or not line.model or line.model in models:
                self._doubtful[name] = None

    def take_doubtful(self, most: int) -> list[Place]:
        """Take out at most so many of those in doubt, those that have been longest first."""
        return [self._take(name) for name in list(islice(self._doubtful, most))]

    def _take(self, name: str) -> Place:
        place, needed_blocks = self._found.pop(name)
        self._doubtful.pop(name, None)
        for group, blocks in needed_blocks.items():
            sizes = self._sizes[group]
            names = sizes[blocks]
            del names[name]
            if names:
                continue
            del sizes[blocks]
            if not sizes:
                del self._sizes[group]
        return place
