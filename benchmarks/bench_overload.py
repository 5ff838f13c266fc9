"""Ten and a hundred times the load that the fleet can serve: refusals, timeouts, memory, and the interactive channel.

Usage: python -m benchmarks.bench_overload [--x10-s 45] [--x100-s 35] [--hold-s 60] [--capacity 50]

Real queue, scheduler and clients; workers whose engines let answers go at a fixed rate, so that the fleet's capacity is
known. Phases: interactive requests alone; batch requests at 10 times the capacity beside them; at 100 times, by default
until some 150,000 wait; then as many as are served ("hold"), where the backlog stays and memory must not grow. From the
second phase on, readers that opened a Watch of everything take nothing. Wait is from durable submit to delivery to a
worker. Last line JSON; memory is resident MiB per process as start, peak and end of each phase.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import grpc

from benchmarks.lifecycle.processes import Child, python
from benchmarks.lifecycle.systems import FleetShape, PenstockStack, penstock_without_workers
from benchmarks.options import above
from benchmarks.overload.memory import Memory
from penstock.queue.v1.queue_pb2 import StatsRequest
from penstock.queue.v1.queue_pb2_grpc import QueueServiceStub

RUN_DIRECTORY = Path(".run")

BACKLOG_REQUESTS = 150_000
WORKERS = 2
REQUESTS_AT_ONCE = 32
PROBE_PER_S = 4.0
STALLED_READERS = 8

LEAST_S = 0.5
"""Of a phase: it has at least two probes."""


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alone-s", type=above(LEAST_S), default=20.0)
    parser.add_argument("--x10-s", type=above(LEAST_S), default=45.0)
    parser.add_argument("--x100-s", type=above(LEAST_S), default=35.0)
    parser.add_argument("--hold-s", type=above(LEAST_S), default=60.0)
    parser.add_argument("--capacity", type=above(0), default=50.0, help="requests per second the fleet can serve")
    options = parser.parse_args()
    # Not the system's place for such things, which may be memory: syncing would cost nothing there.
    RUN_DIRECTORY.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="overload-", dir=RUN_DIRECTORY) as name,
        penstock_without_workers(Path(name).resolve() / "run") as stack,
    ):
        print(json.dumps({"benchmark": "overload", **_measure(stack, options)}))


def _measure(stack: PenstockStack, options: argparse.Namespace) -> dict[str, Any]:
    stack.start_workers(FleetShape(WORKERS, REQUESTS_AT_ONCE, rate_per_s=options.capacity))
    children = stack.system.children
    load, person, idler = (_client(stack, name) for name in ("load", "person", "idler"))
    children += [load, person, idler]
    memory = Memory([child for child in children if child.name in {"queue", "scheduler", "worker"}])
    answer: dict[str, Any] = {"capacity_per_s": options.capacity, "phases": {}}
    phases = (("alone", options.alone_s, 0), ("x10", options.x10_s, 10), ("x100", options.x100_s, 100))
    try:
        for name, seconds, times in (*phases, ("hold", options.hold_s, 1)):
            if times == 10:
                idler.ask(do="stall", streams=STALLED_READERS)
            memory.begin(name)
            answer["phases"][name] = _phase(load, person, seconds, times * options.capacity)
            answer["phases"][name]["waiting_at_end"] = _waiting(stack)
            print(name, json.dumps(answer["phases"][name]), flush=True)
    finally:
        memory.stop()
    memory.print_series(every_s=10)
    answer["memory_mib"] = memory.report()
    return {**answer, **_verdict(answer)}


def _client(stack: PenstockStack, name: str) -> Child:
    log = stack.directory / f"{name}.log"
    child = Child(name, python("benchmarks.overload.client", stack.queue, stack.scheduler), log)
    child.answer()
    return child


def _phase(load: Child, person: Child, seconds: float, rate_per_s: float) -> dict[str, Any]:
    """Offer a load and probe beside it; return what happened to both."""
    person.tell(do="probe", rate_per_s=PROBE_PER_S, seconds=seconds)
    offered = load.ask(do="offer", rate_per_s=rate_per_s, seconds=seconds) if rate_per_s else {}
    probed = person.answer()
    waits = sorted(probed.pop("waits_s"))
    cuts = statistics.quantiles(waits, n=100, method="inclusive")
    wait = {"answered": len(waits), "p50_s": round(cuts[49], 4), "p99_s": round(cuts[98], 4)}
    if offered:
        offered["per_s"] = round(offered["accepted"] / offered.pop("seconds"), 1)
        offered["slowest_ack_s"] = round(offered["slowest_ack_s"], 2)
    return {"offered": offered, "interactive": {**wait, "failed": probed["failed"]}}


def _waiting(stack: PenstockStack) -> int:
    """Return how many requests wait at the queue."""
    with grpc.insecure_channel(stack.queue) as channel:
        return sum(line.ready for line in QueueServiceStub(channel).Stats(StatsRequest()).channels)


def _verdict(answer: dict[str, Any]) -> dict[str, Any]:
    """Sum up: what was refused or timed out, memory of queue and scheduler, the interactive channel under load."""
    phases, memory = answer["phases"], answer["memory_mib"]
    refused = sum(sum(phase["offered"].get("refused", {}).values()) for phase in phases.values())
    failed = sum(sum(phase["interactive"]["failed"].values()) for phase in phases.values())
    alone = phases["alone"]["interactive"]
    ratios = {
        name: {cut: round(phase["interactive"][cut] / alone[cut], 2) for cut in ("p50_s", "p99_s")}
        for name, phase in phases.items()
    }
    peaks = {name: max(phase[name]["peak"] for phase in memory.values()) for name in ("queue", "scheduler", "worker")}
    hold = memory["hold"]
    return {
        "refused": refused,
        "interactive_failed": failed,
        "interactive_wait_ratio": ratios,
        "peak_mib": peaks,
        "hold_growth_mib": {name: round(hold[name]["end"] - hold[name]["start"], 1) for name in hold},
        "backlog": min(phases[name]["waiting_at_end"] for name in ("x100", "hold")),
        "backlog_target": BACKLOG_REQUESTS,
    }


if __name__ == "__main__":
    main()
