"""Where one channel may find room, of all groups that serve a model: those with the largest openings first.

With hundreds of groups, as where each worker has adapters of its own, a grant must not look at each of them, as it must
not at each worker of one (`openings`). So for every kind of request, and model asked for, the largest booking that any
worker of a group may have room for is kept here. A group is passed over for larger ones until something there has made
room: nothing would be found in it, and nothing noted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Final

from services.scheduler.core.fleet import Group, Pool, Worker
from services.scheduler.core.sharing.openings import Growth, Kind, Openings, Rooms

MOST_WIDEST: Final = 256
"""Kinds and models of which the groups are kept in order; few are in use at once. One that is kept no more costs a look
at its groups."""


class AllRooms:
    """The rooms of one channel in every group where it was looked for any, which this owns."""

    def __init__(self, reach_blocks: Callable[[Worker], int]) -> None:
        """Start with none; `reach_blocks` bounds what the channel could book on a worker."""
        self._reach_blocks = reach_blocks
        self.growth = Growth()
        self._rooms: dict[Group, Rooms] = {}
        self._widest: dict[tuple[Kind, str, Pool], Widest] = {}

    def openings(self, group: Group, kind: Kind) -> Openings:
        """Return where in the group requests of a kind may find room."""
        found = self._rooms.get(group)
        if found is None:
            found = self._rooms[group] = Rooms(group, self._reach_blocks, self.growth)
        return found.of(kind)

    def widest(self, kind: Kind, model: str, pool: Pool, serving: list[Group]) -> Widest:
        """Return where in the pool requests of a kind for the model may find room; all groups `serving` it are given.

        Of the fleet's own list, which is another when a group has come or gone.
        """
        key = (kind, model, pool)
        found = self._widest.get(key)
        if found is None or found.serving is not serving:
            if len(self._widest) >= MOST_WIDEST:
                self._widest.clear()
            found = self._widest[key] = Widest(self, kind, pool, serving)
        return found

    def room_grew(self, worker: Worker) -> None:
        """Note that the worker may have more room than it had."""
        found = self._rooms.get(worker.group)
        if found is not None:
            found.room_grew(worker)

    def worker_left(self, worker: Worker) -> None:
        """Forget the worker."""
        found = self._rooms.get(worker.group)
        if found is not None:
            found.remove(worker)
        if not worker.group.workers:
            self._rooms.pop(worker.group, None)
            self.growth.forget(worker.group)
            self._widest.clear()


class Widest:
    """The groups of a pool that serve a model, by the largest opening of each for requests of one kind and channel."""

    def __init__(self, rooms: AllRooms, kind: Kind, pool: Pool, serving: list[Group]) -> None:
        """Start with a look at every group outstanding."""
        self._rooms = rooms
        self._kind = kind
        self.serving = serving
        self._groups = [group for group in serving if group.pool is pool]
        self._numbers = {group: number for number, group in enumerate(self._groups)}
        self._order: list[tuple[int, int]] = []
        """The largest opening of each group at most, and its number."""
        self._hints: dict[int, int] = {}
        self._outstanding = set(range(len(self._groups)))
        """Those that have more room than was looked at."""
        self._seen = rooms.growth.changes

    def may_have_room(self, blocks: int) -> list[Group]:
        """Return the groups where a worker may have room for so many blocks, in the order in which they came."""
        self._take_grown()
        found = list(self._outstanding)
        index = len(self._order) - 1
        while index >= 0:
            hint, number = self._order[index]
            if hint < blocks:
                break
            most_blocks = self._openings(number).hinted_blocks()
            if most_blocks < hint:
                # What sinks makes place for the one below it, which is looked at next.
                self._place(number, most_blocks)
                index = min(index, len(self._order) - 1)
                continue
            found.append(number)
            index -= 1
        found.sort()
        return [self._groups[number] for number in found]

    def _take_grown(self) -> None:
        """Look at groups that have grown as outstanding, and no longer at those that were looked at since."""
        growth = self._rooms.growth
        if self._seen != growth.changes:
            for group in growth.since(self._seen):
                number = self._numbers.get(group)
                if number is not None:
                    self._place(number, None)
                    self._outstanding.add(number)
            self._seen = growth.changes
        for number in [number for number in self._outstanding if self._openings(number).all_taken]:
            self._outstanding.discard(number)
            self._place(number, self._openings(number).hinted_blocks())

    def _openings(self, number: int) -> Openings:
        return self._rooms.openings(self._groups[number], self._kind)

    def _place(self, number: int, hint: int | None) -> None:
        """Set the group's hint; None takes it out."""
        before = self._hints.pop(number, None)
        if before is not None:
            del self._order[bisect_left(self._order, (before, number))]
        if hint is not None:
            insort(self._order, (hint, number))
            self._hints[number] = hint
