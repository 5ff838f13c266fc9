"""The margin finds its target rate, and an engine that preempts gets time to recover."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.admission.margin import (
    FIRST_DEVIATIONS,
    LEAST_DEVIATIONS,
    MOST_BURST_STEPS,
    MOST_DEVIATIONS,
    MOST_NARROWING_DEVIATIONS,
    MOST_PREEMPTIONS_PER_REQUEST,
    STEP_DEVIATIONS,
    UNTARGETED_DEVIATIONS,
    Margin,
)
from services.scheduler.core.messages import EngineReport


def report(preemptions: int, waiting: int = 0, usage: float = 0.5, running: int = 1) -> EngineReport:
    return EngineReport(1, 1, None, running, waiting, preemptions, 0, usage)


def test_it_finds_the_rate_it_is_asked_for() -> None:
    """An engine that preempts the more the narrower the margin: at 0.4 % of the requests if it is 2.5 wide."""
    rng = random.Random(3)
    margin = Margin(4.0)
    margin.observe(report(0))
    preemptions = counted = 0
    for number in range(60_000):
        if rng.random() < 0.004 * 4 ** (2.5 - margin.deviations):
            preemptions += 1
            counted += number >= 10_000
            margin.observe(report(preemptions))
            margin.observe(report(preemptions, usage=0.1))
        margin.completed(100, 0.1)
    assert counted / 50 == pytest.approx(4.0, rel=0.1)
    assert margin.deviations == pytest.approx(2.5, abs=0.8)


@pytest.mark.parametrize(
    ("cost", "spread", "factor"),
    [(1.0, 0.025, 1), (0.125, 0.025, 8), (1.0, 0.1, 4), (0.25, 0.05, 8), (2.0, 0.025, 1), (1.0, 0.001, 1)],
)
def test_more_preemptions_are_worth_it_where_they_cost_less_than_the_margin(
    cost: float, spread: float, factor: int
) -> None:
    """An engine whose rate of preemptions falls fourfold with each deviation, in equilibrium."""
    rng = random.Random(5)
    margin = Margin(4.0)
    preemptions = counted = 0
    for number in range(40_000):
        busy_ns = 1000 * number
        counters = {"busy_ns": busy_ns, "prefill_tokens": 10 * number, "prefill_ns": int(cost * busy_ns / 10)}
        happened = rng.random() < 0.25 * 4**-margin.deviations
        preemptions += happened
        counted += happened and number >= 10_000
        margin.observe(report(preemptions).replace(**counters))
        margin.observe(report(preemptions, usage=0.1).replace(**counters))
        margin.completed(100, spread)
    assert counted / 30 == pytest.approx(4.0 * factor, rel=0.12)
    assert margin.target_preemptions / 40 == pytest.approx(4.0 * factor, rel=0.01), "what it says that it steers to"


def test_a_cache_is_never_without_rest_however_little_preemptions_cost() -> None:
    margin = Margin(5.0)
    for number in range(100):
        margin.observe(report(0).replace(busy_ns=10**9 * number, prefill_tokens=number, prefill_ns=number))
        before = margin.deviations
        margin.completed(1, 0.5)
        assert before - margin.deviations <= MOST_NARROWING_DEVIATIONS + 1e-9
    before = margin.deviations
    margin.observe(report(1).replace(busy_ns=10**11, prefill_tokens=100, prefill_ns=100))
    for _ in range(round(1 / MOST_PREEMPTIONS_PER_REQUEST)):
        margin.completed(1, 0.5)
    assert margin.deviations == pytest.approx(before)


def test_where_many_preemptions_are_worth_it_the_margin_hardly_swings() -> None:
    """An engine that preempts half of its requests at a margin of 0, and a fifth, which is worth it, at 0.66."""
    rng = random.Random(7)
    margin = Margin(5.0)
    preemptions = 0
    seen: list[float] = []
    for number in range(10_000):
        counters = {"busy_ns": 1000 * number, "prefill_tokens": 10 * number, "prefill_ns": 10 * number}
        preemptions += rng.random() < 0.5 * 4**-margin.deviations
        margin.observe(report(preemptions).replace(**counters))
        margin.observe(report(preemptions, usage=0.1).replace(**counters))
        margin.completed(100, 0.1)
        seen += [margin.deviations] if number > 1000 else []
    assert statistics.mean(seen) == pytest.approx(0.66, abs=0.1)
    assert statistics.pstdev(seen) < 0.15


@given(target=st.floats(0, 1000), events=st.lists(st.integers(0, 50)))
def test_it_stays_within_its_bounds(target: float, events: list[int]) -> None:
    margin = Margin(target)
    total = 0
    margin.observe(report(0))
    for event in events:
        before = margin.deviations
        if event % 2:
            margin.completed(100, 0.5)
            assert margin.deviations <= before
        else:
            total += event
            margin.observe(report(total))
            assert margin.deviations >= before
        assert LEAST_DEVIATIONS <= margin.deviations <= MOST_DEVIATIONS


def test_where_no_preemption_is_wanted_the_margin_begins_wide_and_stays_so() -> None:
    margin = Margin(0.0)
    assert margin.deviations == UNTARGETED_DEVIATIONS > FIRST_DEVIATIONS
    for _ in range(1000):
        margin.completed(100, 0.5)
    assert margin.deviations == UNTARGETED_DEVIATIONS
    assert margin.target_preemptions == 0


def test_preemptions_from_before_the_first_report_do_not_count() -> None:
    margin = Margin(5.0)
    margin.observe(report(70))
    assert (margin.deviations, margin.recovering) == (FIRST_DEVIATIONS, False)
    margin.observe(report(71))
    assert margin.deviations > FIRST_DEVIATIONS
    assert margin.recovering


def test_one_burst_costs_no_more_than_its_steps() -> None:
    margin = Margin(5.0)
    margin.observe(report(0))
    for preemptions in (3, 30, 31):
        margin.observe(report(preemptions))
    once = FIRST_DEVIATIONS + MOST_BURST_STEPS * STEP_DEVIATIONS
    assert margin.deviations == pytest.approx(once)
    margin.observe(report(31, usage=0.1))
    assert not margin.recovering
    margin.observe(report(33))
    assert margin.deviations == pytest.approx(once + 2 * STEP_DEVIATIONS)


def test_an_engine_has_recovered_when_nothing_waits_and_usage_has_fallen() -> None:
    margin = Margin(5.0)
    margin.observe(report(0, usage=1.0))
    margin.observe(report(2, waiting=2, usage=0.9))
    for waiting, usage, recovering in ((1, 0.95, True), (0, 1.0, True), (1, 0.9, True), (0, 0.97, False)):
        margin.observe(report(2, waiting, usage))
        assert margin.recovering == recovering, (waiting, usage)


def test_an_empty_engine_has_recovered() -> None:
    margin = Margin(5.0)
    margin.observe(report(0))
    margin.observe(report(1, usage=0.0))
    assert margin.recovering
    margin.observe(report(1, usage=0.0, running=0))
    assert not margin.recovering
