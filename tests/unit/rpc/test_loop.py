"""The loop of a service: how it shares the machine with what runs beside it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest

from services.rpc.loop import run_service


async def classes() -> tuple[int, int]:
    """Return the scheduling class of the loop's thread and of one that it starts."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return os.sched_getscheduler(0), found[0]


@pytest.fixture(autouse=True)
def garbage() -> Iterator[None]:
    """Collect garbage afterwards as before, and none here: the last of gRPC's that other tests left waits for its loop.

    A service starts with none of it.
    """
    thresholds = gc.get_threshold()
    with patch.object(gc, "collect"):
        yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    """A thread of the usual class: the one that runs the tests may be in another by now, and keeps what it has."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(os.sched_setscheduler, 0, os.SCHED_OTHER, os.sched_param(0)).result(60)
        yield executor


def test_a_service_and_the_threads_it_starts_interrupt_nobody(thread: ThreadPoolExecutor) -> None:
    assert thread.submit(lambda: run_service(classes())).result(60) == (os.SCHED_BATCH, os.SCHED_BATCH)


def test_a_sandbox_that_forbids_it_keeps_no_service_from_running(thread: ThreadPoolExecutor) -> None:
    with patch.object(os, "sched_setscheduler", side_effect=PermissionError):
        assert thread.submit(lambda: run_service(classes())).result(60) == (os.SCHED_OTHER, os.SCHED_OTHER)


def test_a_class_that_somebody_chose_is_kept(thread: ThreadPoolExecutor) -> None:
    thread.submit(os.sched_setscheduler, 0, os.SCHED_IDLE, os.sched_param(0)).result(60)
    assert thread.submit(lambda: run_service(classes())).result(60) == (os.SCHED_IDLE, os.SCHED_IDLE)
