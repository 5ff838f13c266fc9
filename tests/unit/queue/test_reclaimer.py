"""The loop that has disk space given back: when it looks, what for, and how long it rests."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from services.queue.storage import reclaimer
from services.queue.storage.health import StoreHealth
from services.queue.storage.reclaimer import Reclaimer
from services.queue.storage.store import StoreError
from tests.support.committing import HandClock
from tests.support.memory_store import MemoryStore
from tests.support.waiting import wait_for_async

MIB = 1 << 20
PLENTY = 1 << 40


class AskedStore(MemoryStore):
    """A store that notes what it is asked to give back."""

    def __init__(self, free_bytes: int) -> None:
        super().__init__(free_bytes)
        self.asked: list[tuple[int, bool, int]] = []
        self.answer: int | StoreError = 5 * MIB
        self.given_up = False
        self.spent_s, self.spends_s = 0.0, 0.0

    def is_reserve_given_up(self) -> bool:
        return self.given_up

    def compacted_s(self) -> float:
        return self.spent_s

    def reclaim(self, bound_bytes: int, is_low: bool, kept_bytes: int = 0) -> int:
        self.asked.append((bound_bytes, is_low, kept_bytes))
        self.spent_s += self.spends_s
        if isinstance(self.answer, StoreError):
            raise self.answer
        return self.answer


WATERMARK = 256 * MIB


async def test_whatever_is_dead_counts_near_the_watermark() -> None:
    for free_bytes, is_low in ((2 * WATERMARK, False), (2 * WATERMARK - 1, True), (0, True)):
        store, freed = AskedStore(free_bytes), list[int]()
        await Reclaimer(store, StoreHealth(store, HandClock(), WATERMARK), WATERMARK, freed.append).look()
        assert store.asked == [(32 * MIB, is_low, WATERMARK)]
        assert freed == [5 * MIB]


@pytest.mark.parametrize("watermark", [0, 16 * MIB, WATERMARK])
async def test_whatever_is_dead_counts_while_the_reserve_is_given_up(watermark: int) -> None:
    store = AskedStore(PLENTY)
    store.given_up = True
    await Reclaimer(store, StoreHealth(store, HandClock(), watermark), watermark, lambda _: None).look()
    assert store.asked == [(MIB, True, watermark)]


async def test_a_store_that_cannot_write_is_left_alone_and_one_that_fails_asked_again() -> None:
    store, freed = AskedStore(WATERMARK), list[int]()
    health = StoreHealth(store, HandClock(), WATERMARK)
    loop = Reclaimer(store, health, WATERMARK, freed.append)
    store.answer = StoreError("no medium")
    await loop.look()
    health.failed(store.answer)
    await loop.look()
    assert len(store.asked) == 1
    assert sum(freed) == 0


async def test_only_what_it_compacted_is_rested_for() -> None:
    store = AskedStore(WATERMARK)
    loop = Reclaimer(store, StoreHealth(store, HandClock(), WATERMARK), WATERMARK, lambda _: None)
    store.spent_s, store.spends_s = 100, 2
    assert await loop.look() == 2
    store.answer = StoreError("no medium")
    assert await loop.look() == 2


async def test_the_loop_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaimer, "LOOK_S", 0.001)
    store, loaded = AskedStore(WATERMARK), asyncio.Event()
    loop = Reclaimer(store, StoreHealth(store, HandClock(), WATERMARK), WATERMARK, lambda _: None)
    running = asyncio.create_task(loop.run(loaded))
    await asyncio.sleep(0)
    assert not store.asked, "not before the store is loaded"
    loaded.set()

    async def looked_again() -> bool:
        return len(store.asked) > 2

    await wait_for_async(looked_again, "further looks")
    running.cancel()


class BusyStore(AskedStore):
    """A store whose compactions last until they are let end, and whose reserve is looked after."""

    def __init__(self, free_bytes: int) -> None:
        super().__init__(free_bytes)
        self.kept = 0
        self.may_end = threading.Event()

    def keep_reserve(self) -> None:
        self.kept += 1

    def reclaim(self, bound_bytes: int, is_low: bool, kept_bytes: int = 0) -> int:
        super().reclaim(bound_bytes, is_low, kept_bytes)
        self.may_end.wait(60)
        raise StoreError("it failed")


async def test_the_reserve_waits_for_no_compaction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaimer, "LOOK_S", 0.001)
    store, loaded = BusyStore(WATERMARK), asyncio.Event()
    loop = Reclaimer(store, StoreHealth(store, HandClock(), WATERMARK), WATERMARK, lambda _: None)
    loaded.set()
    running = asyncio.create_task(loop.run(loaded))

    async def kept_again() -> bool:
        return len(store.asked) == 1 and store.kept > 3

    await wait_for_async(kept_again, "looks at the reserve")
    store.may_end.set()

    async def goes_on() -> bool:
        return len(store.asked) > 1 and store.kept > 6

    await wait_for_async(goes_on, "both to go on")
    running.cancel()


class Rests:
    """Stands in for a sleep: as many as there are, and what happens in each."""

    def __init__(self, *happens: Callable[[], None]) -> None:
        self.left = list(happens)

    async def sleep(self, seconds: float) -> None:
        assert seconds == reclaimer.LOOK_S
        if not self.left:
            raise asyncio.CancelledError
        self.left.pop(0)()


@pytest.mark.parametrize(
    ("free_bytes", "taken_in", "looks_after"),
    [
        (WATERMARK, 99, [0, 2, 4, 6]),  # short: as long as it took
        (4 * WATERMARK, 99, [0]),  # nine times as long: 18 rests
        (4 * WATERMARK, 5, [0, 5, 7]),  # until room is short
    ],
)
async def test_it_rests_less_while_room_is_short(
    monkeypatch: pytest.MonkeyPatch, free_bytes: int, taken_in: int, looks_after: list[int]
) -> None:
    store, clock = AskedStore(free_bytes), HandClock()
    loop = Reclaimer(store, StoreHealth(store, clock, WATERMARK), WATERMARK, lambda _: None)
    rested, looks = list[int](), list[int]()

    async def look() -> float:
        looks.append(len(rested))
        return 2 * reclaimer.LOOK_S

    def rest() -> None:
        rested.append(1)
        clock.pass_ns(10**10)
        if len(rested) == taken_in:
            store.free_bytes = WATERMARK

    monkeypatch.setattr(loop, "look", look)
    monkeypatch.setattr(asyncio, "sleep", Rests(*[rest] * 7).sleep)
    loop._health.check_disk()
    with pytest.raises(asyncio.CancelledError):
        await loop._give_back()
    assert looks == looks_after
