"""What the log says of requests that are given up."""

from __future__ import annotations

import logging

import pytest

from penstock.request.v1 import request_pb2
from services.queue.core.effects import Ended
from services.queue.core.lifecycle import Outcome
from services.queue.letters import MOST_LINES, DeadLetters
from services.telemetry import Telemetry
from tests.support.queueing import meta
from tests.support.serving import serving, text
from tests.support.waiting import wait_for_async

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "dead letter" in record.getMessage()]


async def test_a_dead_letter_is_a_warning_by_which_log_and_trace_find_each_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(Telemetry(None)) as peer:
        dies, lives = await peer.submit(text(traceparent=f"00-{TRACE_ID}-b7ad6b7169203331-01"), text())
        work = await peer.work()
        failure = request_pb2.RequestError(code="engine_error", message="of the prompt 'my secret'")
        await work.complete((await work.claim(lives)).lease, failure=failure)
        await work.complete((await work.claim(lives)).lease)
        for _ in range(2):
            assert not lines(caplog)
            await work.complete((await work.claim(dies)).lease, failure=failure)
        await peer.settled()
    (line,) = lines(caplog)
    assert (line.levelno, line.name) == (logging.WARNING, "services.queue.letters")
    assert "engine_error" in line.getMessage()
    assert "secret" not in line.getMessage()
    assert (line.__dict__["request_id"], line.__dict__["trace_id"]) == (dies, TRACE_ID)


def ended(number: int) -> Ended:
    return Ended(number, f"r-{number}", meta(), Outcome.DEAD, 3, 5, number, None)


def test_of_too_many_at_once_the_rest_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    letters = DeadLetters()
    letters.count()
    assert not lines(caplog)
    for number in range(MOST_LINES + 7):
        letters.note(ended(number), "worker_lost")
    assert [line.__dict__["request_id"] for line in lines(caplog)] == [f"r-{number}" for number in range(MOST_LINES)]
    caplog.clear()
    letters.count()
    (line,) = lines(caplog)
    assert "7 more" in line.getMessage()
    caplog.clear()
    letters.count()
    assert not lines(caplog)
    letters.note(ended(99), "worker_lost")
    assert [line.__dict__["request_id"] for line in lines(caplog)] == ["r-99"]


def test_a_code_that_somebody_made_up_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    DeadLetters().note(ended(1), "x" * 5000 + "\nforged")
    (line,) = lines(caplog)
    assert len(line.getMessage()) < 300
    assert "\n" not in line.getMessage()


async def test_those_without_a_line_are_counted_within_a_second_and_at_a_stop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def note() -> None:
        caplog.clear()
        for number in range(MOST_LINES + 1):
            peer.service.letters.note(ended(number), "worker_lost")

    async def counted() -> bool:
        return "1 more" in lines(caplog)[-1].getMessage()

    async with serving(Telemetry(None)) as peer:
        note()
        await wait_for_async(counted, "the count")
        note()  # the next count is a second away
    assert await counted()
