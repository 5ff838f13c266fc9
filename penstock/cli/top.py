"""`penstock top`: channels × workers × blocks, live in the terminal."""

from __future__ import annotations

import asyncio
import os
import sys
from itertools import chain, repeat
from typing import Annotated

import typer
from rich.console import Console

from penstock.address import DEFAULT_QUEUE_ADDRESS, DEFAULT_SCHEDULER_ADDRESS
from penstock.cli.calls import QueueOption, SchedulerOption, call
from penstock.cli.frame import frame
from penstock.cli.keyboard import key_pressed
from penstock.cli.live import Picture, show
from penstock.cli.status import PLAIN_WIDTH, need_both, refuse_silence
from penstock.client import Client
from penstock.live.watcher import Watcher
from penstock.telling import escape_unknown

LEAST_INTERVAL_S = 0.1
"""Between frames: nobody reads faster, and a scheduler's answer costs it time per reservation."""

FIRST_FRAME_S = 1.0
"""Longest time between the two readings of the first rates, whatever the interval."""

HISTORY_STEP_S = 1.0
"""Least time between two samples of KV usage."""


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
        watcher = Watcher(client, step_s=HISTORY_STEP_S)
        await watcher.look()
        await asyncio.sleep(interval_s)
        view = await watcher.look()
    refuse_silence(watcher.reading)
    console.print(frame(view, watcher.history.series(watcher.reading.at_s, []), console.width))
    need_both(watcher.reading)


async def _live(console: Console, queue: str, scheduler: str, interval_s: float) -> None:
    async with Client(queue, scheduler, retry_for_s=0) as client:
        watcher = Watcher(client, step_s=HISTORY_STEP_S)

        async def look() -> Picture:
            view = await watcher.look()
            history = watcher.history.series(watcher.reading.at_s, [worker.name for worker in view.workers])
            return lambda width, height: frame(view, history, width, height)

        # The second frame, the first one with rates, comes soon.
        pauses_s = chain([min(interval_s, FIRST_FRAME_S)], repeat(interval_s))
        with key_pressed("qQ") as ended:
            await show(console, look, pauses_s, ended)
