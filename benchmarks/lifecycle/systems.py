"""The systems of the benchmark, each as a set of processes that are up and idle."""

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

REDIS = "redis"

NATS, NATS_SYNCED = "nats", "nats-synced"
"""NATS JetStream: as it comes, which acknowledges before it syncs, and made to sync before it acknowledges."""

SYSTEMS = (PENSTOCK, PENSTOCK_COMPILED, REDIS, NATS, NATS_SYNCED)
"""All there are to compare, by name."""

SYNCED = "sync_interval: always"
"""What tells JetStream to sync before it acknowledges; versions before 2.10 do not know it."""


class MissingError(Exception):
    """What this machine lacks for one of the systems, in words."""


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
    """Run Redis, every write synced before it is answered, with a client and a worker.

    Raises MissingError if there is none.
    """
    _installed("redis-server", "redis-server")
    directory.mkdir(parents=True)
    port = free_port()
    command = ["redis-server", "--port", str(port), "--dir", str(directory), "--save", "", "--bind", "127.0.0.1"]
    command += ["--appendonly", "yes", "--appendfsync", "always", "--logfile", str(directory / "redis.log")]
    with _brokered(REDIS, command, port, directory) as system:
        yield system


@contextmanager
def jetstream(directory: Path, program: str, synced: bool) -> Iterator[System]:
    """Run NATS JetStream with a client and a worker; `synced` makes it sync before it acknowledges.

    Raises MissingError if there is no such program, or nothing that makes it sync.
    """
    _installed(program, "nats-server")
    store = directory / "store"
    store.mkdir(parents=True)
    port = free_port()
    config = directory / "nats.conf"
    how = _synced_by(config, port, store, program) if synced else ""
    if not synced:
        _accepted(config, port, store, program)
    with _brokered(NATS_SYNCED if synced else NATS, [program, "-c", str(config)], port, directory) as system:
        system.note = how or "acks before it syncs"
        yield system


def _installed(program: str, package: str) -> None:
    if shutil.which(program) is None:
        raise MissingError(f"{program} is not installed (Debian: apt-get install {package})")


def _synced_by(config: Path, port: int, store: Path, program: str) -> str:
    """Have every write on disk before it is acknowledged, and return what sees to that."""
    if _accepted(config, port, store, program, SYNCED):
        return SYNCED
    _accepted(config, port, store, program)
    # Files made in such a directory have the attribute too: a write returns when it is on disk (open(2), O_SYNC).
    done = subprocess.run(["chattr", "+S", str(store)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise MissingError(f"neither {program} nor this file system can be told to sync: {done.stderr.strip()}")
    return "every write synced (chattr +S): this version has no setting for it"


def _accepted(path: Path, port: int, store: Path, program: str, sync: str = "") -> bool:
    """Write a configuration; return whether the server accepts it."""
    path.write_text(f"listen: 127.0.0.1:{port}\njetstream {{ store_dir: {store}\n {sync} }}\n")
    return subprocess.run([program, "-c", str(path), "-t"], capture_output=True, check=False).returncode == 0


@contextmanager
def _brokered(name: str, command: list[str], port: int, directory: Path) -> Iterator[System]:
    log = directory / "processes.log"
    roles = f"{name.partition('-')[0]}_roles"
    children: list[Child] = []
    try:
        server = Child("server", command, log)
        children.append(server)
        # Neither server reads commands from its standard input or speaks JSON on its output.
        wait_for(name, lambda: listening(port))
        client = role("client", roles, log, "client", str(port))
        children.append(client)
        worker = role("worker", roles, log, "worker", str(port))
        children.append(worker)
        worker.ask(do="start")
        yield System(name, client, children)
    finally:
        for child in reversed(children):
            child.stop()
