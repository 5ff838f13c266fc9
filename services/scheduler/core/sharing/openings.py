"""Where one channel may find room: workers of a group, by the largest booking that may fit.

With hundreds of workers a grant must not look at each of them. For every worker
this keeps a *hint*, an upper bound of the booking that it may have room for. A
worker that is looked at and found too full, or that refuses a booking, gets a
lower hint, and is not looked at again for bookings above it until something there
has made room (`room_grew`). So a look at a worker is always paid for by a grant, by a hint
that sinks, or by something that ended there.

What a booking is refused for may be the sequences it takes or what it is expected to grow to, which says nothing
about one of fewer completions or of shorter outputs. So hints are kept for each *kind* of request.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import merge
from typing import Final, TypeVar

from services.scheduler.core.fleet import Group, Worker
from services.scheduler.core.messages import Announced

T = TypeVar("T")

Place = tuple[int, int]
"""The hint of a worker, and its epoch."""

ANY_SIZE: Final = 1 << 60
"""More blocks than any worker has."""

Kind = tuple[int, int]
"""Requests that are refused alike: of so many completions, whose outputs may have so many binary digits of tokens."""

MOST_KINDS: Final = 64
"""Kinds whose hints are kept; few are in use at once, and whoever makes kinds up costs the others a look."""


def kind_of(request: Announced, grows: bool) -> Kind:
    """Return the request's kind; how long its output may be matters where requests book less than they may grow to."""
    return max(request.n, 1), request.max_tokens.bit_length() if grows else 0


class Growth:
    """In which order groups last made room for one channel."""

    def __init__(self) -> None:
        """Start with none."""
        self.changes = 0
        self._grown: dict[Group, int] = {}

    def note(self, group: Group) -> None:
        """Note that a worker of the group may have more room than its hints say, or that these are forgotten."""
        self.changes += 1
        self._grown.pop(group, None)
        self._grown[group] = self.changes

    def since(self, seen: int) -> list[Group]:
        """Return the groups whose room grew after `seen` of the changes."""
        return _since(self._grown, seen)

    def forget(self, group: Group) -> None:
        """Forget a group that is gone."""
        self._grown.pop(group, None)


class Rooms:
    """The workers of one group, for one channel: in which order they last made room, and openings for each kind."""

    def __init__(self, group: Group, reach_blocks: Callable[[Worker], int], growth: Growth) -> None:
        """Start with a look at every worker outstanding; `reach_blocks` bounds what the channel could book on one.

        `growth` is told of the group whenever there is more to be looked at.
        """
        self._growth = growth
        self.group = group
        self.reach_blocks = reach_blocks
        self.changes = 0
        self._grown: dict[Worker, int] = {}
        self._kinds: dict[Kind, Openings] = {}
        for worker in group.workers.values():
            self.room_grew(worker)

    def of(self, kind: Kind) -> Openings:
        """Return where requests of the kind may find room."""
        found = self._kinds.get(kind)
        if found is None:
            if len(self._kinds) >= MOST_KINDS:
                self._kinds.clear()
                self._growth.note(self.group)
            found = self._kinds[kind] = Openings(self)
        return found

    def room_grew(self, worker: Worker) -> None:
        """Note that the worker may have more room than its hints say."""
        self.changes += 1
        self._grown.pop(worker, None)
        self._grown[worker] = self.changes
        self._growth.note(self.group)

    def grown_since(self, seen: int) -> list[Worker]:
        """Return the workers whose room grew after `seen` of the changes."""
        return _since(self._grown, seen)

    def remove(self, worker: Worker) -> None:
        """Forget the worker."""
        self._grown.pop(worker, None)
        for openings in self._kinds.values():
            openings.remove(worker)


class Openings:
    """The workers of one group by hint, for requests of one kind and channel.

    They are kept apart by size, so that who looks for one that is large, or small, enough passes none of the others.
    """

    def __init__(self, rooms: Rooms) -> None:
        """Start with a look at every worker outstanding."""
        self._rooms = rooms
        self._group = rooms.group
        self._reach_blocks = rooms.reach_blocks
        self._orders: dict[int, list[Place]] = {}
        self._hints: dict[int, int] = {}
        self._seen = 0

    def remove(self, worker: Worker) -> None:
        """Forget the worker."""
        self._place(worker, None)

    def refuse(self, worker: Worker, blocks: int) -> None:
        """Do not look at the worker again for `blocks` or more until its room grows."""
        if self._hints.get(worker.epoch, 0) >= blocks:
            self._place(worker, blocks - 1)

    def most_blocks(self, below_blocks: int = ANY_SIZE) -> int:
        """Return the largest booking that any worker may have room for, of those smaller than `below_blocks`."""
        self._take_grown()
        return max((order[-1][0] for order in self._of_sizes(0, below_blocks)), default=0)

    @property
    def all_taken(self) -> bool:
        """Whether no look at a worker whose room grew is outstanding: hints are then no less than any could have."""
        return self._seen == self._rooms.changes

    def hinted_blocks(self) -> int:
        """Return the largest booking that any worker may have room for, those aside at which a look is outstanding."""
        return max([order[-1][0] for order in self._orders.values()], default=0)

    def roomiest_first(
        self, blocks: int, now_ns: int, least_blocks: int = 0, below_blocks: int = ANY_SIZE
    ) -> Iterator[Worker]:
        """Return the workers that may have room for `blocks`, most room first; each may be refused meanwhile.

        Of those of a size from `least_blocks` on and below `below_blocks`. Workers that take no grants leave the index
        until their room grows.
        """
        self._take_grown()
        sizes = range(least_blocks, below_blocks)
        orders = self._of_sizes(least_blocks, below_blocks)
        if len(orders) == 1:
            return self._roomiest(orders[0], sizes, blocks, now_ns)
        return self._merged([self._roomiest(order, sizes, blocks, now_ns) for order in orders])

    def most_room(self, now_ns: int, least_blocks: int = 0, below_blocks: int = ANY_SIZE) -> Iterator[Worker]:
        """Yield the workers of these sizes that take grants, roughly those with most room first."""
        self._take_grown()
        sizes = range(least_blocks, below_blocks)
        for _hint, epoch in merge(*map(reversed, self._of_sizes(least_blocks, below_blocks)), reverse=True):
            worker = self._group.workers[epoch]
            if worker.shape.capacity_blocks in sizes and worker.takes_grants(now_ns):
                yield worker

    def _of_sizes(self, least_blocks: int, below_blocks: int) -> list[list[Place]]:
        """Return the orders in which there may be workers of these sizes."""
        if len(self._orders) == 1 and not least_blocks and below_blocks == ANY_SIZE:
            return list(self._orders.values())
        first, last = size_class(least_blocks), size_class(below_blocks)
        return [order for size, order in self._orders.items() if first <= size <= last]

    def _roomiest(self, order: list[Place], sizes: range, blocks: int, now_ns: int) -> Iterator[Worker]:
        index = len(order) - 1
        while index >= 0:
            hint, epoch = order[index]
            if hint < blocks:
                return
            worker = self._group.workers[epoch]
            if worker.shape.capacity_blocks not in sizes:
                index -= 1
                continue
            if not worker.takes_grants(now_ns):
                self._place(worker, None)
                index -= 1
                continue
            reach_blocks = self._reach_blocks(worker)
            if reach_blocks < hint:
                # Bookings do not touch the index. If the worker sinks, what was below it is at this place now.
                self._place(worker, reach_blocks)
                continue
            yield worker
            if self._hints[epoch] == hint:
                index -= 1

    def _merged(self, found: list[Iterator[Worker]]) -> Iterator[Worker]:
        """Yield the workers of several orders in one: of the first of each the one with most room."""
        firsts = [(worker, workers) for workers in found if (worker := next(workers, None)) is not None]
        while firsts:
            first = max(firsts, key=lambda each: (self._hints[each[0].epoch], each[0].epoch))
            yield first[0]
            firsts.remove(first)
            if (worker := next(first[1], None)) is not None:
                firsts.append((worker, first[1]))

    def _take_grown(self) -> None:
        rooms = self._rooms
        if self._seen != rooms.changes:
            for worker in rooms.grown_since(self._seen):
                self._place(worker, self._reach_blocks(worker))
            self._seen = rooms.changes

    def _place(self, worker: Worker, hint: int | None) -> None:
        """Set the worker's hint; None takes it out."""
        epoch = worker.epoch
        before = self._hints.get(epoch)
        if before == hint:
            return
        size = size_class(worker.shape.capacity_blocks)
        order = self._orders.setdefault(size, [])
        if before is not None:
            del order[bisect_left(order, (before, epoch))]
        if hint is not None:
            insort(order, (hint, epoch))
            self._hints[epoch] = hint
            return
        del self._hints[epoch]
        if not order:
            del self._orders[size]


def _since(changes: dict[T, int], seen: int) -> list[T]:
    """Return what has changed after `seen` of the changes, the last first."""
    found: list[T] = []
    for each, change in reversed(changes.items()):
        if change <= seen:
            break
        found.append(each)
    return found


def size_class(blocks: int) -> int:
    """Return which of the sizes that are told apart this is: those in one differ by less than a quarter."""
    shift = max(blocks.bit_length() - 3, 0)
    return 8 * shift + (blocks >> shift)
