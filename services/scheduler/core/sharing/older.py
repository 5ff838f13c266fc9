"""What heads of a channel with a ceiling are to the channel's younger requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from services.core.value import Value
from services.scheduler.core.entry import Entry
from services.scheduler.core.fleet import Group
from services.scheduler.core.sharing.kept import NONE_KEPT, Kept
from services.scheduler.core.sharing.line import Key, Line, order


class Before(Value):
    """Some heads, from the oldest on.

    `kept` are workers that could hold one of them and that the ceiling keeps it out of: it would for ever, if younger
    ones went before it. `first` is where one of them could be paid for, and has not been.
    """

    def __init__(self, kept: Kept, first: set[Group]) -> None:
        self.kept, self.first = kept, first


class Older:
    """The heads of a channel in a pool, looked at from the oldest on as far as anybody has asked, and once each."""

    def __init__(self, heads: list[tuple[Line, Entry]]) -> None:
        """Start with none looked at; `heads` are all there are, the oldest first."""
        self._heads = heads
        self._looked_at = 0
        self.last = self._none = Before(NONE_KEPT, set())
        """Those added so far."""
        self._keys: list[Key] = []
        self._found: list[Before] = []

    def look_before(self, key: Key) -> Iterator[tuple[Line, Entry]]:
        """Yield the heads that are older than the key, those that were yielded before left out."""
        while self._looked_at < len(self._heads) and order(self._heads[self._looked_at][1]) < key:
            self._looked_at += 1
            yield self._heads[self._looked_at - 1]

    def add(self, key: Key, kept: Kept, first: set[Group]) -> None:
        """Add one that is younger than all before it."""
        self.last = Before(self.last.kept.with_those(kept), self.last.first | first)
        self._keys.append(key)
        self._found.append(self.last)

    def of(self, entry: Entry) -> Before:
        """Return those that are older than the entry; all of them must have been looked at."""
        index = bisect_left(self._keys, order(entry))
        return self._found[index - 1] if index else self._none
