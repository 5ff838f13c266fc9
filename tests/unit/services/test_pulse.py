"""The gauge of a loop that stands still: it ages while nothing of the loop runs, and only then."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from prometheus_client import REGISTRY

from services.pulse import BEAT_S
from services.rpc.loop import run_service
from tests.support.waiting import wait_for


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Leave the process as it was: a service settles its garbage, and its thread's class."""
    thresholds = gc.get_threshold()
    with patch.object(gc, "collect"), patch("services.rpc.loop.interrupt_nobody"):
        yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def silent_s() -> float:
    """Return what a scrape says."""
    value = REGISTRY.get_sample_value("penstock_loop_silent_seconds")
    assert value is not None
    return value


def wait_for_a_beat() -> None:
    """Return once the gauge has fallen."""
    wait_for(lambda: silent_s() > BEAT_S / 4, "the gauge to age", 30)
    wait_for(lambda: silent_s() < BEAT_S / 4, "the loop to beat", 30)


class Service:
    """A service whose loop is held up at its start, and once more when it is told to stand."""

    def __init__(self) -> None:
        self.begin, self.stand, self.go_on, self.end = (threading.Event() for _ in range(4))

    async def serve(self) -> None:
        """Serve."""
        assert self.begin.wait(30)
        await asyncio.to_thread(self.stand.wait, 60)
        assert self.go_on.wait(30)
        await asyncio.to_thread(self.end.wait, 60)


def test_it_ages_while_the_loop_stands_still_and_is_young_while_it_turns() -> None:
    service = Service()
    thread = threading.Thread(target=lambda: run_service(service.serve()))
    thread.start()
    try:
        wait_for(lambda: silent_s() > 1.5 * BEAT_S, "what hangs at the start to be seen", 30)
        service.begin.set()
        for _ in range(2):
            wait_for_a_beat()
        service.stand.set()
        wait_for(lambda: silent_s() > 1.5 * BEAT_S, "a loop that stands still to be seen", 30)
        service.go_on.set()
        wait_for_a_beat()
    finally:
        for event in (service.begin, service.stand, service.go_on, service.end):
            event.set()
        thread.join(30)
