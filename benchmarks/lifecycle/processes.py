"""Child processes of the benchmark: started, asked, charged with the CPU time they used, and stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped,unused-ignore]

ROOT = Path(__file__).resolve().parents[2]

READY = re.compile(r"^ready: \S+ on (\S+)")

START_S = 60.0
"""Longest a process may take until it is ready: Python imports on a busy machine."""

STOP_S = 20.0
"""Longest a process may take to end after SIGTERM."""


DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")
"""What to run a command under that the kernel is to kill when the thread that started it ends. Whoever asks for that
between fork and exec needs a fork that runs gRPC's handlers, and where gRPC is busy they abort one child in a hundred
(grpc issue 43055)."""


class Child:
    """One process, and those it forked. `ask` speaks the protocol of `benchmarks.lifecycle.role`."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
        """Start `command`; its standard error goes to `log`."""
        self.name = name
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [*DIES_WITH_US, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **(environment or {})},
            )
        self._stats = psutil.Process(self.process.pid)

    def ready_on(self) -> str:
        """Return the address in the ready line of a service."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = READY.match(line)
            if found:
                return found[1]
        raise SystemExit(f"{self.name} ended before it was ready")

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send one command and return its answer."""
        self.tell(**command)
        return self.answer()

    def tell(self, **command: Any) -> None:
        """Send one command; `answer` returns what it says."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return the next answer."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit(f"{self.name} ended early")

    def still_runs(self) -> None:
        """Raise SystemExit if the process has ended."""
        if self.process.poll() is not None:
            raise SystemExit(f"{self.name} ended early")

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds used so far, by process: this one, and its children under `NAME-child`."""
        used = {self.name: _cpu_s(self._stats)}
        children = self._stats.children(recursive=True)
        if children:
            used[f"{self.name}-child"] = sum(_cpu_s(child) for child in children)
        return used

    def memory_bytes(self) -> int:
        """Return the resident memory."""
        return int(self._stats.memory_info().rss)

    def kill(self) -> None:
        """kill -9, and reap."""
        self.process.kill()
        self.process.wait()
        self._close_pipes()

    def stop(self) -> None:
        """Ask the process to end, and end it if it does not."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._close_pipes()

    def _close_pipes(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def python(module: str, *arguments: str) -> list[str]:
    """Return the command line of a module."""
    return [sys.executable, "-m", module, *arguments]


def compiled_modules() -> dict[str, str]:
    """Return the environment in which Python takes Penstock from build/compiled, and the rest from this tree.

    Raises SystemExit if that was not made.
    """
    compiled = ROOT / "build" / "compiled"
    if not compiled.is_dir():
        raise SystemExit("nothing is compiled: `make compiled` does that")
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": f"{compiled}:{ROOT}"}


def role(
    name: str,
    module: str,
    log: Path,
    *arguments: str,
    environment: dict[str, str] | None = None,
    under: Sequence[str] = (),
) -> Child:
    """Start a process of the benchmark itself, `under` a program if one is given; wait until it takes commands."""
    child = Child(name, [*under, *python(f"benchmarks.lifecycle.{module}", *arguments)], log, environment)
    child.answer()
    return child


def client_role(
    name: str, log: Path, queue: str, scheduler: str, environment: dict[str, str], under: Sequence[str] = ()
) -> Child:
    """Start a client with gRPC as a user's process has it: this one, where `services` is imported, chose its I/O."""
    environment = {**environment, "GRPC_EXPERIMENTS": ""}
    return role(name, "penstock_client", log, queue, scheduler, environment=environment, under=under)


def cpu_s(children: Sequence[Child]) -> dict[str, float]:
    """Return the CPU seconds used so far by each process."""
    used: dict[str, float] = {}
    for child in children:
        used.update(child.cpu_s())
    return used


def loopback_bytes() -> int:
    """Return the bytes the loopback interface has carried, headers included."""
    return int(psutil.net_io_counters(pernic=True)["lo"].bytes_sent)


def free_port() -> int:
    """Return a port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(what: str, there: Callable[[], bool], most_s: float = START_S) -> None:
    """Return once `there` is true; raises SystemExit naming `what` if that takes too long."""
    until_s = time.monotonic() + most_s
    while not there():
        if time.monotonic() > until_s:
            raise SystemExit(f"{what}: not there after {most_s:.0f} s")
        time.sleep(0.02)


def listening(port: int) -> bool:
    """Return whether something accepts connections on the port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
