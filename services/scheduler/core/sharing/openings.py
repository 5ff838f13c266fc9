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
from typing import Final

from services.scheduler.core.fleet import Group, Worker
from services.scheduler.core.messages import Announced

Kind = tuple[int, int]
"""Requests that are refused alike: of so many completions, whose outputs may have so many binary digits of tokens."""

MOST_KINDS: Final = 64
"""Kinds whose hints are kept; few are in use at once, and whoever makes kinds up costs the others a look."""


def kind_of(request: Announced, grows: bool) -> Kind:
    """Return the request's kind; how long its output may be matters where requests book less than they may grow to."""
    return max(request.n, 1), request.max_tokens.bit_length() if grows else 0


class Rooms:
    """The workers of one group, for one channel: in which order they last made room, and openings for each kind."""

    def __init__(self, group: Group, reach_blocks: Callable[[Worker], int]) -> None:
        """Start with a look at every worker outstanding; `reach_blocks` bounds what the channel could book on one."""
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
            found = self._kinds[kind] = Openings(self)
        return found

    def room_grew(self, worker: Worker) -> None:
        """Note that the worker may have more room than its hints say."""
        self.changes += 1
        self._grown.pop(worker, None)
        self._grown[worker] = self.changes

    def grown_since(self, seen: int) -> list[Worker]:
        """Return the workers whose room grew after `seen` of the changes."""
        grown: list[Worker] = []
        for worker, change in reversed(self._grown.items()):
            if change <= seen:
                break
            grown.append(worker)
        return grown

    def remove(self, worker: Worker) -> None:
        """Forget the worker."""
        self._grown.pop(worker, None)
        for openings in self._kinds.values():
            openings.remove(worker)


class Openings:
    """The workers of one group by hint, for requests of one kind and channel."""

    def __init__(self, rooms: Rooms) -> None:
        """Start with a look at every worker outstanding."""
        self._rooms = rooms
        self._group = rooms.group
        self._reach_blocks = rooms.reach_blocks
        self._order: list[tuple[int, int]] = []
        self._hints: dict[int, int] = {}
        self._seen = 0

    def remove(self, worker: Worker) -> None:
        """Forget the worker."""
        self._place(worker.epoch, None)

    def refuse(self, worker: Worker, blocks: int) -> None:
        """Do not look at the worker again for `blocks` or more until its room grows."""
        if self._hints.get(worker.epoch, 0) >= blocks:
            self._place(worker.epoch, blocks - 1)

    def most_blocks(self) -> int:
        """Return the largest booking that any worker may have room for."""
        self._take_grown()
        return self._order[-1][0] if self._order else 0

    def roomiest_first(self, blocks: int, now_ns: int) -> Iterator[Worker]:
        """Yield the workers that may have room for `blocks`, most room first; each may be refused meanwhile.

        Workers that take no grants leave the index until their room grows.
        """
        self._take_grown()
        index = len(self._order) - 1
        while index >= 0:
            hint, epoch = self._order[index]
            if hint < blocks:
                return
            worker = self._group.workers[epoch]
            if not worker.takes_grants(now_ns):
                self._place(epoch, None)
                index -= 1
                continue
            reach_blocks = self._reach_blocks(worker)
            if reach_blocks < hint:
                # Bookings do not touch the index. If the worker sinks, what was below it is at this place now.
                self._place(epoch, reach_blocks)
                continue
            yield worker
            if self._hints[epoch] == hint:
                index -= 1

    def most_room(self, now_ns: int) -> Iterator[Worker]:
        """Yield the workers that take grants, roughly those with most room first."""
        self._take_grown()
        for _hint, epoch in reversed(self._order):
            worker = self._group.workers[epoch]
            if worker.takes_grants(now_ns):
                yield worker

    def _take_grown(self) -> None:
        rooms = self._rooms
        if self._seen != rooms.changes:
            for worker in rooms.grown_since(self._seen):
                self._place(worker.epoch, self._reach_blocks(worker))
            self._seen = rooms.changes

    def _place(self, epoch: int, hint: int | None) -> None:
        """Set the worker's hint; None takes it out."""
        before = self._hints.get(epoch)
        if before == hint:
            return
        if before is not None:
            del self._order[bisect_left(self._order, (before, epoch))]
        if hint is None:
            del self._hints[epoch]
        else:
            insort(self._order, (hint, epoch))
            self._hints[epoch] = hint
