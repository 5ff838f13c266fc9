"""Many who watch one batch are told one after the other, and of what came meanwhile in one frame."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from penstock.queue.v1 import queue_pb2
from services.queue.watch.hub import WatchHub
from services.queue.watch.pace import Pace
from services.telemetry import Telemetry
from tests.support.serving import Peer, serving, text
from tests.support.waiting import wait_for_async
from tests.unit.queue.test_service import events, results

LONG_S = 1e9
"""Longer than any machine has been up: its clock may have begun a moment ago."""


class Sleep:
    """Sleeps until it is told that the time has passed."""

    def __init__(self) -> None:
        self.asked_s: list[float] = []
        self._over: list[asyncio.Event] = []

    async def __call__(self, seconds: float) -> None:
        self.asked_s.append(seconds)
        self._over.append(asyncio.Event())
        await self._over[-1].wait()

    def end(self) -> None:
        self._over[-1].set()


async def several(count: int, pace: Pace) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(pace.place()) for _ in range(count)]
    for _ in range(3 * count):
        await asyncio.sleep(0)
    return tasks


def done(tasks: list[asyncio.Task[None]]) -> list[bool]:
    return [task.done() for task in tasks]


async def test_a_few_are_let_on_at_once_and_the_others_one_after_each_gap() -> None:
    sleep = Sleep()
    tasks = await several(5, Pace(LONG_S, 2, sleep))
    assert done(tasks) == [True, True, False, False, False]
    tasks[3].cancel()
    sleep.end()
    await wait_for_async(lambda: _equal(lambda: len(sleep.asked_s), 2), "the next to wait for its gap")
    assert done(tasks) == [True, True, True, True, False], "who is cancelled takes no place"
    assert sleep.asked_s[0] <= LONG_S < sleep.asked_s[1] <= 2 * LONG_S, "no time has passed"
    sleep.end()
    await tasks[4]


async def _equal(found: Callable[[], object], wanted: object) -> bool:
    return found() == wanted


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    async with serving(Telemetry(None)) as peer:
        yield peer


async def test_what_ends_while_a_watcher_waits_for_its_place_is_in_one_frame(peer: Peer) -> None:
    sleep = Sleep()
    peer.service._watching._pace = Pace(LONG_S, 1, sleep)
    names = await peer.submit(*(text(batch="b") for _ in range(5)))
    watch = peer.stub.Watch(queue_pb2.WatchRequest(batch="b"))
    await watch.read()

    async def end(*ended: str) -> None:
        for name in ended:
            await peer.stub.Cancel(queue_pb2.CancelRequest(request_ids=queue_pb2.RequestIds(ids=[name])))

    await end(names[0])
    assert len(results(await events(watch, lambda seen: bool(results(seen))))) == 1, "one who is alone is told at once"
    await end(*names[1:])
    await wait_for_async(lambda: _equal(lambda: len(sleep.asked_s), 1), "the watcher to wait")
    sleep.end()
    assert len((await watch.read()).events) == 5, "four results, and how much is left"


def test_progress_alone_wakes_nobody_but_at_the_end() -> None:
    hub = WatchHub()
    batch = ("t", "b")
    with hub.batch(batch, False) as watcher:
        hub.update({batch: (1, 0)})
        assert not watcher._news.is_set()
        hub.update({batch: (0, 0)})
        assert watcher._news.is_set()
