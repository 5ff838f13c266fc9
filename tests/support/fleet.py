"""Real service processes for integration tests: start, kill, restart, and a clean end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock import SyncClient
from penstock.fleet import young_for_s
from tests.support.modules import python_path
from tests.support.ports import free_port
from tests.support.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]

START_TIMEOUT_S = 120.0
"""A cold vLLM start with every package uncompiled takes well under this on two busy cores."""


@dataclass
class Service:
    """One service process with its log file."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log_path: Path
    address: str
    metrics_address: str
    process: subprocess.Popen[bytes] | None = None
    lives: int = 0

    def start(self, wait: bool = True) -> None:
        """Start the process; with `wait`, return once it has printed its ready line."""
        self.lives += 1
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, env=dict(self.environment), stdout=log, stderr=log, start_new_session=True
            )
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Wait for the ready line of this life; raises AssertionError with the log if the process ends first."""
        wait_for(self._ready_or_dead, f"{self.name} to be ready", START_TIMEOUT_S)
        assert self.running, f"{self.name} ended before it was ready:\n{self.log()}"

    def _ready_or_dead(self) -> bool:
        return self.log().count(f"ready: {self.name.split('-')[0]} on ") >= self.lives or not self.running

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of this life."""
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        """kill -9, and reap."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM; return the exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def wait_exit(self, timeout_s: float = 60.0) -> int:
        """Wait for the process to end by itself; return the exit status."""
        assert self.process is not None
        return self.process.wait(timeout_s)

    def log(self) -> str:
        """Return everything the service printed in all its lives."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""


@dataclass
class Fleet:
    """One queue, one scheduler and any number of workers on free ports below `directory`."""

    directory: Path
    environment: dict[str, str] = field(default_factory=dict)
    queue_flags: Sequence[str] = ()
    scheduler_flags: Sequence[str] = ()
    services: dict[str, Service] = field(default_factory=dict)

    def add(self, name: str, flags: Sequence[str], environment: Mapping[str, str] | None = None) -> Service:
        """Describe a service called `name` ("queue", "scheduler", "worker-…") without starting it."""
        module = name.split("-", maxsplit=1)[0]
        address = f"127.0.0.1:{free_port()}"
        metrics_address = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", f"services.{module}", "--listen", address]
        command += ["--metrics-listen", metrics_address, *flags]
        merged = {**os.environ, "PYTHONPATH": python_path(), **self.environment, **(environment or {})}
        service = Service(name, command, merged, self.directory / "logs" / f"{name}.log", address, metrics_address)
        self.services[name] = service
        return service

    def start_core(self) -> None:
        """Start queue and scheduler."""
        queue_flags = ["--data-dir", str(self.directory / "queue"), *self.queue_flags]
        self.add("queue", queue_flags).start()
        self.add("scheduler", ["--queue-address", self.queue.address, *self.scheduler_flags]).start()

    def add_worker(self, name: str, flags: Sequence[str], wait: bool = True) -> Service:
        """Start a worker of this fleet with the given engine flags."""
        addresses = ["--queue-address", self.queue.address, "--scheduler-address", self.scheduler.address]
        worker = self.add(f"worker-{name}", ["--worker-id", name, *addresses, *flags])
        worker.start(wait)
        return worker

    def add_gateway(self, *flags: str, name: str = "gateway") -> Service:
        """Start a gateway of this fleet."""
        addresses = ["--queue-address", self.queue.address, "--scheduler-address", self.scheduler.address]
        gateway = self.add(name, [*addresses, *flags])
        gateway.start()
        return gateway

    def wait_settled(self) -> None:
        """Return once the scheduler has been up for so long that what it does not know is not there."""
        with SyncClient(self.queue.address, self.scheduler.address) as client:
            wait_for(lambda: not young_for_s(client.fleet(names_only=True)), "the scheduler to be old enough")

    @property
    def queue(self) -> Service:
        """The queue service."""
        return self.services["queue"]

    @property
    def scheduler(self) -> Service:
        """The scheduler service."""
        return self.services["scheduler"]

    def close(self) -> None:
        """End every process that still runs, workers first; what ignores SIGTERM is killed."""
        for service in reversed(list(self.services.values())):
            if service.running:
                try:
                    service.stop()
                except subprocess.TimeoutExpired:
                    service.kill()

    def logs(self) -> str:
        """Return the last lines of every log, for a failing test's report."""
        return "\n".join(f"--- {name}\n{service.log()[-3000:]}" for name, service in self.services.items())


def penstock(
    *arguments: str, environment: Mapping[str, str] | None = None, timeout_s: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """Run the `penstock` command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "penstock", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path(), **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_jsonl(path: Path, lines: Sequence[object]) -> Path:
    """Write objects as a JSONL file and return its path."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def descendants(pid: int) -> set[int]:
    """Return the process ids of all living descendants of `pid`."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found.add(child)
            waiting.append(child)
    return found


def alive(pid: int) -> bool:
    """Whether a process with this id exists and is not a zombie."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
