"""The life of a service, the same for each: its metrics and traces, its event loop, what it runs until it is stopped.

`__main__.py` reads the settings and calls `live`; `service.py` has a `Service`, which puts the parts together in its
`__init__`, and whose `run` says when it is ready, serves until it is told to stop, and ends within the grace.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TextIO

from penstock.exits import EX_SOFTWARE
from penstock.telling import tell
from services.config import ServiceSettings
from services.rpc.loop import run_service
from services.rpc.server import stop_on_signals
from services.rpc.tls import security_of
from services.telemetry import Telemetry, start_metrics, start_telemetry

log = logging.getLogger(__name__)


def live(
    name: str,
    settings: ServiceSettings,
    serve: Callable[[asyncio.Event, Telemetry], Coroutine[Any, Any, int]],
    instance: str = "",
) -> int:
    """Run a service to its end; return its exit status. `serve` is given what SIGTERM sets, and returns the status.

    What it raises is logged and makes status 70; SystemExit, which has said why, is raised.
    """
    start_metrics(settings.metrics_listen, security_of(settings).context())
    telemetry = start_telemetry(name, instance)

    async def life() -> int:
        return await serve(stop_on_signals(), telemetry)

    try:
        return run_service(life())
    except Exception:
        log.critical("the %s has failed", name, exc_info=True)
        return EX_SOFTWARE
    finally:
        telemetry.close()


def say_ready(name: str, listen: str, port: int, stream: TextIO | None = None) -> None:
    """Say, on standard output if no stream is given, that the service answers at its port, which may be drawn."""
    tell(f"ready: {name} on {listen.rpartition(':')[0] or '0.0.0.0'}:{port}", stream or sys.stdout)


class EndedError(Exception):
    """A part of a service has ended that was to run until the service is stopped."""


class Loops:
    """What of a service runs beside its server until that is stopped, by name. One that ends before has failed."""

    def __init__(self, **loops: Coroutine[Any, Any, None]) -> None:
        """Start them."""
        self._tasks = [asyncio.create_task(loop, name=name) for name, loop in loops.items()]
        self._failed: asyncio.Task[None] | None = None

    async def until(self, stop: asyncio.Event) -> None:
        """Return when `stop` is set, or one of them has ended."""
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({*self._tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        self._failed = next((task for task in self._tasks if task.done()), None)

    async def end(self, *finishing: str, within_s: float | None = None) -> None:
        """Return when all have ended, or `within_s` has passed; those are cancelled that are not named as finishing.

        Raises what ended the first that ended too early, EndedError if nothing did; else what one could not end with.
        """
        for task in self._tasks:
            if task.get_name() not in finishing:
                task.cancel()
        done, _ = await asyncio.wait(self._tasks, timeout=within_s)
        for ended in filter(None, (self._failed, *(task for task in self._tasks if task in done))):
            if not ended.cancelled() and (error := ended.exception()) is not None:
                raise error
        if self._failed is not None:
            raise EndedError(f"{self._failed.get_name()} has ended")
