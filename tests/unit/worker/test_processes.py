"""Who computes first, where that may be chosen and where not."""

from __future__ import annotations

import os
import threading
from unittest.mock import patch

import pytest

from services.worker.processes import BEHIND_THE_ENGINE, yield_to_engine


@pytest.mark.parametrize("call", ["getpriority", "setpriority", "sched_setscheduler"])
def test_a_sandbox_that_forbids_it_keeps_no_worker_from_running(call: str) -> None:
    with (
        patch.object(os, "setpriority"),
        patch.object(os, "sched_setscheduler"),
        patch.object(os, call, side_effect=OSError),
    ):
        yield_to_engine()


def test_a_thread_that_has_ended_keeps_no_other_from_yielding() -> None:
    gone, here = 4_000_000_000, threading.get_native_id()
    before = os.getpriority(os.PRIO_PROCESS, here)

    def priority(_: int, thread: int) -> int:
        if thread == gone:
            raise ProcessLookupError
        return before

    with (
        patch.object(os, "listdir", return_value=[str(gone), str(here)]),
        patch.object(os, "getpriority", priority),
        patch.object(os, "setpriority") as set_priority,
        patch.object(os, "sched_setscheduler") as set_class,
    ):
        yield_to_engine()
    set_priority.assert_called_once_with(os.PRIO_PROCESS, here, before + BEHIND_THE_ENGINE)
    assert set_class.call_args.args[:2] == (here, os.SCHED_BATCH)
