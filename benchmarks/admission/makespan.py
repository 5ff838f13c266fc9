"""How long several simulated workers take for one batch of very different requests, against one of all their speed.

Usage: python -m benchmarks.admission.makespan [--requests 8000] [--scale cpu] [--seeds 0,1,2]

Every request is there at the beginning. `penstock` binds a request to a worker when the worker has room for it;
`round-robin` and `least-requests` push each into an engine at once, as a load balancer before vLLM does. The bound
is the larger of two times: the whole work on all workers as if they were one, and the longest request alone on the
fastest worker. A worker's speed is what it reaches when it does everything alone, filling and draining included, so
the first of them is a little longer than what a fleet without either would take.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.admission import workloads
from benchmarks.admission.clock import Clock
from benchmarks.admission.engine import Engine
from benchmarks.admission.meter import Life, Meter
from benchmarks.admission.penstock_side import Penstock
from benchmarks.admission.pushing import Push, least_requests, round_robin
from benchmarks.admission.report import spread
from benchmarks.admission.sim import HOP_NS, Side
from benchmarks.admission.workloads import Item, Shape
from benchmarks.options import at_least, count, each
from services.scheduler.core.policies import POLICIES
from services.worker.engine import ENGINE_SCHEDULING, ENGINE_WATERMARK

FLEETS: dict[str, tuple[float, ...]] = {
    "2 equal": (1.0, 1.0),
    "2 unequal": (1.0, 0.5),
    "4 equal": (1.0, 1.0, 1.0, 1.0),
    "4 unequal": (1.0, 1.0, 0.5, 0.5),
}
"""Fleets by name: each worker's blocks as a share of the workload's pool."""

WAYS = ("penstock", "round-robin", "least-requests")


class Batch(NamedTuple):
    """What is to be done, and the policy of Penstock's scheduler."""

    items: Sequence[Item]
    policy: str


def run(way: str, batch: Batch, shapes: Sequence[Shape]) -> Meter:
    """Run everything on engines of these shapes; return the figures."""
    clock, meter = Clock(), Meter([Life() for _ in batch.items])
    rules = (ENGINE_WATERMARK, ENGINE_SCHEDULING) if way == "penstock" else ()
    engines = [Engine(clock, meter, shape, index, *rules) for index, shape in enumerate(shapes)]
    side: Side
    if way == "penstock":
        side = Penstock(clock, engines, batch.items, batch.policy, HOP_NS)
    else:
        side = Push(engines, batch.items, round_robin() if way == "round-robin" else least_requests())
    for index in range(len(batch.items)):
        meter.arrived(index, 0)
        side.submit(index)
    while meter.finished < len(batch.items) and clock.step():
        pass
    return meter


def bound_s(batch: Batch, shapes: Sequence[Shape]) -> float:
    """Return the seconds the fleet would take if it were one worker, or the longest request's if that is more.

    A worker's speed is taken from the faster of pushing everything into it and Penstock, alone on everything.
    """
    alone_s = {shape: min(run(way, batch, [shape]).elapsed_s for way in WAYS[:2]) for shape in set(shapes)}
    as_one_s = 1 / sum(1 / alone_s[shape] for shape in shapes)
    longest = max(batch.items, key=lambda item: (item.output_tokens, item.prompt_tokens))
    return max(as_one_s, min(run("round-robin", batch._replace(items=[longest]), [s]).elapsed_s for s in set(shapes)))


def fleet(shape: Shape, shares: Sequence[float]) -> list[Shape]:
    """Return the workers' shapes; each can hold a whole window."""
    least = -(-shape.window_tokens // shape.block_size)
    return [replace(shape, blocks=max(int(shape.blocks * share), least)) for share in shares]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=list(workloads.WORKLOADS), default="bimodal")
    parser.add_argument("--policy", choices=POLICIES, default="predictive")
    parser.add_argument("--requests", type=count, default=8000)
    parser.add_argument("--scale", choices=sorted(workloads.SCALES), default="cpu")
    parser.add_argument("--seeds", type=each(at_least(0)), default="0,1,2")
    options = parser.parse_args()
    ratios: dict[tuple[str, str], list[float]] = {}
    made = [workloads.make(options.workload, options.requests, options.scale, seed) for seed in options.seeds]
    print(f"{options.workload}, {options.requests} requests: {made[0].source}; penstock with {options.policy}")
    for name, shares in FLEETS.items():
        for workload in made:
            batch, shapes = Batch(workload.items, options.policy), fleet(workload.shape, shares)
            least_s = bound_s(batch, shapes)
            for way in WAYS:
                ratios.setdefault((name, way), []).append(run(way, batch, shapes).elapsed_s / least_s)
        row = "  ".join(f"{way} {spread(ratios[name, way], 3)}" for way in WAYS)
        print(f"  {name:10} makespan over the bound: {row}", flush=True)
    for (name, way), found in ratios.items():
        line = {"workload": options.workload, "fleet": name, "policy": way}
        print(json.dumps({**line, "makespan_over_bound": round(statistics.median(found), 3), "ratios": found}))


if __name__ == "__main__":
    main()
