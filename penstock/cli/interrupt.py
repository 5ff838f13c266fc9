"""Runs a command's work so that Ctrl-C ends it cleanly."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Sequence
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
    (nohup) goes on ignoring it. Afterwards they do what they did before.
    """
    early: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in before.items():
            if handler != signal.SIG_IGN:
                # An exception would leave half an event loop, which complains.
                signal.signal(number, lambda number, _frame: early.append(number))
        return asyncio.run(_run(work, early))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _run(work: Coroutine[Any, Any, T], early: Sequence[int]) -> T:
    """Do the work, of which an interrupt may have come `early`."""
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
    if early:
        interrupt()
    try:
        return await task
    except asyncio.CancelledError:
        if interrupted:
            raise Interrupted from None
        raise
