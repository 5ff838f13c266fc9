"""Waiting for a part of what there is too little of: tenants take turns, and who goes while it waits takes nothing.

Whoever waits is a task that may be stopped at any time. Before it was let in it leaves its line in that moment, not
when it comes to run: nothing is had for one that has gone. If it was let in and does not know yet, it has what it
waited for, and gives it back when it comes to run.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any, TypeAlias

Rank: TypeAlias = tuple[int, ...]
"""The smallest of a tenant's is let in first, and of equal ones the one that came first."""

FIRST_COME: Rank = (0,)
"""Of those that are let in by age alone."""


class Waiter(asyncio.Future[None]):
    """One who waits: done once it is let in, cancelled with the task that awaits it."""

    __slots__ = ("_leave", "amount", "tenant")

    def __init__(self, tenant: str, amount: int, leave: Callable[[], None]) -> None:
        """Wait for so much of a tenant's; `leave` is called when it is cancelled."""
        super().__init__(loop=asyncio.get_running_loop())
        self.tenant = tenant
        self.amount = amount
        self._leave = leave

    def cancel(self, msg: Any = None) -> bool:
        """Leave the line at once: the task that is stopped runs later, and others may be let in before."""
        has_gone = super().cancel(msg)
        if has_gone:
            self._leave()
        return has_gone


class Waiters(ABC):
    """Those who wait for amounts of one thing: a line for each tenant, in which is who waits and nobody else.

    How much there is of it the class knows that is made of this one. It calls `_let_in` whenever there is more.
    """

    def __init__(self) -> None:
        """Nobody waits."""
        self._lines: OrderedDict[str, list[tuple[Rank, int, Waiter]]] = OrderedDict()
        """By tenant, the one whose turn is next first. Of each waiter its rank, and how many waited before it."""
        self._numbers = count()

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits."""
        return bool(self._lines)

    @property
    def waiting(self) -> int:
        """How many wait."""
        return sum(map(len, self._lines.values()))

    @abstractmethod
    def _next(self, firsts: Iterator[tuple[str, int]]) -> str | None:
        """Return a tenant whose first may have what it waits for now, None if none may.

        `firsts` are, in the order of turns, the tenants that wait, at least one, and what the first of each waits for.
        """

    @abstractmethod
    def _take(self, tenant: str, amount: int) -> None:
        """Have so much less of it, for one of the tenant's."""

    @abstractmethod
    def _give(self, tenant: str, amount: int) -> None:
        """Have so much more of it again, and let in who may have it."""

    def _join(self, tenant: str, amount: int, rank: Rank = FIRST_COME) -> Waiter:
        """Return one that waits in the tenant's line, or has been let in."""
        number = next(self._numbers)
        waiter = Waiter(tenant, amount, partial(self._leave, tenant, rank, number))
        insort(self._lines.setdefault(tenant, []), (rank, number, waiter))
        self._let_in()
        return waiter

    async def _until_in(self, waiter: Waiter) -> None:
        """Return when it is let in; whoever is stopped meanwhile has nothing of it."""
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():
                self._give(waiter.tenant, waiter.amount)
            raise

    def _let_in(self) -> None:
        """Let in who may have what there is, one after the other; the tenant of each is behind all others then."""
        while self._lines:
            tenant = self._next((tenant, line[0][2].amount) for tenant, line in self._lines.items())
            if tenant is None:
                return
            _, _, waiter = self._lines[tenant].pop(0)
            self._lines.move_to_end(tenant)
            self._drop_empty(tenant)
            self._take(tenant, waiter.amount)
            waiter.set_result(None)

    def _leave(self, tenant: str, rank: Rank, number: int) -> None:
        line = self._lines[tenant]
        del line[bisect_left(line, (rank, number))]
        self._drop_empty(tenant)
        self._let_in()  # those whom this one did not let pass

    def _drop_empty(self, tenant: str) -> None:
        if not self._lines[tenant]:
            del self._lines[tenant]


class SharedWindow(Waiters):
    """What is under way of all tenants. They take turns at what room there is.

    So a tenant with thousands of calls that wait for room keeps another's single call waiting for one of them.
    """

    def __init__(self, most: int) -> None:
        """Have room while less than `most` is under way."""
        super().__init__()
        self._most = most
        self._count = 0

    async def enter(self, tenant: str, count: int, rank: Rank = FIRST_COME) -> None:
        """Wait for room, and take `count` of it, which may be more than there is."""
        if self._count < self._most:  # then nobody waits
            self._count += count
            return
        await self._until_in(self._join(tenant, count, rank))

    def leave(self, count: int) -> None:
        """Give back what was taken, and let those in whose turn it is."""
        self._count -= count
        if self._lines:
            self._let_in()

    def _next(self, firsts: Iterator[tuple[str, int]]) -> str | None:
        return next(firsts)[0] if self._count < self._most else None

    def _take(self, _tenant: str, amount: int) -> None:
        self._count += amount

    def _give(self, _tenant: str, amount: int) -> None:
        self.leave(amount)
