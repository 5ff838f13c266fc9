"""Every figure by workers and by waiting requests is there: of the smallest fleet, and with a few that wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lifecycle import report
from benchmarks.lifecycle.growth import Grown, by_waiting, by_workers

pytestmark = [pytest.mark.processes, pytest.mark.long]

REQUESTS = 400
POLICY = "predictive"


def whole(what: str, found: dict[int, Grown]) -> None:
    """Assert that what was measured is told, each figure of it."""
    told = report.growth(what, found)
    assert list(told) == [str(count) for count in found]
    for count, (cost, lone_s) in found.items():
        figures = told[str(count)]
        assert figures["cpu_us_by_process"].keys() >= {"queue", "scheduler", "worker", "client"}
        assert cost.requests == REQUESTS
        assert figures["wire_bytes"] > 0  # less than a prompt's where much was answered before the count began
        assert 0 < figures["lone_ms_p50"] <= figures["lone_ms_p99"] <= max(lone_s) * 1e3 + 0.001


def test_by_workers(tmp_path: Path) -> None:
    found = by_workers(tmp_path, (1, 2), REQUESTS, 5, POLICY)
    whole("workers", found)
    assert [len(grown.lone_s) for grown in found.values()] == [5, 5]


def test_by_waiting(tmp_path: Path) -> None:
    whole("waiting", by_waiting(tmp_path, (10,), REQUESTS, 2_000.0, POLICY))
