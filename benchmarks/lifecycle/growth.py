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

from benchmarks.lifecycle.beside import REQUESTS_AT_ONCE, asked_during, second_client
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


class Grown(NamedTuple):
    """What requests took, and how long lone ones did in seconds."""

    cost: Cost
    lone_s: list[float]


class Usage(NamedTuple):
    """What the ledgers said while a backlog existed."""

    completed: int
    seconds: float
    held: list[float]
    """Share of all blocks held, one number per look."""
    cost: Cost


def by_workers(directory: Path, counts: Sequence[int], requests: int, lone: int, policy: str) -> dict[int, Grown]:
    """Flood fleets of different sizes that run as many requests at once in all; then ask `lone`, one at a time."""
    found = {}
    for count in counts:
        with penstock_without_workers(directory / f"workers-{count}", policy) as stack:
            stack.start_workers(FleetShape(count, max(SLOTS // count, 1)))
            _until_connected(stack, count)
            client = stack.system.client
            client.ask(do="flood", requests=min(requests, 2_000))
            cost = charged(stack.system.children, requests, partial(client.ask, do="flood", requests=requests))
            found[count] = Grown(cost, client.ask(do="lone", requests=lone)["through_s"])
            _log("workers", count, cost)
    return found


def by_waiting(
    directory: Path, counts: Sequence[int], requests: int, rate_per_s: float, policy: str
) -> dict[int, Grown]:
    """Answer `requests` at `rate_per_s` while so many others wait: for each that ends another is submitted.

    Lone requests are asked beside the same again, on a worker that runs few at once: behind those of a full one they
    would wait for the pace of its engine and for little else.
    """
    found = {}
    for count in counts:
        with penstock_without_workers(directory / f"waiting-{count}", policy) as stack:
            client = stack.system.client
            client.ask(do="preload", requests=count + SLOTS)
            stack.start_workers(FleetShape(1, SLOTS, rate_per_s=rate_per_s))
            client.ask(do="turn_over", requests=SLOTS)  # what was granted before anything ran
            turn_over = partial(client.ask, do="turn_over", requests=requests)
            cost = charged(stack.system.children, requests, turn_over)
            _log("waiting", count, cost)
        found[count] = Grown(cost, _lone_beside(directory / f"beside-{count}", count, requests, rate_per_s, policy))
    return found


def _lone_beside(directory: Path, count: int, requests: int, rate_per_s: float, policy: str) -> list[float]:
    """Return what lone requests of a channel of their own take while `count` wait and `requests` are answered."""
    with penstock_without_workers(directory, policy) as stack:
        client, asking = stack.system.client, second_client(stack, directory / "asking.log")
        client.ask(do="preload", requests=count + REQUESTS_AT_ONCE)
        stack.start_workers(FleetShape(1, REQUESTS_AT_ONCE, rate_per_s=rate_per_s))
        client.ask(do="turn_over", requests=REQUESTS_AT_ONCE)
        return asked_during(asking, partial(client.ask, do="turn_over", requests=requests))[0]


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
