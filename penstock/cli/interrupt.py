"""Runs a command's work so that Ctrl-C ends it cleanly."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Interrupted(Exception):  # noqa: N818 - it is no error
    """Ctrl-C, SIGTERM or the end of the terminal ended the work; everything it held is closed."""


def run_interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end and return what it returns. Raises Interrupted if a signal ended it.

    The first SIGINT or SIGTERM cancels the work, which then has all the time it
    needs to close what it holds; a later one cancels that too, for a work that
    has a faster way to end. SIGHUP does the first and never the second: when a
    terminal is closed, shell and kernel may both send it. Who ignores it
    (nohup) goes on ignoring it.
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

    def hang_up() -> None:
        if not interrupted:
            interrupt()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, hang_up)
    try:
        return await task
    except asyncio.CancelledError:
        if interrupted:
            raise Interrupted from None
        raise
