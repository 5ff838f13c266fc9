"""The judge of `make trace-check` finds what is wrong with a trace, and nothing in one that is well."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.support.otlp import ReceivedSpan
from tests.support.promql import PAGE
from tests.traces.verdict import ATTRIBUTES, GENERATION, Kill, Sent, Tally, judge

REQUEST = "store-1"
SENT = [Sent(REQUEST, "penstock.submit")]
MS = 1_000_000
KILLED_MS = 30_000
"""When the worker of the first attempt dies."""

ANSWERED = {
    "worker.claim": ("grant-2", 52_000, 52_010),
    "worker.tokenize": ("root", 52_010, 52_020),
    GENERATION: ("root", 52_020, 52_500),
    "engine.prefill": ("generation", 52_020, 52_100),
    "engine.decode": ("generation", 52_100, 52_500),
    "worker.complete": ("root", 52_501, 52_510),
}


def span(name: str, parent: str, start_ms: int, end_ms: int, span_id: str = "", **changed: object) -> ReceivedSpan:
    """Return a span with every attribute that it must have."""
    attributes: dict[str, object] = dict.fromkeys(ATTRIBUTES[name], 1)
    attributes |= {"penstock.request.id": REQUEST, "penstock.outcome": "completed", "penstock.attempt": 2}
    attributes |= {"penstock.worker.id": "w2"} | {f"penstock.{key.replace('_', '.')}": v for key, v in changed.items()}
    events = {"first_token": 52_100 * MS, "last_token": 52_500 * MS} if changed.get("lease_end") == "complete" else {}
    service, lost = name.partition(".")[0], changed.get("lease_end") == "worker_lost"
    times = start_ms * MS, end_ms * MS
    return ReceivedSpan(service, name, "t", span_id or name, parent, *times, attributes, events, lost)


def retried() -> list[ReceivedSpan]:
    """Return the trace of a request whose first worker was killed."""
    first = {"attempt": 1, "worker_id": "w1"}
    return [
        span("penstock.submit", "", 0, 10, "root"),
        span("queue.persist", "root", 1, 9),
        span("queue.wait", "root", 9, 20_000, "wait-1", **first),
        span("scheduler.grant", "root", 9, 19_000, "grant-1", **first),
        span("scheduler.credits", "root", 19_000, 36_000, "credits-1", **first),
        span("queue.lease", "root", 20_000, 32_000, "lease-1", lease_end="worker_lost", **first),
        span("queue.wait", "root", 9, 52_005, "wait-2"),
        span("scheduler.grant", "root", 32_000, 51_999, "grant-2"),
        span("scheduler.credits", "root", 51_999, 52_505),
        span("queue.lease", "root", 52_005, 52_505, "lease-2", lease_end="complete"),
        *(span(name, parent, start, end, "generation" if name == GENERATION else "")
          for name, (parent, start, end) in ANSWERED.items()),
        span("queue.complete", "root", 52_505, 52_508),
    ]  # fmt: skip


def told(spans: list[ReceivedSpan], *kills: Kill) -> Tally:
    """Return the verdict."""
    return judge(SENT, spans, kills or (Kill("w1", KILLED_MS * MS),))


def without(*names: str) -> list[ReceivedSpan]:
    """Return the trace without these spans, given by name or id."""
    return [span for span in retried() if span.name not in names and span.span_id not in names]


def with_change(name: str, /, **fields: object) -> list[ReceivedSpan]:
    """Return the trace with one span changed, given by its id."""
    return [replace(s, **fields) if s.span_id == name else s for s in retried()]  # type: ignore[arg-type]


def test_a_retried_request_has_a_whole_trace() -> None:
    tally = told(retried())
    assert not tally.faults
    assert (tally.traces, tally.whole, tally.struck, tally.retried, tally.lost_attempts) == (1, 1, 0, 1, 1)


@pytest.mark.parametrize("name", ["root", "queue.persist", "wait-2", "lease-1", "lease-2", "grant-1", "credits-1",
                                  "queue.complete", *ANSWERED])  # fmt: skip
def test_a_missing_span_is_found(name: str) -> None:
    assert told(without(name)).faults


def test_a_grant_that_stood_ready_is_claimed_by_nobody_and_told_of_after_the_delivery() -> None:
    (grant,) = [span for span in retried() if span.span_id == "grant-2"]
    stood = {**grant.attributes, "penstock.grant.standing": True}
    told_late = with_change("grant-2", start_ns=52_030 * MS, end_ns=52_030 * MS, attributes=stood)
    tally = told([span for span in told_late if span.name != "worker.claim"])
    assert not tally.faults
    assert (tally.whole, tally.struck) == (1, 0)


def test_a_standing_grant_that_a_killed_worker_never_told_of_is_known_to_the_queue_alone() -> None:
    tally = told(without("grant-1", "credits-1"))
    assert not tally.faults
    assert (tally.whole, tally.lost_attempts) == (1, 1)
    assert told(without("grant-2", "scheduler.credits")).faults, "of an attempt that answered it was told"


OUT_OF_PLACE = {
    "parent unknown": with_change("queue.complete", parent_id="nobody"),
    "parent wrong": with_change("engine.decode", parent_id="root"),
    "another trace": with_change("wait-1", trace_id="other"),
    "ends before it starts": with_change("worker.tokenize", end_ns=1),
    "before what comes before": with_change("engine.prefill", start_ns=52_000 * MS),
    "two attempts at once": with_change("lease-2", start_ns=31_000 * MS),
    "no tokens": with_change("lease-2", events={}),
    "a loss that is no error": with_change("lease-1", is_error=False),
    "an answer that is one": with_change("lease-2", is_error=True),
    "no attributes": with_change("queue.persist", attributes={"penstock.request.id": REQUEST}),
    "unheard of": with_change("queue.complete", name="queue.unheard"),
    "twice": [*retried(), span("queue.persist", "root", 1, 9, "two")],
    "of no request": [*retried(), replace(span("queue.persist", "root", 1, 9), attributes={})],
}


@pytest.mark.parametrize("spans", OUT_OF_PLACE.values(), ids=OUT_OF_PLACE.keys())
def test_what_is_out_of_place_is_found(spans: list[ReceivedSpan]) -> None:
    assert told(spans).faults


def test_a_killed_worker_may_take_its_last_spans_along_but_not_the_queues_word_for_them() -> None:
    kill = Kill("w1", KILLED_MS * MS), Kill("w2", 52_600 * MS)
    tally = told(without(GENERATION, "worker.complete"), *kill)
    assert not tally.faults
    assert (tally.traces, tally.whole, tally.struck) == (1, 0, 1)
    assert told(without(GENERATION, "lease-2"), *kill).faults
    long_after = Kill("w1", KILLED_MS * MS), Kill("w2", 90_000 * MS)
    assert told(without(GENERATION), *long_after).faults, "it had the time to send them"


def test_an_attempt_is_lost_only_with_its_worker() -> None:
    assert told(retried(), Kill("w2", 1)).faults
    assert not told(retried(), Kill("w1", 19_900 * MS)).faults, "its claim was on the way"
    assert told(retried(), Kill("w1", 19_000 * MS)).faults, "that was the life before"


def test_every_documented_span_is_judged() -> None:
    page = PAGE.read_text().partition("## Metrics")[0]
    rows = re.findall(r"^\| (`[^|]+`) \|", page, re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    generations = {"chat MODEL", "text_completion MODEL"}
    assert documented - generations == ATTRIBUTES.keys() - {GENERATION}
    assert documented >= generations
