"""Who waits is let in by turns and in order; whoever is stopped, at whatever moment, loses no place and keeps none.

Each step is one that comes, gives back what it has or is stopped, or a turn of the event loop: steps without a turn
between them are in the same moment.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.gateway.places import Places
from services.rpc.waiters import SharedWindow
from tests.support.effort import examples

MOST = 4

Step: TypeAlias = tuple[str, int, int, int]
"""What happens; to a tenant, or to which of those that are there; of one that comes how much it wants, and its rank."""

TURN = ("turn", 0, 0, 0)
GIVE = ("give", 0, 0, 0)
STOP = ("stop", 0, 0, 0)
TWO_WAIT = [("come", 0, MOST, 0), ("come", 1, 1, 0), ("come", 2, 1, 0), TURN]
MUCH_IS_WANTED = [("come", 0, 1, 0), ("come", 1, MOST, 0), ("come", 2, 1, 0), TURN]
TENANTS_WAIT = [("come", 0, MOST, 0), ("come", 0, 1, 1), ("come", 0, MOST, 0), ("come", 1, 1, 0), TURN]

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(0, 2), st.integers(1, MOST), st.integers(0, 2)),
        st.tuples(st.sampled_from(["give", "stop"]), st.integers(0, 9), st.just(0), st.just(0)),
        st.just(TURN),
    ),
    max_size=60,
)


class At(Enum):
    """Where one of them is."""

    WAITS = auto()
    LET_IN = auto()
    """It has not run since."""
    IN = auto()
    GONE = auto()


@dataclass(eq=False)
class One:
    """One that came."""

    tenant: str
    amount: int
    rank: tuple[int, int]
    """The second is the order in which they came."""
    at: At = At.WAITS
    task: asyncio.Task[None] | None = None


class Crowd(ABC):
    """All who come to one thing, and what the rules say about them."""

    def __init__(self) -> None:
        self.ones: list[One] = []
        """In the order in which they began to wait."""
        self.passed: dict[str, set[str]] = {}
        """By tenant that waits, who has had a turn since it waits for its own."""

    @abstractmethod
    async def enter(self, one: One) -> None:
        """Wait until it is in."""

    @abstractmethod
    def leave(self, one: One) -> None:
        """Give back what it has."""

    @abstractmethod
    def check(self) -> None:
        """See that the thing counts as the crowd does."""

    def of(self, *at: At) -> list[One]:
        return [one for one in self.ones if one.at in at]

    def had(self) -> Counter[str]:
        had = Counter[str]()
        for one in self.of(At.LET_IN, At.IN):
            had[one.tenant] += one.amount
        return had

    def let_in(self, tenant: str, amount: int) -> None:
        """Note that one of a tenant's was let in; it must be the first of those of it that wait."""
        first = min((one for one in self.of(At.WAITS) if one.tenant == tenant), key=lambda one: one.rank)
        assert first.amount == amount
        first.at = At.LET_IN
        self.passed[tenant] = set()
        self.forget_turns()
        for passed in self.passed.values():
            passed.add(tenant)

    def forget_turns(self) -> None:
        """Forget the turns that tenants have seen which wait for none any more."""
        for tenant in self.passed.keys() - {one.tenant for one in self.of(At.WAITS)}:
            del self.passed[tenant]

    async def come(self, one: One) -> None:
        self.ones.append(one)
        self.passed.setdefault(one.tenant, set())
        try:
            await self.enter(one)
        except asyncio.CancelledError:
            assert one.at in (At.LET_IN, At.GONE)
            one.at = At.GONE
            raise
        assert one.at is At.LET_IN, "who has not been let in is not in"
        one.at = At.IN

    def give(self, number: int) -> None:
        if inside := self.of(At.IN):
            one = inside[number % len(inside)]
            one.at = At.GONE
            self.leave(one)

    def stop(self, number: int) -> None:
        if outside := self.of(At.WAITS, At.LET_IN):
            one = outside[number % len(outside)]
            if one.at is At.WAITS:
                one.at = At.GONE
                self.forget_turns()
            assert one.task is not None
            one.task.cancel()

    async def live(self, steps: list[Step]) -> None:
        """Have all of it happen, and then all who are in give what they have until nobody is left."""
        tasks: list[asyncio.Task[None]] = []
        for number, (what, which, amount, rank) in enumerate(steps):
            if what == "come":
                one = One("abc"[which], amount, (rank, number))
                one.task = asyncio.create_task(self.come(one))
                tasks.append(one.task)
            elif what == "turn":
                await asyncio.sleep(0)
            else:
                (self.give if what == "give" else self.stop)(which)
            self.check()
        for _ in range(2 * len(steps) + 1):
            await asyncio.sleep(0)
            self.give(0)
            self.check()
        assert all(one.at is At.GONE for one in self.ones), "everybody had what it waited for, or was stopped"
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            assert ended is None or isinstance(ended, asyncio.CancelledError), repr(ended)


class NotedWindow(SharedWindow):
    """Tells of whom it lets in."""

    def __init__(self, crowd: Crowd) -> None:
        super().__init__(MOST)
        self.crowd = crowd

    def _take(self, tenant: str, amount: int) -> None:
        for other, passed in self.crowd.passed.items():
            assert other == tenant or tenant not in passed, f"{tenant} has had two turns while {other} waits for one"
        super()._take(tenant, amount)
        self.crowd.let_in(tenant, amount)


class AtWindow(Crowd):
    """A crowd at a window."""

    def __init__(self) -> None:
        super().__init__()
        self.window = NotedWindow(self)

    async def enter(self, one: One) -> None:
        await self.window.enter(one.tenant, one.amount, (one.rank[0],))
        if one.at is At.WAITS:
            assert self.of(At.WAITS) == [one], "who finds room does not wait, and passes nobody"
            self.let_in(one.tenant, one.amount)

    def leave(self, one: One) -> None:
        self.window.leave(one.amount)

    def check(self) -> None:
        waits, had = self.of(At.WAITS), self.had().total()
        assert self.window._count == had
        assert self.window.waiting == len(waits)
        assert self.window.is_wanted is bool(waits)
        assert not waits or had >= MOST, "nobody waits while there is room"
        assert had < MOST + max((one.amount for one in self.of(At.LET_IN, At.IN)), default=1)


class NotedPlaces(Places):
    """Tell of whom they are given to."""

    def __init__(self, crowd: Crowd) -> None:
        super().__init__(MOST)
        self.crowd = crowd

    def _take(self, tenant: str, amount: int) -> None:
        super()._take(tenant, amount)
        self.crowd.let_in(tenant, amount)


class AtPlaces(Crowd):
    """A crowd that wants places, of which there are rules besides the turns."""

    def __init__(self) -> None:
        super().__init__()
        self.places = NotedPlaces(self)

    async def enter(self, one: One) -> None:
        one.rank = (0, one.rank[1])
        await self.places.take(one.tenant, one.amount)

    def leave(self, one: One) -> None:
        self.places.give(one.tenant, one.amount)

    def check(self) -> None:
        had = self.had()
        assert self.places._had == had
        assert self.places._free == MOST - had.total() >= 0
        assert self.places.waiting == len(self.of(At.WAITS))
        assert self.places._free < MOST or not self.places.is_wanted, "nobody waits for what nobody has"
        firsts = ((tenant, line[0][2].amount) for tenant, line in self.places._lines.items())
        assert self.places._next(firsts) is None, "nobody waits for what it may have"


@settings(max_examples=examples(300))
@example([*TWO_WAIT, STOP, GIVE])
@example([*TWO_WAIT, GIVE, STOP])
@example([*TENANTS_WAIT, *[GIVE, TURN] * 3])
@given(STEPS)
def test_a_window_is_had_by_turns_and_whoever_is_stopped_costs_nobody_any_of_it(steps: list[Step]) -> None:
    asyncio.run(AtWindow().live(steps))


@settings(max_examples=examples(300))
@example([*TWO_WAIT, STOP, GIVE])
@example([*TWO_WAIT, GIVE, STOP])
@example([*TENANTS_WAIT, *[GIVE, TURN] * 3])
@example([*MUCH_IS_WANTED, STOP])
@given(STEPS)
def test_places_are_had_in_order_and_whoever_is_stopped_costs_nobody_any_of_them(steps: list[Step]) -> None:
    asyncio.run(AtPlaces().live(steps))
