"""Settings that change while a service runs: the configuration file is read again when it changes, or at SIGHUP.

What can be taken up is handed to the service; what cannot is named, and waits for the next start. A file that is no
good changes nothing: the service goes on with what it has, says what is wrong, and counts it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from penstock.config_file import is_read_once
from services.born import begin
from services.config import ChannelledSettings
from services.config_reading import SettingsRefusedError, read_settings

LOOK_S = 1.0
"""Between looks at the file. One that changed is read when it has stood still from one look to the next, so that an
editor that writes in pieces, or another process that copies, is not read half-way."""

APPLIED, UNCHANGED, REFUSED = "applied", "unchanged", "refused"
OUTCOMES = (APPLIED, UNCHANGED, REFUSED)

TAKEN_UP = ("channels", "default_channel")
"""Settings that take effect at once, where a service has them."""

S = TypeVar("S", bound=ChannelledSettings)
Stamp: TypeAlias = tuple[int, int, int] | None

log = logging.getLogger("config")


class Reloader(Generic[S]):
    """Reads the settings of one service again. Make it inside the event loop; it owns SIGHUP while it runs."""

    def __init__(
        self,
        settings: S,
        service: str,
        apply: Callable[[S], None],
        arguments: list[str] | None = None,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """Call `apply` with the new settings when those that can be taken up have changed.

        `settings` are the running ones of `service`, read with the `arguments` of its command line.
        """
        self._settings = settings
        self._apply = apply
        self._arguments = sys.argv[1:] if arguments is None else arguments
        self._asked = asyncio.Event()
        self._read_stamp: Stamp = None  # what was read at the start may not be what the file says by now
        self._seen: Stamp = None
        self._refused: list[str] = []
        self._outcomes = Counter(
            f"penstock_{service}_config_reloads",
            "Times the configuration was read again, by what came of it.",
            ["outcome"],
            registry=registry,
        )
        begin(self._outcomes, OUTCOMES)
        Gauge(
            f"penstock_{service}_config_refused",
            "1 while the configuration, as it was last read, is no good, and the former one stays in force; else 0.",
            registry=registry,
        ).set_function(lambda: bool(self._refused))

    async def run(self) -> None:
        """Look at the file until cancelled; SIGHUP has it read at once."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._asked.set)
        if is_read_once(self._settings.config):
            log.info("%s is no regular file: it was read once, and is not followed", self._settings.config)
        try:
            while True:
                if await self._is_time():
                    await self.reload(unasked=not self._asked.is_set())
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    async def reload(self, unasked: bool = False) -> str:
        """Read everything again and take up what has changed; return one of OUTCOMES."""
        self._asked.clear()
        if is_read_once(self._settings.config):
            log.warning("SIGHUP is without effect: %s is no regular file, and was read once", self._settings.config)
            return self._counted(UNCHANGED)
        first, self._read_stamp = self._read_stamp is None, self._stamp()
        kind = type(self._settings)
        try:
            settings = (await asyncio.to_thread(read_settings, kind, self._arguments)).settings
        except SettingsRefusedError as error:
            return self._refuse(error)
        self._refused = []
        if unasked and first and settings == self._settings:
            return UNCHANGED  # every start comes here
        return self._counted(self._take(settings))

    def _refuse(self, error: SettingsRefusedError) -> str:
        """Say what is wrong, once; a file that could not be read is read again at the next look."""
        if error.unread:
            self._read_stamp = None
            if error.lines == self._refused:
                return REFUSED
        self._refused = error.lines
        for line in error.lines:
            log.error("the configuration is no good, and the running one stays: %s", line)
        return self._counted(REFUSED)

    def _counted(self, outcome: str) -> str:
        self._outcomes.labels(outcome).inc()
        return outcome

    def _take(self, settings: S) -> str:
        names = type(settings).model_fields
        changed = [name for name in names if getattr(settings, name) != getattr(self._settings, name)]
        taken_up = {name: getattr(settings, name) for name in changed if name in TAKEN_UP}
        for name in changed:
            if name not in taken_up:
                log.warning("%s has changed in the configuration; it takes effect at the next start", name)
        if not taken_up:
            log.info("the configuration was read again; nothing that can be taken up has changed")
            return UNCHANGED
        self._settings = self._settings.model_copy(update=taken_up)
        self._apply(self._settings)
        log.info("taken up: %s", "; ".join(f"{name}: {value}" for name, value in taken_up.items()))
        return APPLIED

    async def _is_time(self) -> bool:
        """Wait for the next look, or for SIGHUP; return whether the settings are to be read."""
        try:
            async with asyncio.timeout(LOOK_S):
                await self._asked.wait()
        except TimeoutError:
            before, self._seen = self._seen, self._stamp()
            # A file that is gone is being replaced; the next look finds the new one.
            return self._seen is not None and self._seen != self._read_stamp and self._seen == before
        return True

    def _stamp(self) -> Stamp:
        """Return what tells one content of the file from another; None if there is none, or none to follow."""
        try:
            found = os.stat(self._settings.config)
        except OSError:
            return None
        if is_read_once(self._settings.config):
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size
