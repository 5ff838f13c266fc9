"""A lone request of one client while another client submits as fast as the queue takes it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.lifecycle.processes import client_role
from benchmarks.lifecycle.systems import FleetShape, penstock_without_workers

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
        asking = client_role("asking", directory / "asking.log", stack.queue, stack.scheduler, stack.environment)
        stack.system.children.append(asking)
        flooding.ask(do="flood", requests=min(requests, 2_000))
        with ThreadPoolExecutor(1) as pool:
            for _ in range(rounds):
                alone_s = asking.ask(do="lone", requests=lone, channel=CHANNEL)["through_s"]
                flood = pool.submit(flooding.ask, do="flood", requests=requests)
                beside_s = []
                while not flood.done():
                    beside_s += asking.ask(do="lone", requests=1, channel=CHANNEL)["through_s"]
                found.append(Beside(alone_s, beside_s, requests / flood.result()["seconds"]))
    return found
