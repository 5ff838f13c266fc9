"""`penstock top`: channels × workers × blocks, live in the terminal."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from penstock.address import DEFAULT_QUEUE_ADDRESS, DEFAULT_SCHEDULER_ADDRESS
from penstock.cli.calls import QueueOption, SchedulerOption, call
from penstock.cli.frame import frame
from penstock.cli.keyboard import key_pressed
from penstock.cli.status import PLAIN_WIDTH, need_both, refuse_silence
from penstock.client import Client
from penstock.live.history import History
from penstock.live.rates import Rates
from penstock.live.reader import take
from penstock.live.reading import Reading
from penstock.live.view import View, view_of
from penstock.telling import escape_unknown

LEAST_INTERVAL_S = 0.1
"""Between frames: nobody reads faster, and a scheduler's answer costs it time per reservation."""

FIRST_FRAME_S = 1.0
"""Longest time between the two readings of the first rates, whatever the interval."""


class Watcher:
    """Readings, and what they say together."""

    def __init__(self, client: Client) -> None:
        """Read through `client`."""
        self._client = client
        self._rates = Rates()
        self.history = History(step_s=1.0)
        self.reading = Reading(0.0, None, None, ())

    async def look(self) -> View:
        """Take a reading and return its frame."""
        self.reading = await take(self._client)
        view = view_of(self.reading, self._rates.take(self.reading))
        self.history.add(self.reading.at_s, {worker.name: worker.kv_usage for worker in view.workers})
        return view


def top(
    interval_s: Annotated[float, typer.Option(min=LEAST_INTERVAL_S, max=3600, help="Seconds between frames.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, with the rates of one interval, and exit.")
    ] = False,
    queue: QueueOption = DEFAULT_QUEUE_ADDRESS,
    scheduler: SchedulerOption = DEFAULT_SCHEDULER_ADDRESS,
) -> None:
    """Watch channels, workers, blocks and rates; q or Ctrl-C ends it."""
    escape_unknown(sys.stdout, "replace")  # by what takes one column, as it does
    console = Console()
    if not console.is_terminal:
        console = Console(width=None if os.environ.get("COLUMNS") else PLAIN_WIDTH)
    if once or not console.is_terminal:
        call(_print_once(console, queue, scheduler, min(interval_s, FIRST_FRAME_S)))
    else:
        call(_live(console, queue, scheduler, interval_s))


async def _print_once(console: Console, queue: str, scheduler: str, interval_s: float) -> None:
    async with Client(queue, scheduler, retry_for_s=0) as client:
        watcher = Watcher(client)
        await watcher.look()
        await asyncio.sleep(interval_s)
        view = await watcher.look()
    refuse_silence(watcher.reading)
    console.print(frame(view, watcher.history.series(watcher.reading.at_s, []), console.width))
    need_both(watcher.reading)


async def _live(console: Console, queue: str, scheduler: str, interval_s: float) -> None:
    async with Client(queue, scheduler, retry_for_s=0) as client:
        watcher = Watcher(client)
        with Live(console=console, auto_refresh=False, screen=True) as screen, key_pressed("qQ") as ended:
            shown = 0
            while not ended.is_set():
                view = await watcher.look()
                history = watcher.history.series(watcher.reading.at_s, [worker.name for worker in view.workers])
                screen.update(frame(view, history, console.width), refresh=True)
                shown += 1
                # The second frame, the first one with rates, comes soon.
                pause_s = min(interval_s, FIRST_FRAME_S) if shown == 1 else interval_s
                await _either(ended, pause_s)


async def _either(ended: asyncio.Event, pause_s: float) -> None:
    """Return after `pause_s` seconds, or at once when `ended` is set."""
    try:
        async with asyncio.timeout(pause_s):
            await ended.wait()
    except TimeoutError:
        return
