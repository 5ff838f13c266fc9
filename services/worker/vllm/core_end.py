"""How vLLM's engine core ended: what vLLM raises for that says the same of every death, and is of no use without a log.

vLLM's own objects are looked through for it. Where they are not what they are here, it is told without its status.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

from services.worker.processes import how_ended

OWN_LINES = "its own lines are in the worker's log"
"""Said of what ended by itself. What was killed has written none."""

REAP_S = 1.0
"""For the status of a core that vLLM has given up at its start: seen to be gone, it may be a moment from having one."""


def how_core_ended(llm: Any) -> str:
    """Return how the engine core of an AsyncLLM that has failed ended, in one line."""
    resources = getattr(getattr(llm, "engine_core", None), "resources", None)
    status = _status(_processes(resources))
    if status is not None:
        told = f"the engine core ended ({how_ended(status)})"
        return told if status < 0 else f"{told}: {OWN_LINES}"
    if getattr(resources, "engine_dead", True):
        # It says so before it ends.
        return f"the engine core has failed: {OWN_LINES}"
    return "the output loop of the engine's front-end has ended: why is in the worker's log"


def how_killed_at_start(error: BaseException) -> str:
    """Return by which signal the engine core ended whose start failed with `error`; "" if none is known to.

    vLLM's text has a status only if the kernel was quicker than vLLM, and there is no AsyncLLM to ask.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        processes = _processes(frame.f_locals.get("launch"))
        for process in processes:
            process.join(REAP_S)
        status = _status(processes)
        if status is not None and status < 0:
            return f"the engine core ended ({how_ended(status)})"
    return ""


def _processes(owner: Any) -> Sequence[Any]:
    """Return the processes of engine cores that belong to vLLM's `owner`, which has their manager; one, as a rule."""
    found = getattr(getattr(owner, "engine_manager", None), "processes", ())
    return found if isinstance(found, list) else ()


def _status(processes: Sequence[Any]) -> int | None:
    """Return the exit status of the first that has one, as Python has it: below 0 for a signal."""
    return next((process.exitcode for process in processes if process.exitcode is not None), None)
