"""The three systems of the benchmark, each as a set of processes that are up and idle."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from benchmarks.lifecycle.processes import (
    Child,
    client_role,
    compiled_modules,
    free_port,
    listening,
    python,
    role,
    wait_for,
)

PENSTOCK, PENSTOCK_COMPILED = "penstock", "penstock-compiled"
"""Names of Penstock's systems: from the sources, and from build/compiled."""

SYSTEMS = (PENSTOCK, PENSTOCK_COMPILED, "redis", "nats")
"""All there are to compare, by name."""

NATS_SYNCED = "sync_interval: always"

Under: TypeAlias = Mapping[str, Sequence[str]]
"""Programs that processes run under, by process: the beginning of its command."""

NOTHING: Under = MappingProxyType({})


def slow_syncs(more_ms: int) -> Sequence[str]:
    """Return what makes every sync of a process take longer, as on another disk; its other calls are not traced."""
    if shutil.which("strace") is None:
        raise SystemExit("strace is not installed (Debian: apt-get install strace)")
    delay = f"inject=fdatasync:delay_enter={more_ms * 1000}"
    # -D: the process itself stays our child.
    return ("strace", "-D", "-f", "--seccomp-bpf", "-qq", "-e", "trace=fdatasync", "-e", delay, "-o", "/dev/null")


@dataclass
class System:
    """One system: its client, and every process whose CPU time counts."""

    name: str
    client: Child
    children: list[Child]
    note: str = ""


@dataclass(frozen=True)
class FleetShape:
    """The workers of a run."""

    workers: int = 1
    requests_at_once: int = 1024
    rate_per_s: float = 0.0
    """What all engines together answer; 0 means at once."""
    service_s: float = 0.0
    """How long each answer takes; 0 means none."""

    def flags(self) -> list[str]:
        """Return the flags of `penstock_workers`."""
        values = {
            "--workers": self.workers,
            "--requests-at-once": self.requests_at_once,
            "--rate-per-s": self.rate_per_s,
            "--service-s": self.service_s,
        }
        return [text for name, value in values.items() for text in (name, str(value))]


@dataclass
class PenstockStack:
    """Queue, scheduler and client; `start_workers` adds the workers."""

    queue: str
    scheduler: str
    system: System
    directory: Path
    environment: dict[str, str]
    """Where processes find their modules; empty means where this one does."""
    under: Under

    def start_workers(self, shape: FleetShape) -> Child:
        """Start the process with the workers and connect them."""
        flags = ["--queue", self.queue, "--scheduler", self.scheduler, *shape.flags()]
        log, under = self.directory / "workers.log", self.under.get("worker", ())
        workers = role("worker", "penstock_workers", log, *flags, environment=self.environment, under=under)
        workers.ask(do="start")
        self.system.children.append(workers)
        return workers


@contextmanager
def penstock_without_workers(
    directory: Path, policy: str = "", compiled: bool = False, under: Under = NOTHING
) -> Iterator[PenstockStack]:
    """Run queue, scheduler and client, `compiled` or as they are."""
    directory.mkdir(parents=True)
    listen = ["--listen", "127.0.0.1:0"]
    log = directory / "services.log"
    where = compiled_modules() if compiled else {}
    children: list[Child] = []
    try:
        command = [*under.get("queue", ()), *python("services.queue", *listen, "--data-dir", str(directory / "queue"))]
        queue = Child("queue", command, log, where)
        children.append(queue)
        queue_address = queue.ready_on()
        flags = [*listen, "--queue-address", queue_address, *(["--policy", policy] if policy else [])]
        scheduler = Child("scheduler", [*under.get("scheduler", ()), *python("services.scheduler", *flags)], log, where)
        children.append(scheduler)
        scheduler_address = scheduler.ready_on()
        client = client_role("client", log, queue_address, scheduler_address, where, under.get("client", ()))
        children.append(client)
        system = System(PENSTOCK_COMPILED if compiled else PENSTOCK, client, children)
        yield PenstockStack(queue_address, scheduler_address, system, directory, where, under)
    finally:
        for child in reversed(children):
            child.stop()


@contextmanager
def penstock(
    directory: Path, shape: FleetShape, policy: str = "", compiled: bool = False, under: Under = NOTHING
) -> Iterator[System]:
    """Run Penstock with its workers."""
    with penstock_without_workers(directory, policy, compiled, under) as stack:
        stack.start_workers(shape)
        yield stack.system


@contextmanager
def redis_streams(directory: Path) -> Iterator[System]:
    """Run Redis, every write synced before it is answered, with a client and a worker."""
    directory.mkdir(parents=True)
    port = free_port()
    command = ["redis-server", "--port", str(port), "--dir", str(directory), "--save", "", "--bind", "127.0.0.1"]
    command += ["--appendonly", "yes", "--appendfsync", "always", "--logfile", str(directory / "redis.log")]
    with _brokered("redis", command, port, directory) as system:
        yield system


@contextmanager
def jetstream(directory: Path, program: str) -> Iterator[System]:
    """Run NATS JetStream, synced before it acks if this version can, with a client and a worker."""
    directory.mkdir(parents=True)
    port = free_port()
    config = directory / "nats.conf"
    synced = _nats_config(config, port, directory, NATS_SYNCED, program)
    if not synced:
        _nats_config(config, port, directory, "", program)
    with _brokered("nats", [program, "-c", str(config)], port, directory) as system:
        system.note = "synced before each ack" if synced else "acks before it syncs: this version cannot do otherwise"
        yield system


def _nats_config(path: Path, port: int, directory: Path, sync: str, program: str) -> bool:
    """Write a configuration; return whether the server accepts it."""
    path.write_text(f"listen: 127.0.0.1:{port}\njetstream {{ store_dir: {directory}/store\n {sync} }}\n")
    return subprocess.run([program, "-c", str(path), "-t"], capture_output=True, check=False).returncode == 0


@contextmanager
def _brokered(name: str, command: list[str], port: int, directory: Path) -> Iterator[System]:
    log = directory / "processes.log"
    children: list[Child] = []
    try:
        server = Child("server", command, log)
        children.append(server)
        # Neither server reads commands from its standard input or speaks JSON on its output.
        wait_for(name, lambda: listening(port))
        client = role("client", f"{name}_roles", log, "client", str(port))
        children.append(client)
        worker = role("worker", f"{name}_roles", log, "worker", str(port))
        children.append(worker)
        worker.ask(do="start")
        yield System(name, client, children)
    finally:
        for child in reversed(children):
            child.stop()


def missing(program: str) -> bool:
    """Return whether a program cannot be found."""
    return shutil.which(program) is None
