"""Requests of one channel that are aside because none of the workers that take grants could hold them.

So are those on their last attempt while each of these has another such.

They are kept by what they need, so that a worker that comes back costs a look at those alone that it could hold. What
they need may be another once a group has another largest worker, or the policy has learned something (`aside`).
"""

from __future__ import annotations

from collections.abc import Collection

from services.scheduler.core.entry import Entry
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
        self.last_attempts = 0
        """How many of them are on their last attempt, and may wait for what a worker has only one place for."""

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._found)

    def add(self, line: Line, entry: Entry, needed_blocks: dict[Group, int]) -> None:
        """Add an entry with what a worker of each group must have to hold it; it must not be among them."""
        name = entry.request_id
        self._found[name] = ((line, entry), needed_blocks)
        self.last_attempts += entry.announced.last_attempt
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

    def take_last_attempts(self) -> list[Place]:
        """Take out those on their last attempt."""
        if not self.last_attempts:
            return []
        names = [name for name, ((_, entry), _) in self._found.items() if entry.announced.last_attempt]
        return [self._take(name) for name in names]

    def asking_for(self, models: Collection[str] | None) -> list[tuple[Place, dict[Group, int]]]:
        """Return those which ask for one of the models, or for any, and what they were found to need; None for all."""
        if models is None:
            return list(self._found.values())
        return [found for found in self._found.values() if not found[0][0].model or found[0][0].model in models]

    def replace(self, gone: Group, group: Group) -> None:
        """Let those that need something of a group that is gone need the same of one that is as it was."""
        sizes = self._sizes.pop(gone, None)
        if sizes is None:
            return
        self._sizes[group] = sizes
        for blocks, names in sizes.items():
            for name in names:
                needed_blocks = self._found[name][1]
                del needed_blocks[gone]
                needed_blocks[group] = blocks

    def _take(self, name: str) -> Place:
        place, needed_blocks = self._found.pop(name)
        self.last_attempts -= place[1].announced.last_attempt
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
