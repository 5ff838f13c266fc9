"""Admission policies on a simulated engine, in virtual time: a run repeats to the nanosecond.

Usage: python -m benchmarks.admission.sim [--workload kv-bound ...] [--policies push,predictive] [--requests 1000]
       [--scale cpu] [--seeds 0,1,2] [--engine-watermark 0.02] [--prompt-noise 0] [--hop-ms 1.5]
       [--out build/bench-sim]

Penstock's policies run the production scheduler and worker cores. One JSON line per workload and policy ends the
report; the first policy, `push`, is what the others are compared with.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from benchmarks.admission import workloads
from benchmarks.admission.clock import MS, SECOND_NS, Clock
from benchmarks.admission.engine import Engine
from benchmarks.admission.meter import Life, Meter
from benchmarks.admission.penstock_side import Penstock
from benchmarks.admission.pushing import Aimd, LivePull, Push, Windowed, round_robin
from benchmarks.admission.report import Outcome, print_table
from benchmarks.admission.workloads import Workload
from benchmarks.options import at_least, count, each, folder, from_on, push_first
from services.scheduler.core.admission.policies import POLICIES
from services.worker.engine import ENGINE_SCHEDULING, ENGINE_WATERMARK
from services.worker.simulated.profile import PROFILES

HOP_NS = 3 * MS // 2
"""One message between two processes; a pair there and back was measured at 3 ms on a loaded machine."""


class Side(Protocol):
    """Whatever requests are submitted to."""

    def submit(self, index: int) -> None:
        """Take the request of this index, which has just arrived."""


class Stage(NamedTuple):
    """What a run happens on. Penstock's worker gives its engine `engine_watermark`; a message takes `hop_ns`."""

    clock: Clock
    meter: Meter
    workload: Workload
    engine_watermark: float = ENGINE_WATERMARK
    hop_ns: int = HOP_NS

    def engine(self, watermark: float = 0.0, scheduling_policy: str = "fcfs") -> Engine:
        """Return an idle engine of the workload's shape."""
        return Engine(self.clock, self.meter, self.workload.shape, 0, watermark, scheduling_policy)


def _push(stage: Stage, watermark: float = 0.0) -> Side:
    return Push([stage.engine(watermark)], stage.workload.items, round_robin())


def _old_pull(stage: Stage) -> Side:
    shape = stage.workload.shape
    window = shape.blocks * shape.block_size // shape.window_tokens
    return Windowed(stage.clock, stage.engine(), stage.workload.items, window, stage.hop_ns)


def _live_pull(stage: Stage) -> Side:
    return LivePull(stage.clock, stage.engine(), stage.workload.items, stage.hop_ns)


def _aimd(stage: Stage) -> Side:
    return Aimd(stage.clock, stage.engine(), stage.workload.items, stage.hop_ns)


def _penstock(policy: str) -> Callable[[Stage], Side]:
    def make(stage: Stage) -> Side:
        engine = stage.engine(stage.engine_watermark, ENGINE_SCHEDULING)
        return Penstock(stage.clock, [engine], stage.workload.items, policy, stage.hop_ns)

    return make


SIDES: dict[str, Callable[[Stage], Side]] = {
    "push": _push,
    "watermark-0.2": lambda stage: _push(stage, 0.2),
    "watermark-0.15": lambda stage: _push(stage, 0.15),
    "watermark": lambda stage: _push(stage, 0.1),
    "watermark-0.05": lambda stage: _push(stage, 0.05),
    "watermark-0.02": lambda stage: _push(stage, ENGINE_WATERMARK),
    "old-pull": _old_pull,
    "live-pull": _live_pull,
    "aimd": _aimd,
    **{name: _penstock(name) for name in POLICIES},
}
"""Every policy by name."""


def run(
    policy: str,
    workload: Workload,
    push_rps: float = 0.0,
    engine_watermark: float = ENGINE_WATERMARK,
    hop_ns: int = HOP_NS,
) -> Meter:
    """Run a workload under a policy to its end. `push_rps` is what arrival rates are shares of."""
    clock, meter = Clock(), Meter([Life() for _ in workload.items])
    side = SIDES[policy](Stage(clock, meter, workload, engine_watermark, hop_ns))
    for index, moment_s in enumerate(workload.arrivals_s(push_rps)):
        clock.at(int(moment_s * SECOND_NS), lambda index=index: _arrive(side, meter, clock, index))  # type: ignore[misc]
    while meter.finished < len(workload.items) and clock.step():
        pass
    if meter.finished < len(workload.items):
        raise RuntimeError(f"{policy}: {len(workload.items) - meter.finished} requests never ended")
    return meter


def _arrive(side: Side, meter: Meter, clock: Clock, index: int) -> None:
    meter.arrived(index, clock.now_ns)
    side.submit(index)


def saturated_rps(workload: Workload) -> float:
    """Return the requests a second that pushing everything at once completes."""
    at_once = replace(workload, load=None)
    meter = run("push", at_once)
    return len(workload.items) / meter.elapsed_s


def describe(made: Mapping[int, Workload]) -> None:
    """Print what a workload is and what it runs on."""
    first = next(iter(made.values()))
    shape = first.shape
    print(
        f"\n{first.name}, {len(first.items)} requests: {first.source}\n  window {shape.window_tokens}, "
        f"{shape.blocks} blocks of {shape.block_size}, profile {shape.profile}, seeds {list(made)}"
    )


def compare(
    policies: list[str], made: Mapping[int, Workload], engine_watermark: float, hop_ns: int = HOP_NS
) -> list[Outcome]:
    """Run every policy on every seed's requests; return one outcome per policy and seed."""
    outcomes = []
    for seed, workload in made.items():
        push_rps = saturated_rps(workload) if workload.load is not None else 0.0
        for policy in policies:
            started_s = time.process_time()
            meter = run(policy, workload, push_rps, engine_watermark, hop_ns)
            outcomes.append(Outcome.of(workload.name, policy, seed, workload, meter, time.process_time() - started_s))
    return outcomes


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=[*workloads.WORKLOADS, "all"], default=["kv-bound"])
    parser.add_argument(
        "--policies", type=push_first(SIDES), default="push,predictive",
        help="comma-separated, or all; the first has to be push",
    )  # fmt: skip
    parser.add_argument("--requests", type=count, default=1000)
    parser.add_argument("--scale", choices=sorted(workloads.SCALES), default="cpu")
    parser.add_argument("--profile", choices=sorted(PROFILES), help="another engine than the scale's own")
    parser.add_argument("--seeds", type=each(at_least(0)), default="0")
    parser.add_argument(
        "--out", type=folder, default="build/bench-sim",
        help="directory for every outcome as JSON and the cache over time as PNG",
    )  # fmt: skip
    parser.add_argument("--pool-windows", type=from_on(0), help="pool in windows; 0 is what the profile's GPU holds")
    parser.add_argument(
        "--engine-watermark", type=from_on(0, 1), default=ENGINE_WATERMARK,
        help="of the engines behind Penstock's policies",
    )  # fmt: skip
    parser.add_argument(
        "--prompt-noise", type=from_on(0), default=0.0,
        help="deviation of the logarithm of a prompt's bytes per token; 0 is four bytes for each token",
    )  # fmt: skip
    parser.add_argument(
        "--hop-ms", type=from_on(0), default=HOP_NS / MS,
        help="what a message between two processes takes, to an engine or to a client",
    )  # fmt: skip
    options = parser.parse_args()
    names = list(workloads.WORKLOADS) if "all" in options.workload else options.workload
    scale = workloads.SCALES[options.scale]
    if options.pool_windows is not None:
        scale = replace(scale, pool_windows=options.pool_windows)
    if options.profile:
        scale = replace(scale, profile=options.profile)
    if 0 < scale.pool_windows < 1:
        parser.error(f"--pool-windows: the longest request does not fit {scale.pool_windows:g} of a window")
    if not scale.pool_windows and not PROFILES[scale.profile].num_blocks:
        parser.error(f"--pool-windows: the profile {scale.profile} does not say how many blocks its GPU has")
    # All of them first: a trace that is too short for one ends nothing in the middle.
    made = {name: workloads.of_seeds(name, options.requests, scale, options.seeds) for name in names}
    if options.prompt_noise:
        made = {
            name: {seed: workloads.noisy(workload, options.prompt_noise, seed) for seed, workload in seeds.items()}
            for name, seeds in made.items()
        }
    lines: list[dict[str, Any]] = []
    for seeds in made.values():
        describe(seeds)
        outcomes = compare(options.policies, seeds, options.engine_watermark, int(options.hop_ms * MS))
        lines += print_table(outcomes, options.out)
    for line in lines:
        print(json.dumps(line))


if __name__ == "__main__":
    main()
