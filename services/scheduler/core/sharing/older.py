"""What heads of a channel with a ceiling are to the channel's younger requests that have paid already."""

from __future__ import annotations

from services.core.value import Value
from services.scheduler.core.entry import Entry
from services.scheduler.core.fleet import Group
from services.scheduler.core.sharing.kept import NONE_KEPT, Kept
from services.scheduler.core.sharing.line import Key, order


class Before(Value):
    """Some heads, from the oldest on.

    `kept` are workers that could hold one of them and that the ceiling keeps it out of: it would for ever, if younger
    ones went before it. `first` is where one of them could be paid for, and has not been.
    """

    def __init__(self, kept: Kept, first: set[Group]) -> None:
        self.kept, self.first = kept, first


class Older:
    """The heads as they were added, from the oldest on."""

    def __init__(self) -> None:
        """Start with none."""
        self.last = Before(NONE_KEPT, set())
        """All of them."""
        self._none = self.last
        self._found: list[tuple[Key, Before]] = []

    def add(self, key: Key, kept: Kept, first: set[Group]) -> None:
        """Add one that is younger than all before it."""
        self.last = Before(self.last.kept.with_those(kept), self.last.first | first)
        self._found.append((key, self.last))

    def of(self, entry: Entry) -> Before:
        """Return those that are older than the entry."""
        key = order(entry)
        for found_key, before in reversed(self._found):
            if found_key < key:
                return before
        return self._none
