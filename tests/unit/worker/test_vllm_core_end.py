"""How the end of vLLM's engine core is told, without an engine."""

from __future__ import annotations

import multiprocessing
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from services.worker.vllm.core_end import how_core_ended, how_killed_at_start


def resources(*statuses: int | None, dead: bool = True) -> Any:
    processes = [SimpleNamespace(exitcode=status, join=lambda _: None) for status in statuses]
    return SimpleNamespace(engine_manager=SimpleNamespace(processes=processes), engine_dead=dead)


def engine(*statuses: int | None, dead: bool = True) -> Any:
    return SimpleNamespace(engine_core=SimpleNamespace(resources=resources(*statuses, dead=dead)))


@pytest.mark.parametrize(
    ("llm", "told"),
    [
        (engine(-9), "the engine core ended (signal 9)"),
        (engine(1), "the engine core ended (exit status 1): its own lines are in the worker's log"),
        (engine(0), "the engine core ended (exit status 0): its own lines are in the worker's log"),
        (engine(None), "the engine core has failed: its own lines are in the worker's log"),
        (engine(None, -11), "the engine core ended (signal 11)"),
        (engine(None, dead=False), "the output loop of the engine's front-end has ended: why is in the worker's log"),
        (object(), "the engine core has failed: its own lines are in the worker's log"),
    ],
)
def test_the_end_of_an_engine_core_is_told_by_its_status(llm: Any, told: str) -> None:
    assert how_core_ended(llm) == told


def failed_start(launch: Any) -> RuntimeError:
    """Fail as vLLM does, whose frame has the processes that it waits for."""
    try:
        raise RuntimeError(f"Failed core proc(s): {{}} {launch is None}")
    except RuntimeError as error:
        return error


def test_a_core_that_was_killed_at_its_start_is_told_so_before_the_kernel_says_its_status() -> None:
    process = multiprocessing.get_context("fork").Process(target=signal.pause)
    process.start()
    assert process.pid
    os.kill(process.pid, signal.SIGKILL)
    launch = SimpleNamespace(engine_manager=SimpleNamespace(processes=[process]))
    assert how_killed_at_start(failed_start(launch)) == "the engine core ended (signal 9)"


@pytest.mark.parametrize("launch", [None, object(), resources(1), resources(None), resources()])
def test_a_start_that_failed_otherwise_is_told_in_vllms_words(launch: Any) -> None:
    assert how_killed_at_start(failed_start(launch)) == ""
