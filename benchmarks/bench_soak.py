"""What a long life costs in memory: every process's resident size while clients do all that clients do.

Usage: python -m benchmarks.bench_soak [--minutes 10] [--compiled]

Real queue, scheduler, gateway and two workers with simulated engines, one of which is stopped and started again every
half minute; a client process beside them (`benchmarks.soak.client`). Results live for half a minute, so that after the
first minute as many go as come, and nothing should grow. The first quarter fills caches and is left out. Of the rest,
growth is the least of the last third less the least of the first, because sizes saw; divided by the requests between.
Last line JSON: for each process, size at the end in MiB, growth in MiB, and in bytes for each request.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from benchmarks.lifecycle.processes import Child, compiled_modules, python
from benchmarks.options import above
from penstock.queue.v1.queue_pb2 import StatsRequest
from penstock.queue.v1.queue_pb2_grpc import QueueServiceStub

RUN_DIRECTORY = Path(".run")

RESULTS_LIVE_S = 30
RESTART_S = 30.0
SAMPLE_S = 1.0
PRINT_S = 20.0
FILLS_PART = 0.25

ENGINE = ["--engine", "simulated", "--served-model-name", "tiny", "--max-num-seqs", "128"]
ENGINE += ["--num-gpu-blocks-override", "2049", "--max-num-batched-tokens", "16384"]


class Sample(NamedTuple):
    """Sizes at one moment."""

    at_s: float
    ended_requests: int
    mib: dict[str, float]


class Fleet:
    """All processes; the second worker is started again and again."""

    def __init__(self, directory: Path, compiled: bool) -> None:
        """Start them."""
        self._directory = directory
        self._where = compiled_modules() if compiled else {}
        self.lasting: dict[str, Child] = {}
        """Those that live from the beginning to the end."""
        self._second: Child | None = None
        data = ["--data-dir", str(directory / "queue"), "--result-ttl-s", str(RESULTS_LIVE_S)]
        self.queue = self._start("queue", *data)
        self.scheduler = self._start("scheduler", "--queue-address", self.queue)
        self._both = ["--queue-address", self.queue, "--scheduler-address", self.scheduler]
        self._start("worker", "--worker-id", "lasting", *self._both, *ENGINE)
        self.gateway = self._start("gateway", *self._both)
        addresses = (self.queue, self.scheduler, self.gateway)
        self.client = Child("client", python("benchmarks.soak.client", *addresses), directory / "client.log")
        self.lasting["client"] = self.client
        self.client.answer()

    def _start(self, name: str, *flags: str) -> str:
        child = self._child(name, *flags)
        self.lasting[name] = child
        return child.ready_on()

    def _child(self, name: str, *flags: str) -> Child:
        command = python(f"services.{name}", "--listen", "127.0.0.1:0", *flags)
        return Child(name, command, self._directory / f"{name}.log", self._where)

    def restart_second(self) -> None:
        """Stop the second worker, if it runs, and start it under its old name."""
        self._stop_second()
        self._second = self._child("worker", "--worker-id", "second", *self._both, *ENGINE)

    def stop(self) -> None:
        """Stop everything, clients first."""
        self._stop_second()
        for child in reversed(self.lasting.values()):
            child.stop()

    def _stop_second(self) -> None:
        if self._second is not None:
            self._second.stop()
            self._second = None


@contextmanager
def fleet(directory: Path, compiled: bool) -> Iterator[Fleet]:
    """Run a fleet for the length of the block."""
    running = Fleet(directory, compiled)
    try:
        yield running
    finally:
        running.stop()


class Sampler:
    """Looks at sizes, and restarts the second worker, until stopped."""

    def __init__(self, running: Fleet) -> None:
        """Begin."""
        self._fleet = running
        self.samples: list[Sample] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._sample, self._restart)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _restart(self) -> None:
        while not self._over.is_set():
            self._fleet.restart_second()
            self._over.wait(RESTART_S)

    def _sample(self) -> None:
        began_s, told_s = time.monotonic(), 0.0
        with grpc.insecure_channel(self._fleet.queue) as channel:
            queue = QueueServiceStub(channel)
            while not self._over.wait(SAMPLE_S):
                sizes = {name: child.memory_bytes() / 2**20 for name, child in self._fleet.lasting.items()}
                stats = queue.Stats(StatsRequest())
                ended = sum(sum(line.ended_by_outcome) for line in stats.channels)
                sample = Sample(time.monotonic() - began_s, ended, sizes)
                self.samples.append(sample)
                if sample.at_s - told_s >= PRINT_S:
                    told_s = sample.at_s
                    told = "  ".join(f"{name} {mib:.0f}" for name, mib in sizes.items())
                    print(f"{sample.at_s:5.0f} s  {ended:9,} ended  MiB: {told}", flush=True)


def main() -> None:
    """Run the benchmark; exits with 1 if something the clients did failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=above(1), default=10.0)
    parser.add_argument("--compiled", action="store_true", help="services from build/compiled")
    options = parser.parse_args()
    # Not the system's place for such things, which may be memory: syncing would cost nothing there.
    RUN_DIRECTORY.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="soak-", dir=RUN_DIRECTORY) as name,
        fleet(Path(name).resolve(), options.compiled) as running,
    ):
        sampler = Sampler(running)
        try:
            told = running.client.ask(do="run", seconds=options.minutes * 60)
        finally:
            sampler.stop()
    failed = sum(count for what, count in told["done"].items() if ":" in what)
    print(json.dumps({"benchmark": "soak", "failed": failed, **told, **_growth(sampler.samples)}))
    if failed:
        raise SystemExit(1)


def _growth(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return how much larger the processes were at the end than at the beginning of what is looked at."""
    settled = samples[int(len(samples) * FILLS_PART) :]
    third = len(settled) // 3
    first, last = settled[:third], settled[-third:]
    requests = last[len(last) // 2].ended_requests - first[len(first) // 2].ended_requests
    answer: dict[str, Any] = {"requests": samples[-1].ended_requests, "growth_over_requests": requests}
    for name in samples[0].mib:
        grown_mib = min(sample.mib[name] for sample in last) - min(sample.mib[name] for sample in first)
        answer[name] = {
            "end_mib": round(samples[-1].mib[name], 1),
            "growth_mib": round(grown_mib, 2),
            "growth_bytes_per_request": round(grown_mib * 2**20 / requests, 2),
        }
    return answer


if __name__ == "__main__":
    main()
