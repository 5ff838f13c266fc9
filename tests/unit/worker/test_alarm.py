"""An alarm rings in time, and is not set anew for what comes later than it rings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from services.worker.alarm import LEAST_S, Alarm


class Timer:
    def __init__(self, at_s: float, ring: Callable[[], None]) -> None:
        self.at_s, self.ring, self.cancelled = at_s, ring, False

    def cancel(self) -> None:
        self.cancelled = True


class Clockwork:
    """The part of a loop that alarms use; time passes by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now_s

    def call_at(self, at_s: float, ring: Callable[[], None]) -> Timer:
        self.timers.append(Timer(at_s, ring))
        return self.timers[-1]

    @property
    def set_for(self) -> list[float]:
        return [timer.at_s for timer in self.timers if not timer.cancelled]


@pytest.fixture
def clockwork(monkeypatch: pytest.MonkeyPatch) -> Clockwork:
    made: Any = Clockwork()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: made)
    found: Clockwork = made
    return found


def test_it_is_left_for_what_comes_later_and_set_anew_for_what_comes_earlier(clockwork: Clockwork) -> None:
    alarm = Alarm(lambda: None)
    alarm.within(5)
    clockwork.now_s += 1
    alarm.within(5)
    assert (clockwork.set_for, len(clockwork.timers)) == ([105], 1)
    alarm.within(2)
    assert clockwork.set_for == [103]


def test_it_is_never_set_for_less_than_a_loop_can_tell_from_at_once(clockwork: Clockwork) -> None:
    alarm = Alarm(lambda: None)
    alarm.within(0.0003)
    assert clockwork.set_for == [100 + LEAST_S]


def test_it_rings_once_and_can_be_set_again(clockwork: Clockwork) -> None:
    rung: list[float] = []
    alarm = Alarm(lambda: rung.append(clockwork.now_s))
    alarm.within(5)
    clockwork.now_s = 105
    clockwork.timers[0].ring()
    assert rung == [105]
    alarm.within(5)
    assert [timer.at_s for timer in clockwork.timers] == [105, 110]


def test_a_cancelled_one_does_not_ring_and_can_be_set_again(clockwork: Clockwork) -> None:
    alarm = Alarm(lambda: None)
    alarm.within(5)
    alarm.cancel()
    assert clockwork.set_for == []
    alarm.within(6)
    assert clockwork.set_for == [106]
