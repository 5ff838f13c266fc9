"""How long several simulated workers take for one batch of very different requests, against one of all their speed.

Usage: python -m benchmarks.admission.makespan [--requests 8000] [--scale cpu] [--seeds 0,1,2]

Every request is there at the beginning. `penstock` binds a request to a worker when the worker has room for it;
`round-robin` and `least-requests` push each into an engine at once, as a load balancer before vLLM does, and with
`-0.02` into engines with the watermark that Penstock's have. A makespan is told relative to two times. `as_one` is what
one worker of the same total speed would take: that speed is what each worker reaches when it does everything alone,
its filling at the beginning and its emptying at the end included. `steady` is all tokens over what the workers do per
second in the middle of such a run, so that all filling and emptying is in the ratio. Either is the longest request's
time alone on the fastest worker where that is more. Speeds are measured, and depend on which requests a worker has:
unequal workers can come out a little below either.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.admission import workloads
from benchmarks.admission.clock import SECOND_NS, Clock
from benchmarks.admission.engine import Engine
from benchmarks.admission.meter import Life, Meter
from benchmarks.admission.penstock_side import Penstock
from benchmarks.admission.pushing import Push, Router, least_requests, round_robin
from benchmarks.admission.report import spread
from benchmarks.admission.sim import HOP_NS, Side
from benchmarks.admission.workloads import Item, Shape
from benchmarks.options import at_least, count, each
from services.scheduler.core.admission.policies import POLICIES
from services.worker.engine import ENGINE_SCHEDULING, ENGINE_WATERMARK

FLEETS: dict[str, tuple[float, ...]] = {
    "2 equal": (1.0, 1.0),
    "2 unequal": (1.0, 0.5),
    "4 equal": (1.0, 1.0, 1.0, 1.0),
    "4 unequal": (1.0, 1.0, 0.5, 0.5),
}
"""Fleets by name: each worker's blocks as a share of the workload's pool."""

MIDDLE = (0.1, 0.8)
"""Part of a lone worker's run that counts as steady: it is full, and what is left would fill it for some time."""


class Way(NamedTuple):
    """Who binds a request to an engine, Penstock where it is no router, and what the engines are told."""

    router: Callable[[], Router] | None
    watermark: float = 0.0
    scheduling_policy: str = "fcfs"


WAYS = {
    "penstock": Way(None, ENGINE_WATERMARK, ENGINE_SCHEDULING),
    "round-robin": Way(round_robin),
    "round-robin-0.02": Way(round_robin, ENGINE_WATERMARK),
    "least-requests": Way(least_requests),
    "least-requests-0.02": Way(least_requests, ENGINE_WATERMARK),
}
"""By name."""

LONE_WAYS = ("penstock", "round-robin", "round-robin-0.02")
"""Those that differ on a single worker."""


class Batch(NamedTuple):
    """What is to be done, and the policy of Penstock's scheduler."""

    items: Sequence[Item]
    policy: str


def run(way: str, batch: Batch, shapes: Sequence[Shape]) -> Meter:
    """Run everything on engines of these shapes; return the figures."""
    clock, meter = Clock(), Meter([Life() for _ in batch.items])
    router, watermark, scheduling_policy = WAYS[way]
    engines = [Engine(clock, meter, shape, i, watermark, scheduling_policy) for i, shape in enumerate(shapes)]
    side: Side
    if router is None:
        side = Penstock(clock, engines, batch.items, batch.policy, HOP_NS)
    else:
        side = Push(engines, batch.items, router())
    for index in range(len(batch.items)):
        meter.arrived(index, 0)
        side.submit(index)
    while meter.finished < len(batch.items) and clock.step():
        pass
    return meter


class Least(NamedTuple):
    """Seconds that makespans are relative to."""

    as_one_s: float
    steady_s: float


class Alone:
    """What single workers do with the whole batch; each shape runs once."""

    def __init__(self, batch: Batch) -> None:
        """Know of no shape yet."""
        self._batch = batch
        self._runs: dict[Shape, list[Meter]] = {}

    def least(self, shapes: Sequence[Shape]) -> Least:
        """Return what makespans of a fleet of these shapes are relative to. A worker's speed is its fastest way's."""
        items = self._batch.items
        for shape in set(shapes) - set(self._runs):
            self._runs[shape] = [run(way, self._batch, [shape]) for way in LONE_WAYS]
        as_one_s = 1 / sum(1 / min(meter.elapsed_s for meter in self._runs[shape]) for shape in shapes)
        per_s = sum(max(steady_tokens_per_s(meter, items) for meter in self._runs[shape]) for shape in shapes)
        longest = max(items, key=lambda item: (item.output_tokens, item.prompt_tokens))
        longest_s = min(run("round-robin", Batch([longest], ""), [shape]).elapsed_s for shape in set(shapes))
        return Least(max(as_one_s, longest_s), max(sum(map(tokens_of, items)) / per_s, longest_s))


def steady_tokens_per_s(meter: Meter, items: Sequence[Item]) -> float:
    """Return the tokens, of the prompt and put out, of requests that ended in the middle of a run, per second."""
    from_ns, to_ns = (share * meter.elapsed_s * SECOND_NS for share in MIDDLE)
    pairs = zip(items, meter.lives, strict=True)
    return SECOND_NS * sum(tokens_of(i) for i, life in pairs if from_ns <= life.done_ns < to_ns) / (to_ns - from_ns)


def tokens_of(item: Item) -> int:
    """Return the tokens of a request, those of its prompt included."""
    return item.prompt_tokens + item.output_tokens


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
    made = [workloads.make(options.workload, options.requests, options.scale, seed) for seed in options.seeds]
    print(f"{options.workload}, {options.requests} requests: {made[0].source}; penstock with {options.policy}")
    batches = [Batch(workload.items, options.policy) for workload in made]
    alone = [Alone(batch) for batch in batches]
    lines = []
    for name, shares in FLEETS.items():
        shapes = fleet(made[0].shape, shares)
        least = [one.least(shapes) for one in alone]
        print(f"  {name}", flush=True)
        for way in WAYS:
            took_s = [run(way, batch, shapes).elapsed_s for batch in batches]
            as_one = [makespan_s / one.as_one_s for makespan_s, one in zip(took_s, least, strict=True)]
            steady = [makespan_s / one.steady_s for makespan_s, one in zip(took_s, least, strict=True)]
            print(f"    {way:19} over as_one {spread(as_one, 3)}, over steady {spread(steady, 3)}", flush=True)
            line = {"workload": options.workload, "fleet": name, "policy": way}
            line |= {
                f"over_{what}": round(statistics.median(of), 3) for what, of in (("as_one", as_one), ("steady", steady))
            }
            lines.append({**line, "as_one_ratios": as_one, "steady_ratios": steady})
    for line in lines:
        print(json.dumps(line))


if __name__ == "__main__":
    main()
