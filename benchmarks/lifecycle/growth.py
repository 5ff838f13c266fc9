"""How Penstock's figures grow: with the number of workers, with the number of waiting requests, and in a full fleet."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from benchmarks.lifecycle.measure import Cost, charged
from benchmarks.lifecycle.processes import Child
from benchmarks.lifecycle.systems import FleetShape, PenstockStack, penstock_without_workers
from penstock.scheduler.v1 import scheduler_pb2
from penstock.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub

SLOTS = 2048
"""Requests the fleet runs at once in the growth runs, however many workers share them."""

SETTLE_S = 1.0
"""Pause after the workers have connected, so that their starting is not charged to the requests."""

SAMPLE_S = 1.0
"""Between two looks at the ledgers."""


class Growth(NamedTuple):
    """A fleet and the requests it gets."""

    workers: int
    requests: int
    requests_at_once: int
    service_s: float


class Usage(NamedTuple):
    """What the ledgers said while a backlog existed."""

    completed: int
    seconds: float
    held: list[float]
    """Share of all blocks held, one number per look."""
    cost: Cost


def by_workers(directory: Path, counts: Sequence[int], requests: int, policy: str) -> dict[int, Cost]:
    """Flood fleets of different sizes that run as many requests at once in all."""
    found = {}
    for count in counts:
        with penstock_without_workers(directory / f"workers-{count}", policy) as stack:
            stack.start_workers(FleetShape(count, max(SLOTS // count, 1)))
            _until_connected(stack, count)
            client = stack.system.client
            client.ask(do="flood", requests=min(requests, 2_000))
            found[count] = charged(stack.system.children, requests, partial(client.ask, do="flood", requests=requests))
            _log("workers", count, found[count])
    return found


def by_waiting(
    directory: Path, counts: Sequence[int], requests: int, rate_per_s: float, policy: str
) -> dict[int, Cost]:
    """Answer `requests` at `rate_per_s` while so many others wait: for each that ends another is submitted."""
    found = {}
    for count in counts:
        with penstock_without_workers(directory / f"waiting-{count}", policy) as stack:
            client = stack.system.client
            client.ask(do="preload", requests=count + SLOTS)
            stack.start_workers(FleetShape(1, SLOTS, rate_per_s=rate_per_s))
            client.ask(do="turn_over", requests=SLOTS)  # what was granted before anything ran
            turn_over = partial(client.ask, do="turn_over", requests=requests)
            found[count] = charged(stack.system.children, requests, turn_over)
            _log("waiting", count, found[count])
    return found


def fleet_usage(directory: Path, growth: Growth, policy: str) -> Usage:
    """Submit all requests from one client, then watch the ledgers until every result has been seen."""
    with penstock_without_workers(directory / "fleet", policy) as stack:
        stack.start_workers(FleetShape(growth.workers, growth.requests_at_once, service_s=growth.service_s))
        _until_connected(stack, growth.workers)
        client = stack.system.client
        held: list[float] = []

        def work() -> dict[str, Any]:
            client.tell(do="flood", requests=growth.requests)
            with grpc.insecure_channel(stack.scheduler) as channel:
                _watch_ledgers(SchedulerServiceStub(channel), stack.system.children, growth, held)
            return client.answer()

        cost = charged(stack.system.children, growth.requests, work)
        return Usage(growth.requests, cost.seconds, held, cost)


def _watch_ledgers(scheduler: Any, children: Sequence[Child], growth: Growth, held: list[float]) -> None:
    """Note the share of blocks held while requests wait, from the first time the fleet is full to the last grant.

    Raises SystemExit if one of the processes that all of it needs ends.
    """
    granted = 0
    while granted < growth.requests:
        time.sleep(SAMPLE_S)
        for child in children:
            child.still_runs()
        status = scheduler.Status(scheduler_pb2.StatusRequest())
        granted = status.grants
        waiting = sum(channel.waiting for channel in status.channels)
        if waiting:
            capacity = sum(worker.capacity_blocks for worker in status.workers)
            held.append(1 - sum(worker.free_blocks for worker in status.workers) / capacity)


def _until_connected(stack: PenstockStack, workers: int) -> None:
    with grpc.insecure_channel(stack.scheduler) as channel:
        scheduler = SchedulerServiceStub(channel)
        until_s = time.monotonic() + 120
        while len(scheduler.Status(scheduler_pb2.StatusRequest()).workers) < workers:
            if time.monotonic() > until_s:
                raise SystemExit(f"not all of {workers} workers connected")
            time.sleep(0.2)
    time.sleep(SETTLE_S)


def _log(what: str, count: int, cost: Cost) -> None:
    figures = {"cpu_us": {name: round(us, 1) for name, us in cost.cpu_us.items()}, "per_s": round(cost.per_s)}
    print(f"{what} {count}: {json.dumps(figures)}", flush=True)


def mean_held(usage: Usage) -> float:
    """Return the mean share of blocks held while a backlog existed."""
    return statistics.mean(usage.held) if usage.held else 0.0
