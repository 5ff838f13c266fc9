"""One process of the stack, over all its lives: started, hit, started again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.lifecycle.processes import DIES_WITH_US
from tests.support.fleet import ROOT, alive, descendants

POLL_S = 0.05

PAUSE_S = 0.5
"""Before a process that ended unasked is started again, as `penstock up` does it."""


class Process:
    """A command that is kept running until it is done, whatever is done to it."""

    def __init__(self, name: str, environment: Mapping[str, str], logs: Path, say: Callable[[str], None]) -> None:
        """Prepare; nothing runs yet. What the process prints goes to a file of its name in `logs`."""
        self.name = name
        self.log_path = logs / f"{name}.log"
        self.unasked: list[int] = []
        """Exit statuses of lives that nobody ended."""
        self.wrong_exits: list[str] = []
        """Lives that were asked to end and did it with another status than they should."""
        self.done = False
        self.lives = 0
        self._environment = environment
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start_bytes = 0
        self._start_at_s = 0.0
        self._hit = False
        self._expected: int | None = None

    # ---- what kinds of process differ in ----

    def command(self) -> Sequence[str]:
        """Return what to run now."""
        raise AssertionError("a kind of process says what it runs")

    def serving(self) -> bool:
        """Whether it does what it is there for."""
        return self.alive

    def at_work(self) -> bool:
        """Whether this life had begun, and not finished, what it is there for: SIGTERM ends Python before and after."""
        return True

    def ended(self, status: int, asked: bool) -> None:
        """Take note of the end of a life."""
        if not asked:
            self.unasked.append(status)
            self._start_at_s = time.monotonic() + PAUSE_S
            self._say(f"{self.name} ended by itself with status {status}")

    # ---- life ----

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the present or last life."""
        assert self._process is not None
        return self._process.pid

    def log_of_this_life(self) -> bytes:
        """Return what this life has printed."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start_bytes)
            return log.read()

    def start(self) -> None:
        """Begin a life. Call it in the main thread: the process dies with the thread that started it."""
        self._hit, self._expected = False, None
        self.lives += 1
        with self.log_path.open("ab") as log:
            self._log_start_bytes = log.tell()
            self._process = subprocess.Popen(
                [*DIES_WITH_US, *self.command()], cwd=ROOT, env=dict(self._environment),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    async def keep(self) -> None:
        """Keep it running until it is done or this is cancelled."""
        while not self.done:
            if self._process is not None and not self.alive:
                self._note_end()
            elif self._process is None and time.monotonic() >= self._start_at_s:
                self.start()
            await asyncio.sleep(POLL_S)

    def _note_end(self) -> None:
        assert self._process is not None
        status = self._process.wait()
        asked, expected = self._hit or self._expected is not None, self._expected
        unheard = status == -signal.SIGTERM and not self.at_work()
        if not self._hit and expected is not None and status not in {0, expected} and not unheard:
            self.wrong_exits.append(f"{self.name}: status {status} after SIGTERM, not {expected}")
        self._process = None
        self.ended(status, asked)

    # ---- what is done to it ----

    def kill(self, away_s: float) -> set[int]:
        """kill -9; the next life begins after `away_s`. Returns the children that must die with it."""
        family = descendants(self.pid) if self.alive else set()
        self._hit = True
        self._start_at_s = time.monotonic() + away_s
        self.signal(signal.SIGKILL)
        return family

    def terminate(self, away_s: float, expected: int) -> None:
        """SIGTERM, after which it must exit with status `expected`."""
        self._expected = expected
        self._start_at_s = time.monotonic() + away_s
        self.signal(signal.SIGTERM)

    def expect_failure(self) -> None:
        """Take the present life's own end as asked for: something it cannot do without is being killed."""
        self._hit = True
        self._start_at_s = time.monotonic() + PAUSE_S

    async def pause(self, seconds: float) -> None:
        """Freeze it and its children for a while."""
        if not self.alive:
            return
        family = [self.pid, *descendants(self.pid)]
        try:
            for pid in family:
                send(pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
        finally:
            for pid in family:
                send(pid, signal.SIGCONT)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it lives."""
        if self.alive:
            send(self.pid, number)

    async def stop(self, timeout_s: float) -> int | None:
        """End it for good: SIGTERM, then kill -9 after a time. Returns the exit status, None if it had none to give."""
        self.done = True
        self.signal(signal.SIGTERM)
        deadline_s = time.monotonic() + timeout_s
        while self.alive and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)
        self.signal(signal.SIGKILL)
        return self._process.wait() if self._process is not None else None


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


async def all_gone(pids: set[int], timeout_s: float) -> set[int]:
    """Wait for processes to be gone; return those that are not after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    left = pids
    while (left := {pid for pid in left if alive(pid)}) and time.monotonic() < deadline_s:
        await asyncio.sleep(POLL_S)
    return left


def name_of(pid: int) -> str:
    """Return the name that a process shows."""
    try:
        return (Path("/proc") / str(pid) / "comm").read_text().strip()
    except OSError:
        return "?"
