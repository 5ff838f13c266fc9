"""What a preemption costs is told by how fast the engine prefills, and how long its requests take."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.admission.recompute import LEAST_REQUESTS, RecomputeCost
from services.scheduler.core.messages import EngineReport


def report(busy_ns: int, prefill_ns: int, prefill_tokens: int) -> EngineReport:
    return EngineReport(1, 1, busy_ns=busy_ns, prefill_ns=prefill_ns, prefill_tokens=prefill_tokens)


def test_it_is_unknown_until_some_have_ended() -> None:
    cost = RecomputeCost()
    cost.observe(report(0, 0, 0))
    for _ in range(LEAST_REQUESTS):
        assert cost.requests == math.inf
        cost.observe(report(10**9, 10**8, 1000))
        cost.completed(2000)
    assert cost.requests < math.inf


def test_it_is_the_time_of_a_prefill_of_all_tokens_over_the_time_of_the_request() -> None:
    """Each request: 1 s of the engine, 100 tokens prefilled in 20 ms; 500 tokens again take 0.1 s."""
    cost = RecomputeCost()
    for number in range(1, 2001):
        cost.observe(report(number * 10**9, number * 2 * 10**7, number * 100))
        cost.completed(500)
    assert cost.requests == pytest.approx(0.1, rel=0.01)
    for number in range(2001, 5001):
        cost.observe(report(number * 10**9, number * 2 * 10**7, number * 100))
        cost.completed(2000)
    assert cost.requests == pytest.approx(0.4, rel=0.01)


def test_what_lies_before_the_first_report_does_not_count() -> None:
    cost, other = RecomputeCost(), RecomputeCost()
    for number in range(20):
        cost.observe(report(10**15 + number * 10**9, 10**15 + number * 10**7, 10**12 + number * 100))
        other.observe(report(number * 10**9, number * 10**7, number * 100))
        cost.completed(100)
        other.completed(100)
    assert cost.requests == other.requests


@given(st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2, st.integers(0, 2**64 - 1), st.integers(0, 10**6))))
def test_whatever_a_worker_says_it_is_a_positive_number(said: list[tuple[int, int, int, int]]) -> None:
    cost = RecomputeCost()
    for busy_ns, prefill_ns, prefill_tokens, tokens in said:
        cost.observe(report(busy_ns, prefill_ns, prefill_tokens))
        cost.completed(tokens)
        assert cost.requests > 0
