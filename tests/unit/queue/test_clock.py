"""A clock that is set under a queue that runs."""

from __future__ import annotations

import time

import pytest

from services.clock import SystemClock
from services.telemetry import Telemetry
from tests.support.serving import serving
from tests.support.waiting import wait_for_async


def test_time_does_not_follow_a_clock_that_is_set_and_knows_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SystemClock()
    before_ns = clock.now_ns()
    wall_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: wall_ns() - 3_600 * 10**9)
    assert before_ns <= clock.now_ns() < before_ns + 3_600 * 10**9
    assert clock.behind_s() == pytest.approx(-3600, abs=1)


async def test_the_queue_tells_of_a_clock_that_was_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(Telemetry(None)) as peer:
        wall_ns = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: wall_ns() + 60 * 10**9)

        async def told(text: str) -> bool:
            return text in caplog.text

        await wait_for_async(lambda: told("was set: it is 60.0 s ahead of"), "the queue to look at the clock")
        behind_s = peer.registry.get_sample_value("penstock_queue_clock_behind_seconds")
        assert behind_s == pytest.approx(60, abs=1)
        monkeypatch.setattr(time, "time_ns", lambda: wall_ns() - 60 * 10**9)
        await wait_for_async(lambda: told("was set: it is 60.0 s behind"), "the queue to look at the clock again")
        monkeypatch.undo()
        await wait_for_async(lambda: told("agrees with the queue's own again"), "the queue to look a third time")
