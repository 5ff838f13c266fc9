"""What admission policies come to where a profile's constants are others: each by itself, a third less and more.

Usage: python -m benchmarks.admission.sensitivity [--workload kv-bound] [--policies push,watermark-0.02,predictive]
       [--requests 600] [--scale gpu] [--profile NAME] [--pool-windows N] [--part 0.333] [--seeds 0,1,2]

Simulated, in virtual time, as `benchmarks.admission.sim` is. One JSON line per constant, value and policy ends the
report. A conclusion that changes when they are varied is one about the profile, not about the policies.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

from benchmarks.admission import workloads
from benchmarks.admission.report import Outcome, ratios, spread
from benchmarks.admission.sim import SIDES, compare, describe
from benchmarks.options import above, at_least, count, each, from_on, push_first
from services.worker.engine import ENGINE_WATERMARK
from services.worker.simulated.profile import PROFILES, Assumed, Fitted, Profile, Roofline

AS_IT_IS = "as it is"

Constants = TypeVar("Constants", Assumed, Fitted)


def variations(profile: Profile, part: float) -> Iterator[tuple[str, float, Profile]]:
    """Yield the profile as it is, then with each constant `part` less and more; constants that are 0 are left out."""
    yield AS_IT_IS, 1.0, profile
    if isinstance(profile, Roofline):
        for name, factor, assumed in _varied(profile.assumed, part):
            yield name, factor, profile._replace(assumed=assumed)
    elif isinstance(profile, Fitted):
        yield from _varied(profile, part)


def _varied(constants: Constants, part: float) -> Iterator[tuple[str, float, Constants]]:
    for name, value in constants._asdict().items():
        for factor in (1 - part, 1 + part) if value and name != "num_blocks" else ():
            yield name, factor, constants._replace(**{name: value * factor})


def lines_of(name: str, factor: float, outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """Print how the policies compare under one variation; return the closing JSON objects."""
    by_policy: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_policy.setdefault(outcome.policy, []).append(outcome)
    base = next(iter(by_policy.values()))
    lines = []
    for policy, runs in by_policy.items():
        against = ratios(runs, base, "requests_per_s")
        usage = [run.usage for run in runs]
        preempted = [run.preemptions_per_1000 for run in runs]
        print(
            f"  {name:22} x {factor:<5.2f}  {policy:18} {spread(against, 3):22} usage {spread(usage, 3):22} "
            f"preempted/1000 {spread(preempted, 1)}",
            flush=True,
        )
        line = {"workload": runs[0].workload, "constant": name, "factor": round(factor, 3), "policy": policy}
        line |= {"rps_ratio_vs_push": round(statistics.median(against), 3)}
        line |= {"kv_usage": round(statistics.median(usage), 3)}
        lines.append({**line, "preemptions_per_1000": round(statistics.median(preempted), 2)})
    return lines


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=list(workloads.WORKLOADS), default="kv-bound")
    parser.add_argument("--policies", type=push_first(SIDES), default="push,watermark-0.02,predictive")
    parser.add_argument("--requests", type=count, default=600)
    parser.add_argument("--scale", choices=sorted(workloads.SCALES), default="gpu")
    parser.add_argument("--profile", choices=sorted(PROFILES), help="another engine than the scale's own")
    parser.add_argument("--pool-windows", type=from_on(0), help="pool in windows; 0 is what the profile's GPU holds")
    parser.add_argument("--part", type=above(0, 0.9), default=1 / 3, help="by which part each constant is varied")
    parser.add_argument("--seeds", type=each(at_least(0)), default="0,1,2")
    options = parser.parse_args()
    scale = workloads.SCALES[options.scale]
    scale = replace(scale, profile=options.profile or scale.profile)
    if options.pool_windows is not None:
        scale = replace(scale, pool_windows=options.pool_windows)
    lines: list[dict[str, Any]] = []
    for name, factor, speed in variations(PROFILES[scale.profile], options.part):
        made = workloads.of_seeds(options.workload, options.requests, replace(scale, speed=speed), options.seeds)
        if name == AS_IT_IS:
            describe(made)
        lines += lines_of(name, factor, compare(options.policies, made, ENGINE_WATERMARK))
    for line in lines:
        print(json.dumps(line))


if __name__ == "__main__":
    main()
