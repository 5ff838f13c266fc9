"""Runs a command's work so that Ctrl-C ends it cleanly."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Interrupted(Exception):  # noqa: N818 - it is no error
    """Ctrl-C or SIGTERM ended the work; everything it held is closed."""


def run_interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end and return what it returns. Raises Interrupted if a signal ended it.

    The first SIGINT or SIGTERM cancels the work, which then has all the time it
    needs to close what it holds; a later one cancels that too, for a work that
    has a faster way to end.
    """
    return asyncio.run(_run(work))


async def _run(work: Coroutine[Any, Any, T]) -> T:
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    try:
        return await task
    except asyncio.CancelledError:
        if interrupted:
            raise Interrupted from None
        raise
