"""A scheduler that is killed and comes back, and a worker that is killed and does not, between real processes.

The workers' engines are simulated: their model is loaded at once, and a request takes as long as it is told to.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import grpc

from benchmarks.lifecycle.processes import Child, free_port, python, wait_for
from penstock.queue.v1 import queue_pb2
from penstock.queue.v1.queue_pb2_grpc import QueueServiceStub
from penstock.request.v1 import request_pb2 as pb
from penstock.scheduler.v1 import scheduler_pb2
from penstock.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub

WORKERS = 2
REQUESTS_AT_ONCE = 32
ENGINE = ["--engine", "simulated", "--served-model-name", "sim", "--profile", "a100-llama-8b", "--max-num-seqs"]
ENGINE += [str(REQUESTS_AT_ONCE), "--num-gpu-blocks-override", "4097"]

LONG_TOKENS, SHORT_TOKENS = 1500, 50
"""Outputs of requests that outlast the measurement, and of requests that end several times a second."""

BACKLOG_REQUESTS = 2_000
LOST_REQUESTS = 16
"""Running when their worker is killed: few enough to be asked for one by one, and to find room on the other worker."""

LOOK_S = 0.01
"""Between two looks: what a figure may be late by."""


class Regrant(NamedTuple):
    """One restart of the scheduler. Seconds are from the start of its new process, which follows the kill at once."""

    ready_s: float
    first_grant_s: float


class Loss(NamedTuple):
    """One lost worker. Seconds are from its kill."""

    noticed_s: float
    """Until the queue counts one worker less."""
    requests: int
    """What it ran."""
    running_elsewhere_s: float
    """Until the last of these was leased to the other worker."""


class Fleet:
    """Queue, scheduler and workers."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        """Start them; `stack` stops them."""
        directory.mkdir(parents=True)
        self._log = directory / "log"
        self._stack = stack
        self._scheduler_address = f"127.0.0.1:{free_port()}"
        listen = ["--listen", "127.0.0.1:0"]
        self.queue_process = self._child("queue", "services.queue", *listen, "--data-dir", str(directory / "queue"))
        self._queue_address = self.queue_process.ready_on()
        self.queue = QueueServiceStub(stack.enter_context(grpc.insecure_channel(self._queue_address)))
        options = [("grpc.initial_reconnect_backoff_ms", 20), ("grpc.max_reconnect_backoff_ms", 20)]
        self._scheduler_channel = stack.enter_context(grpc.insecure_channel(self._scheduler_address, options=options))
        self.scheduler_stub = SchedulerServiceStub(self._scheduler_channel)
        self.scheduler = self.start_scheduler()
        self.scheduler.ready_on()
        addresses = ["--queue-address", self._queue_address, "--scheduler-address", self._scheduler_address]
        self.workers = {
            name: self._child(f"worker-{name}", "services.worker", *listen, "--worker-id", name, *addresses, *ENGINE)
            for name in (f"w{number}" for number in range(WORKERS))
        }
        for worker in self.workers.values():
            worker.ready_on()
        wait_for("the workers", lambda: self.connected() == WORKERS)
        wait_for("the workers' streams", lambda: len(self.status().workers) == WORKERS)

    def _child(self, name: str, *command: str) -> Child:
        child = Child(name, python(*command), self._log)
        self._stack.callback(child.stop)
        return child

    def start_scheduler(self) -> Child:
        """Start the scheduler's process and return without waiting for it."""
        flags = ["--listen", self._scheduler_address, "--queue-address", self._queue_address]
        return self._child("scheduler", "services.scheduler", *flags)

    def still_runs(self) -> None:
        """Raise SystemExit if a process has ended that is to run."""
        for child in (self.queue_process, self.scheduler, *self.workers.values()):
            child.still_runs()

    def status(self) -> scheduler_pb2.StatusResponse:
        """Return the scheduler's state."""
        return self.scheduler_stub.Status(scheduler_pb2.StatusRequest(), wait_for_ready=True, timeout=60)

    def connected(self) -> int:
        """Return how many workers the queue has."""
        return int(self.queue.Stats(queue_pb2.StatsRequest()).workers)

    def submit(self, count: int, tokens: int) -> list[str]:
        """Submit requests that generate so many tokens each; return their names."""
        names: list[str] = []
        request = pb.Request(text="recovery", sampling=pb.SamplingParams(max_tokens=tokens, ignore_eos=True))
        while len(names) < count:
            batch = [request] * min(count - len(names), 1000)
            answer = self.queue.SubmitUnary(queue_pb2.SubmitUnaryRequest(requests=batch))
            names += [ack.request_id for ack in answer.acks]
        return names

    def runs_on(self, names: Sequence[str]) -> dict[str, str]:
        """Return the worker of each of these requests that is leased."""
        found = {}
        for name in names:
            answer = self.queue.Get(queue_pb2.GetRequest(request_id=name))
            if answer.state == queue_pb2.REQUEST_STATE_LEASED:
                found[name] = answer.worker_id
        return found


@contextmanager
def running(directory: Path) -> Iterator[Fleet]:
    """Run a fleet."""
    with ExitStack() as stack:
        yield Fleet(directory, stack)


def regrant(directory: Path) -> Regrant:
    """Kill the scheduler of a busy fleet with a backlog, start it again, and wait for its first grant."""
    with running(directory) as fleet:
        fleet.submit(BACKLOG_REQUESTS, SHORT_TOKENS)
        wait_for("grants", lambda: fleet.status().grants > WORKERS * REQUESTS_AT_ONCE)
        fleet.scheduler.kill()
        began_s = time.monotonic()
        fleet.scheduler = fleet.start_scheduler()
        fleet.status()
        ready_s = time.monotonic() - began_s
        while not fleet.status().grants:
            fleet.still_runs()
            time.sleep(LOOK_S)
        return Regrant(ready_s, time.monotonic() - began_s)


def loss(directory: Path) -> Loss:
    """Kill one of two workers and wait until the other runs what it ran."""
    with running(directory) as fleet:
        names = fleet.submit(LOST_REQUESTS, LONG_TOKENS)
        wait_for("leases", lambda: len(fleet.runs_on(names)) == LOST_REQUESTS)
        victim = "w0"
        lost = [name for name, worker in fleet.runs_on(names).items() if worker == victim]
        fleet.workers.pop(victim).kill()
        began_s = time.monotonic()
        while fleet.connected() == WORKERS:
            fleet.still_runs()
            time.sleep(LOOK_S)
        noticed_s = time.monotonic() - began_s
        while sum(worker != victim for worker in fleet.runs_on(lost).values()) < len(lost):
            fleet.still_runs()
            time.sleep(LOOK_S)
        return Loss(noticed_s, len(lost), time.monotonic() - began_s)
