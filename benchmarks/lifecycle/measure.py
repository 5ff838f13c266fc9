"""One measurement: a flood or lone requests through a system, with the CPU time and the bytes they took."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lifecycle.processes import Child, cpu_s, loopback_bytes
from benchmarks.lifecycle.systems import (
    NATS_SYNCED,
    PENSTOCK,
    PENSTOCK_COMPILED,
    REDIS,
    FleetShape,
    MissingError,
    System,
    Under,
    jetstream,
    penstock,
    redis_streams,
)

WARM_UP_REQUESTS = 2_000


class Cost(NamedTuple):
    """What some requests took."""

    requests: int
    seconds: float
    cpu_us: dict[str, float]
    """CPU time per request and process, in microseconds."""
    wire_bytes: float
    """Bytes on the loopback interface per request, headers included."""

    @property
    def per_s(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds

    @property
    def total_cpu_us(self) -> float:
        """CPU time per request over all processes, in microseconds."""
        return sum(self.cpu_us.values())


class Round(NamedTuple):
    """One round of one system: a flood, and lone requests (latencies in seconds)."""

    flood: Cost
    through_s: list[float]
    direct_s: list[float]


def charged(children: Sequence[Child], requests: int, work: Callable[[], dict[str, Any]]) -> Cost:
    """Do `work`, which reports its `seconds`, and return what it cost."""
    before, sent = cpu_s(children), loopback_bytes()
    answer = work()
    after, received = cpu_s(children), loopback_bytes()
    used = {name: (after[name] - before.get(name, 0.0)) / requests * 1e6 for name in after}
    return Cost(requests, answer["seconds"], used, (received - sent) / requests)


@contextmanager
def opened_systems(
    directory: Path, names: Sequence[str], policy: str, nats_server: str, under: Under
) -> Iterator[list[System]]:
    """Have the systems up, ours `under` those programs; who is not installed is left out, and that is said."""
    with ExitStack() as stack:
        systems: list[System] = []
        for name in names:
            try:
                systems.append(stack.enter_context(_system(name, directory / name, policy, nats_server, under)))
            except MissingError as lacking:
                print(f"{name}: {lacking}", file=sys.stderr)
        yield systems


def _system(name: str, directory: Path, policy: str, nats_server: str, under: Under) -> AbstractContextManager[System]:
    if name in {PENSTOCK, PENSTOCK_COMPILED}:
        return penstock(directory, FleetShape(), policy, name == PENSTOCK_COMPILED, under)
    if name == REDIS:
        return redis_streams(directory)
    return jetstream(directory, nats_server, synced=name == NATS_SYNCED)


def alternate(systems: Sequence[System], requests: int, lone: int, rounds: int) -> dict[str, list[Round]]:
    """Run the rounds; each begins with another system than the one before."""
    found: dict[str, list[Round]] = {system.name: [] for system in systems}
    for system in systems:
        system.client.ask(do="flood", requests=WARM_UP_REQUESTS)
    for number in range(rounds):
        first = number % len(systems)
        for system in [*systems[first:], *systems[:first]]:
            found[system.name].append(_round(system, requests, lone))
    return found


def _round(system: System, requests: int, lone: int) -> Round:
    flood = charged(system.children, requests, lambda: system.client.ask(do="flood", requests=requests))
    answer = system.client.ask(do="lone", requests=lone)
    return Round(flood, answer["through_s"], answer.get("direct_s", []))
