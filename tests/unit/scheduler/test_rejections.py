"""What the log says of requests that no worker could ever hold: clients decide how many come."""

from __future__ import annotations

import logging

import pytest

from services.scheduler.core import messages as m
from services.scheduler.runner import COUNT_NS
from tests.support.scheduler_shell import Shell
from tests.support.scheduling import SECOND_NS, announced

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def shell(caplog: pytest.LogCaptureFixture) -> Shell:
    """Return a shell that knows its fleet: one worker of ten blocks."""
    caplog.set_level(logging.INFO, "scheduler")
    found = Shell()
    found.open()
    found.clock.time_ns += 60 * SECOND_NS
    found.runner.feed([m.Tick()])
    found.runner.wake()
    found.runner.look()
    return found


def flood(shell: Shell, first: int, count: int) -> None:
    """Announce so many requests that are larger than the worker."""
    trace = f"00-{TRACE_ID}-b7ad6b7169203331-01"
    numbers = range(first, first + count)
    shell.runner.feed([announced(f"r{n}", "batch", 11, n, traceparent=trace) for n in numbers])
    shell.runner.wake()


def said(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "rejected" in record.getMessage()]


def test_a_flood_of_hopeless_requests_is_a_line_a_second_and_their_number(
    shell: Shell, caplog: pytest.LogCaptureFixture
) -> None:
    flood(shell, 1, 1_500)
    (line,) = said(caplog)
    assert line.getMessage().startswith("rejected r1: ")
    assert (line.__dict__["request_id"], line.__dict__["trace_id"]) == ("r1", TRACE_ID)
    shell.runner.look()
    assert len(said(caplog)) == 1, "a second is not over"
    shell.clock.time_ns += COUNT_NS
    shell.runner.look()
    assert said(caplog)[-1].getMessage() == "rejected 1499 more requests that no worker could ever hold"
    flood(shell, 2_000, 2)
    assert said(caplog)[-1].getMessage().startswith("rejected r2000: ")
    shell.runner.stop()
    assert [record.getMessage()[:15] for record in said(caplog)[-1:]] == ["rejected 1 more"]
    assert len(said(caplog)) == 4


def test_where_nothing_is_rejected_nothing_is_said(shell: Shell, caplog: pytest.LogCaptureFixture) -> None:
    shell.clock.time_ns += COUNT_NS
    shell.runner.look()
    shell.runner.stop()
    assert not said(caplog)
