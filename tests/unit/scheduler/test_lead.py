"""How far ahead a grant meets the cache, and what the forecast makes of it."""

from __future__ import annotations

import pytest

from services.scheduler.core.admission import lead
from services.scheduler.core.admission.forecast import Forecast, Size, horizons_of
from services.scheduler.core.admission.lead import Lead
from services.scheduler.core.admission.lengths import Kind, Lengths
from services.scheduler.core.messages import EngineReport, EngineShape

MS = 1_000_000
SHAPE = EngineShape(1000, 16, 4096, 64, 0, True, 1)


def measured(round_trip_ns: int, step_ns: int) -> Lead:
    found = Lead()
    for _ in range(50):
        found.observe(EngineReport(1, 1, step_ns=step_ns))
        found.answered(round_trip_ns)
    return found


def test_a_grant_is_taken_to_be_there_at_once_until_both_times_are_known() -> None:
    found = Lead()
    assert found.steps == 0
    found.answered(80 * MS)
    assert found.steps == 0
    found.observe(EngineReport(1, 1))  # an engine that has just begun
    assert found.steps == 0
    found.observe(EngineReport(1, 1, step_ns=8 * MS))
    assert found.steps == lead.STEPS_JOINED + lead.WAYS * 10


def test_the_lead_is_the_round_trip_in_steps() -> None:
    assert measured(80 * MS, 8 * MS).steps == pytest.approx(1 + 1.5 * 10)
    assert measured(80 * MS, 80 * MS).steps == pytest.approx(1 + 1.5)
    assert measured(2000 * MS, 1 * MS).steps == lead.MOST_STEPS


def test_one_ack_that_took_minutes_is_soon_forgotten() -> None:
    found = measured(8 * MS, 8 * MS)
    found.answered(600_000 * MS)
    assert found.steps > 30
    for _ in range(30):
        found.answered(8 * MS)
    assert found.steps == pytest.approx(1 + 1.5, abs=1.5)


def test_what_ends_before_a_grant_is_there_makes_room_for_it() -> None:
    forecast = Forecast(SHAPE)
    lengths = Lengths()
    kind = Kind("m", "batch", 0)
    for tokens in range(1, 400):
        lengths.reached(kind, 0, 40)
        lengths.ended(kind, tokens)
    running = [forecast.demand(Size(20, 250, 50, 400), lengths.curve(kind)) for _ in range(48)]
    for demand in running:
        forecast.add(demand)
    new = forecast.demand(Size(40, 600, 0, 400), lengths.curve(kind))
    at_once = forecast.spare_blocks(new, 0.0)
    peak = forecast.peak_blocks(0.0)
    room = []
    for steps in (0, 4, 30, 120):
        forecast.look_from(steps)
        room.append(forecast.spare_blocks(new, 0.0))
        assert forecast.peak_blocks(0.0) <= peak
    assert room[:2] == [at_once, at_once], "the nearest look is four steps ahead"
    assert room == sorted(room)
    assert room[-1] > at_once


def test_one_look_is_left_however_far_away_the_worker_is() -> None:
    forecast = Forecast(SHAPE)
    forecast.look_from(10.0 * horizons_of(SHAPE)[-1])
    curve = Lengths().curve(Kind("m", "batch", 0))
    forecast.add(forecast.demand(Size(900, 100, 0, 4000), curve))
    assert forecast.spare_blocks(forecast.demand(Size(200, 100, 0, 4000), curve), 0.0) < 1000
