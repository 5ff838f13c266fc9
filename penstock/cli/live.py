"""Drawing on the whole terminal, again and again, and at once when its size has changed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from rich.console import Console, RenderableType
from rich.live import Live

Picture: TypeAlias = Callable[[int, int], RenderableType]
"""Draws something for so many columns and lines."""


async def show(
    console: Console, look: Callable[[], Awaitable[Picture]], pauses_s: Iterable[float], ended: asyncio.Event
) -> None:
    """Draw what `look` returns, look again after each pause, and end when told to, or after the last pause."""
    with Live(console=console, auto_refresh=False, screen=True) as screen, _size_changes() as changed:
        for pause_s in pauses_s:
            picture = await look()
            until_s = asyncio.get_running_loop().time() + pause_s
            changed.set()
            while changed.is_set() and not ended.is_set():
                changed.clear()
                screen.update(picture(*console.size), refresh=True)
                await _any_of(changed, ended, until_s=until_s)
            if ended.is_set():
                return


async def _any_of(*events: asyncio.Event, until_s: float) -> None:
    """Return when one of the events is set, or at `until_s` by the loop's clock."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(
            waits, timeout=until_s - asyncio.get_running_loop().time(), return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        for wait in waits:
            wait.cancel()


@contextmanager
def _size_changes() -> Iterator[asyncio.Event]:
    """Yield an event that is set when the terminal gets another size."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, event.set)
    try:
        yield event
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
