"""What a recorder wrote is read run by run, and adds up to the figures of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.admission.trace import Trace


def step(start_ns: int, end_ns: int, held: tuple[int, int], running: int, **more: Any) -> str:
    """Return a recorder's line for a step from `start_ns` to `end_ns`; `held` while it runs, and after it."""
    line = {
        "scheduled_ns": start_ns, "updated_ns": end_ns, "held": held[0], "held_after": held[1], "running": running,
        "preempted": 0, "computed": 0, "entered": [], "tokens": [],
    }  # fmt: skip
    return json.dumps({**line, **more}) + "\n"


RUN = [
    step(10, 20, (4, 4), 1, entered=[0, 1], computed=8, tokens=[(0, 1, False)]),
    step(20, 40, (8, 4), 2, computed=9, tokens=[(0, 1, True), (1, 1, False)]),
    step(40, 50, (4, 0), 1, computed=1, preempted=1, tokens=[(1, 1, True)]),
]


def test_a_run_is_read_as_it_was(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace")
    trace.path.write_text("".join(RUN))
    meter = trace.meter([0, 5], 10)
    assert [(life.entered_ns, life.first_ns, life.done_ns, life.tokens) for life in meter.lives] == [
        (10, 20, 40, 2),
        (10, 40, 50, 2),
    ]
    assert list(meter.gaps_ns) == [20, 10]
    assert (meter.preemptions, meter.computed_tokens) == (1, 18)
    # While a step runs: 4, 8 and 4 of 10 blocks for 10, 20 and 10 ns; before the first one nothing for 10 ns.
    assert meter.usage == pytest.approx((4 * 10 + 8 * 20 + 4 * 10) / (10 * 50))
    # One of two that have arrived runs in the first step, and in no other does one wait.
    assert meter.backlog_usage == pytest.approx(4 * 10 / (10 * 20))
    assert meter.usage_after_steps == pytest.approx(0.0)


def test_runs_follow_each_other(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace")
    trace.skip()
    trace.path.write_text("left by an engine's warm-up\n")
    trace.skip()
    for _ in range(2):
        with trace.path.open("a") as file:
            file.writelines(RUN)
        assert trace.meter([0, 5], 10).finished == 2


def test_a_step_scheduled_while_one_runs_begins_when_that_has_ended(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace")
    asynchronous = [
        step(10, 20, (4, 8), 1, entered=[0], tokens=[(0, 1, False)]),
        step(12, 30, (8, 0), 1, tokens=[(0, 1, True)]),
    ]
    trace.path.write_text("".join(asynchronous))
    meter = trace.meter([10], 10)
    # No time counts twice: 4 of 10 blocks for 10 ns and 8 for 10 ns.
    assert meter.usage == pytest.approx((4 * 10 + 8 * 10) / (10 * 20))
    assert meter.block_ns == 10 * 20
