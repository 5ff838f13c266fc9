"""Starts services as child processes, restarts what crashes, stops everything in order."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from penstock.cli.errors import CommandError, one_line
from penstock.cli.ready_pipe import ReadyPipe
from penstock.cli.service_log import ServiceLog
from penstock.exits import EX_CANNOT_WRITE, EX_SOFTWARE, EX_UNAVAILABLE

SHUTDOWN_S = 25.0
"""Longest a service may take to drain: its own grace period is 8 s, if nobody has set a longer one."""

FIRST_PAUSE_S = 0.5
MOST_PAUSE_S = 15.0
"""Pauses before a crashed service is started again double between these."""

MOST_FAILED_STARTS = 5
"""Where services are given up: one that ends this often without having become ready is."""

HOPELESS = (78,)
"""Exit statuses that another start cannot cure, unless somebody does something meanwhile: wrong settings."""

REASON_CHARACTERS = 300
"""Shown of the last line that a service has logged: more than an error of settings or ports takes."""

BEHIND_ENGINES = 5
"""Niceness of a service that shares the machine with engines: where they compete for a core, the engine gets three
quarters of it (nice 0 weighs 1,024, nice 5 weighs 335; sched(7)). Its steps are what everybody waits for."""

PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


def begin_child(niceness: int) -> None:
    """Make the kernel kill this process when its parent ends, however the parent ends; runs in the child.

    Its niceness is a preference: a sandbox may forbid it.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if niceness:
        with suppress(OSError):
            os.nice(niceness)
            # Whoever wakes up in this class does not interrupt what runs (sched(7)).
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@dataclass
class ServiceProcess:
    """One service: how to start it, and where it listens once it is ready."""

    name: str
    module: str
    listen: str
    flags: Sequence[str]
    log: ServiceLog
    niceness: int = 0
    process: asyncio.subprocess.Process | None = None
    keeper: asyncio.Task[None] | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set for good when it has been ready once."""
    was_ready: bool = False
    """Whether its present life has been."""

    @property
    def command(self) -> list[str]:
        """Command line of the service."""
        return [sys.executable, "-m", self.module, "--listen", self.listen, *self.flags]

    def is_ready_on(self, address: str) -> None:
        """Note that it is ready, and that it listens on HOST:PORT in all its lives."""
        self.listen, self.was_ready = address, True
        self.ready.set()


class Supervisor:
    """A set of services. Start them in the order in which they need each other; they stop in reverse.

    One that has never been ready has failed when its first life ends: it was started wrongly. One that has been is
    started again, by the rule of `gives_up`.
    """

    def __init__(
        self, log_directory: Path, say: Callable[[str], None], if_unavailable: str = "", gives_up: bool = True
    ) -> None:
        """Write each service's log to `log_directory`; `say` gets one line per event a person should see.

        `if_unavailable` is what to do when a service cannot have its port or its data directory. With `gives_up` one
        that another start does not help has failed, and who waits for what it does is told; without it is started again
        for ever, because the others have work, and somebody may mend the file or free the port.
        """
        self._log_directory = log_directory
        self._say = say
        self._if_unavailable = if_unavailable
        self._gives_up = gives_up
        self._services: list[ServiceProcess] = []
        self._stopping = False
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def add(self, name: str, module: str, listen: str, flags: Sequence[str], niceness: int = 0) -> ServiceProcess:
        """Start a service and keep it running; it listens on `listen`, port 0 picking a free one for all its lives.

        Raises CommandError if there can be no directory for its log.
        """
        try:
            self._log_directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandError(f"cannot write {self._log_directory}: {error.strerror}", EX_CANNOT_WRITE) from None
        service = ServiceProcess(name, module, listen, flags, ServiceLog(self._log_directory / f"{name}.log"), niceness)
        service.keeper = asyncio.create_task(self._keep(service))
        self._services.append(service)
        return service

    async def ready(self, service: ServiceProcess) -> str:
        """Return the service's HOST:PORT once it is ready. Raises CommandError if it cannot be started."""
        waiting = asyncio.create_task(service.ready.wait())
        either: set[asyncio.Future[Any]] = {waiting, self._failure}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._failure.done():
            self._failure.result()
        return service.listen

    async def failed(self) -> None:
        """Wait until a service has failed for good; raises CommandError with the reason."""
        await asyncio.shield(self._failure)

    @property
    def longest_stop_s(self) -> float:
        """Longest that `stop` may take, in seconds."""
        return SHUTDOWN_S * len(self._stages())

    async def stop(self) -> None:
        """Stop the services, last started first; what does not drain in time is killed.

        A cancellation while services drain kills what still runs; the stop is then complete, and nothing is raised.
        """
        self._stopping = True
        killed: set[asyncio.subprocess.Process | None] = set()
        try:
            for stage in self._stages():
                await asyncio.gather(*(self._drain(service) for service in stage))
        except asyncio.CancelledError:
            for service in self._services:
                _signal(service.process, signal.SIGKILL)
                killed.add(service.process)
            self._say("killed what still ran")
        keepers = [service.keeper for service in self._services if service.keeper is not None]
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        for service in self._services:
            # Also what was being started while the stop began, which nobody has told to end. Not twice: a signal to a
            # process that has ended reaps it, and whoever waits for it is told of no status.
            if service.process not in killed:
                _signal(service.process, signal.SIGKILL)
            if service.process is not None:
                await service.process.wait()
        if not self._failure.cancel() and not self._failure.cancelled():
            self._failure.exception()  # of a service that failed when nobody asked any more: it is no news

    def _stages(self) -> list[list[ServiceProcess]]:
        """Return the services in the order in which they stop; those of one kind stop together."""
        return [list(stage) for _, stage in groupby(reversed(self._services), key=lambda service: service.module)]

    async def _drain(self, service: ServiceProcess) -> None:
        process = service.process
        if process is None or process.returncode is not None:
            return
        _signal(process, signal.SIGTERM)
        try:
            async with asyncio.timeout(SHUTDOWN_S):
                await process.wait()
        except TimeoutError:
            self._say(f"{service.name} did not stop in {SHUTDOWN_S:.0f} s and was killed")
            _signal(process, signal.SIGKILL)
            await process.wait()

    async def _keep(self, service: ServiceProcess) -> None:
        """Keep the service running; whatever ends that is a failure of the service, for nobody waits for this task."""
        try:
            failure = await self._live_again_and_again(service)
        except Exception as error:
            failure = CommandError(f"{service.name} is no longer supervised: {_reason(error)}", EX_SOFTWARE)
        if failure is not None and not self._stopping and not self._failure.done():
            self._failure.set_exception(failure)

    async def _live_again_and_again(self, service: ServiceProcess) -> CommandError | None:
        """Run the service until it is beyond help, and return why; None if everything is being stopped."""
        pause_s, failed_starts = FIRST_PAUSE_S, 0
        while True:
            end = await self._one_life(service)
            if self._stopping:
                return None
            failed_starts = 0 if end.was_ready else failed_starts + 1
            beyond_help = end.status in HOPELESS or failed_starts >= MOST_FAILED_STARTS
            if not service.ready.is_set() or (beyond_help and self._gives_up):
                return self._failure_of(service, end)
            if end.was_ready:
                pause_s = FIRST_PAUSE_S
            self._say(f"{service.name} {end.how}{_why(service, end)}; starting it again in {pause_s:.1f} s")
            await asyncio.sleep(pause_s)
            if self._stopping:
                return None
            pause_s = min(pause_s * 2, MOST_PAUSE_S)

    async def _one_life(self, service: ServiceProcess) -> _End:
        """Run the service to its end."""
        service.was_ready = False
        with ExitStack() as resources:
            try:
                pipe = resources.enter_context(ReadyPipe(service.is_ready_on))
                process = service.process = await _start(service, pipe.theirs)
            except (OSError, subprocess.SubprocessError) as error:
                return _End(f"could not be started: {_reason(error)}")
            pipe.theirs.close()
            status = await process.wait()
            pipe.read()
        return _End(f"ended with status {status}", service.was_ready, status)

    def _failure_of(self, service: ServiceProcess, end: _End) -> CommandError:
        message = f"{service.name} {end.how}"
        if end.status is None:
            return CommandError(message, EX_SOFTWARE)
        message += f"; {service.log.path} ends with:\n{service.log.tail()}"
        if end.status == EX_UNAVAILABLE and self._if_unavailable:
            message += f"\n{self._if_unavailable}"
        return CommandError(message, end.status if end.status > 0 else EX_SOFTWARE)


@dataclass(frozen=True, slots=True)
class _End:
    """How one life of a service ended."""

    how: str
    """What became of the service, to follow its name."""
    was_ready: bool = False
    status: int | None = None
    """Exit status; None if there was no process."""


async def _start(service: ServiceProcess, stdout: BinaryIO) -> asyncio.subprocess.Process:
    """Start the service's process, its stderr appended to its log. Raises OSError or SubprocessError."""
    with service.log.open() as log:
        return await asyncio.create_subprocess_exec(
            *service.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stdout,
            stderr=log,
            # Ctrl-C in the terminal is for this command alone: it stops the services in order.
            start_new_session=True,
            preexec_fn=partial(begin_child, service.niceness),
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )


def _why(service: ServiceProcess, end: _End) -> str:
    """Return what the log says last of a start that failed; of one that was ready, or was killed, that is no reason."""
    if end.was_ready or end.status is None or end.status < 0:
        return ""
    with suppress(OSError):
        for line in reversed(service.log.tail().splitlines()):
            if said := one_line(line):
                return f": {said[:REASON_CHARACTERS]}"
    return ""


def _reason(error: Exception) -> str:
    """Return what went wrong, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, subprocess.SubprocessError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _signal(process: asyncio.subprocess.Process | None, number: signal.Signals) -> None:
    if process is None or process.returncode is not None:
        return
    try:
        process.send_signal(number)
    except ProcessLookupError:
        return
