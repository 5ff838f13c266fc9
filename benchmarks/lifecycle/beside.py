"""A lone request of one client while another client submits as fast as the queue takes it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lifecycle.processes import Child, client_role
from benchmarks.lifecycle.systems import FleetShape, PenstockStack, penstock_without_workers

REQUESTS_AT_ONCE = 128
"""Of the worker: what its requests wait for each other there stays short against what they wait for elsewhere."""

CHANNEL = "batch"
"""Of the lone requests: another than that of the flood, or they would stand behind all of it."""


class Beside(NamedTuple):
    """One round: how long lone requests took, in seconds, alone and beside a flood, and how fast the flood was."""

    alone_s: list[float]
    beside_s: list[float]
    per_s: float


def beside_a_flood(directory: Path, requests: int, lone: int, rounds: int, policy: str) -> list[Beside]:
    """Let one client ask one request after the other, first alone, then until the flood of another has ended."""
    found = []
    with penstock_without_workers(directory / "beside", policy) as stack:
        stack.start_workers(FleetShape(1, REQUESTS_AT_ONCE))
        flooding = stack.system.client
        asking = second_client(stack, directory / "asking.log")
        flooding.ask(do="flood", requests=min(requests, 2_000))
        for _ in range(rounds):
            alone_s = asking.ask(do="lone", requests=lone, channel=CHANNEL)["through_s"]
            beside_s, flood = asked_during(asking, partial(flooding.ask, do="flood", requests=requests))
            found.append(Beside(alone_s, beside_s, requests / flood["seconds"]))
    return found


def second_client(stack: PenstockStack, log: Path) -> Child:
    """Return another client than the one that floods."""
    asking = client_role("asking", log, stack.queue, stack.scheduler, stack.environment)
    stack.system.children.append(asking)
    return asking


def asked_during(asking: Child, work: Callable[[], dict[str, Any]]) -> tuple[list[float], dict[str, Any]]:
    """Do `work`, and have one lone request after the other asked meanwhile; return their seconds, and what it says."""
    lone_s: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        doing = pool.submit(work)
        while not doing.done():
            lone_s += asking.ask(do="lone", requests=1, channel=CHANNEL)["through_s"]
        return lone_s, doing.result()
