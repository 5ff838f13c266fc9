"""The life that all services have: what they run beside their server, and the status they end with."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from penstock.exits import EX_SOFTWARE
from services import life
from services.config import ServiceSettings
from services.life import EndedError, Loops, live, say_ready
from services.telemetry import Telemetry

TIMEOUT_S = 30


async def for_ever() -> None:
    await asyncio.Event().wait()


async def fails() -> None:
    raise RuntimeError("a defect")


async def ends() -> None:
    """Return, which no part of a service may do by itself."""


async def test_they_run_until_the_service_is_told_to_stop() -> None:
    stop, finish = asyncio.Event(), asyncio.Event()
    finished = []

    async def finishes() -> None:
        await finish.wait()
        finished.append(True)

    loops = Loops(cancelled=for_ever(), finishing=finishes())
    waiting = asyncio.create_task(loops.until(stop))
    await asyncio.sleep(0)
    assert not waiting.done()
    stop.set()
    async with asyncio.timeout(TIMEOUT_S):
        await waiting
        finish.set()
        await loops.end("finishing")
    assert finished, "it was not cancelled"


@pytest.mark.parametrize(
    ("part", "error", "said"), [(fails, RuntimeError, "a defect"), (ends, EndedError, "bad has ended")]
)
async def test_one_that_ends_before_is_why_the_service_ends(part: Any, error: type[Exception], said: str) -> None:
    loops = Loops(good=for_ever(), bad=part())
    async with asyncio.timeout(TIMEOUT_S):
        await loops.until(asyncio.Event())
        with pytest.raises(error, match=said):
            await loops.end()
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing is left behind"


async def test_one_that_fails_at_the_end_is_told_of_as_well() -> None:
    stop = asyncio.Event()
    stop.set()

    async def fails_late() -> None:
        try:
            await for_ever()
        finally:
            raise RuntimeError("cannot end")

    loops = Loops(good=for_ever(), bad=fails_late())
    await asyncio.sleep(0)
    await loops.until(stop)
    with pytest.raises(RuntimeError, match="cannot end"):
        await loops.end()


async def test_the_end_waits_for_no_more_than_it_may() -> None:
    go_on = asyncio.Event()
    loops = Loops(stubborn=_until(go_on))
    async with asyncio.timeout(TIMEOUT_S):
        await loops.end("stubborn", within_s=0)
    go_on.set()


async def _until(event: asyncio.Event) -> None:
    await event.wait()


@pytest.fixture
def settings() -> Iterator[ServiceSettings]:
    """Settings, and a loop and signals that are the tests' own."""
    with patch.object(life, "run_service", asyncio.run), patch.object(life, "stop_on_signals", asyncio.Event):
        yield ServiceSettings()


def test_a_service_ends_with_its_status_and_its_traces_are_closed(settings: ServiceSettings) -> None:
    closed = []

    async def serve(stop: asyncio.Event, _: Telemetry) -> int:
        assert not stop.is_set()
        return 7

    with patch.object(Telemetry, "close", lambda _: closed.append(True)):
        assert live("queue", settings, serve) == 7
    assert closed


def test_one_that_fails_says_so_and_ends_with_70(settings: ServiceSettings, caplog: pytest.LogCaptureFixture) -> None:
    async def serve(_stop: asyncio.Event, _telemetry: Telemetry) -> int:
        raise RuntimeError("a defect")

    assert live("queue", settings, serve) == EX_SOFTWARE
    (record,) = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert record.message == "the queue has failed"
    assert "a defect" in caplog.text


def test_one_that_has_said_why_says_no_more(settings: ServiceSettings) -> None:
    async def serve(_stop: asyncio.Event, _telemetry: Telemetry) -> int:
        raise SystemExit(69)

    with pytest.raises(SystemExit, match="69"):
        live("queue", settings, serve)


@pytest.mark.parametrize(("listen", "said"), [(":0", "0.0.0.0:5"), ("[::1]:0", "[::1]:5"), ("h:7", "h:5")])
def test_it_says_where_it_is_ready(listen: str, said: str) -> None:
    stream = io.StringIO()
    say_ready("queue", listen, 5, stream)
    assert stream.getvalue() == f"ready: queue on {said}\n"
