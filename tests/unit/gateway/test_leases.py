"""Leases of batches where the clocks of gateways are wrong: one gateway drives a batch, and none rests for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from services.gateway.batch import drive, driver
from services.gateway.batch.records import Held, LeaseLostError, Stillness
from services.gateway.core.batch import MOST_LEASE_S, Batch, Status
from tests.support.waiting import wait_for_async
from tests.unit.gateway.test_drive import LINES, Rig, rig
from tests.unit.gateway.test_driver import searching, until_ended

__all__ = ["rig"]

LEASE_S = 10.0
AN_HOUR_S = 3600.0


def passing(step_s: float) -> Callable[[], float]:
    """Return a clock on which so much passes between two looks at it."""
    now_s = 0.0

    def look() -> float:
        nonlocal now_s
        now_s += step_s
        return now_s

    return look


async def left_by_a_clock_ahead(rig: Rig, expires_at: int) -> Batch:
    """Return a batch whose gateway was killed, and had a clock that was an hour ahead."""
    batch = await rig.batch(expires_at=expires_at)
    await rig.take(batch, "killed", ahead_s=AN_HOUR_S)
    return batch


def test_a_lease_is_over_when_its_record_was_not_written_for_the_longest_one() -> None:
    now_s = [0.0]
    stillness = Stillness(lambda: now_s[0])
    assert not stillness.over("a", 3)
    now_s[0] = MOST_LEASE_S - 1
    assert not stillness.over("a", 3)
    assert not stillness.over("b", 3), "it was not looked at before"
    now_s[0] += 1
    assert not stillness.over("a", 4), "it was renewed"
    now_s[0] += MOST_LEASE_S - 1
    assert not stillness.over("a", 4)
    assert stillness.over("b", 3)
    stillness.forget_all_but(["a"])
    assert not stillness.over("b", 3)
    now_s[0] += 1
    assert stillness.over("a", 4)


async def test_a_lease_that_is_over_is_broken_and_nothing_else(rig: Rig) -> None:
    batch = await left_by_a_clock_ahead(rig, int(time.time()) + 3600)

    async def taken(over: bool) -> Held | None:
        return await Held.take(rig.records, batch.batch_id, "next", LEASE_S, over=lambda *_: over)

    assert await taken(False) is None
    held = await taken(True)
    assert held is not None
    assert held.batch.lease.until <= time.time() + LEASE_S
    await held.save(replace(held.batch, status=Status.FAILED))
    assert await taken(True) is None, "it has ended"


async def test_a_batch_whose_gateway_had_a_clock_ahead_goes_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "Stillness", partial(Stillness, passing(MOST_LEASE_S / 3)))
    batch = await left_by_a_clock_ahead(rig, int(time.time()) - 1)
    async with searching(rig):
        await until_ended(rig, batch)


@pytest.mark.parametrize("off_s", [-660.0, 660.0])
async def test_two_gateways_do_not_take_a_batch_from_each_other_for_ever(rig: Rig, off_s: float) -> None:
    """Both drive on, and renew what they hold, while one's clock is eleven minutes off."""
    batch = await rig.batch()
    clocks = {"right": time.time, "wrong": lambda: time.time() + off_s}
    looks = {name: Stillness(passing(LEASE_S / 3)) for name in clocks}
    held: dict[str, Held] = {}
    takes = []
    for _ in range(int(MOST_LEASE_S)):
        for name, clock in clocks.items():
            if name in held:
                try:
                    await held[name].save()
                except LeaseLostError:
                    del held[name]
            elif found := await Held.take(rig.records, batch.batch_id, name, LEASE_S, clock, looks[name].over):
                held[name] = found
                takes.append(name)
    assert takes in (["right"], ["right", "wrong"])


async def test_who_holds_a_batch_renews_it_though_the_clock_was_set_back(rig: Rig) -> None:
    ahead_s = [AN_HOUR_S]
    batch = await rig.batch()
    held = await Held.take(rig.records, batch.batch_id, "me", LEASE_S, lambda: time.time() + ahead_s[0])
    assert held is not None
    ahead_s[0] = 0.0
    await held.beat()
    lease = (await rig.records.get(batch.batch_id))[0].lease
    assert lease.until <= time.time() + LEASE_S


async def test_progress_is_told_though_the_clock_was_set_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "SAVE_S", 0.0)
    ahead_s = [AN_HOUR_S]
    batch = await rig.batch(expires_at=int(time.time() + 2 * AN_HOUR_S))
    held = await Held.take(rig.records, batch.batch_id, "me", LEASE_S, lambda: time.time() + ahead_s[0])
    assert held is not None
    driving = asyncio.create_task(rig.drive(held).run())

    async def submitted() -> bool:
        return (await rig.records.get(batch.batch_id))[0].progress.submitted

    async def told() -> bool:
        return (await rig.records.get(batch.batch_id))[0].counts.failed == 1

    await wait_for_async(submitted, "the submission")
    ahead_s[0] = 0.0
    await rig.client.cancel(next(iter(rig.service.committer.machine.book.entries.values())).name)
    await wait_for_async(told, "the count of what has ended")
    await rig.client.cancel(batch=batch.batch_id)
    await driving
    assert (await rig.records.get(batch.batch_id))[0].counts.failed == LINES
