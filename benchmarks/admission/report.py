"""Outcomes of runs, the table that compares them with the first policy, and the closing JSON lines."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.admission.clock import SECOND_NS
from benchmarks.admission.meter import Meter
from benchmarks.admission.plot import plot
from benchmarks.admission.workloads import Workload
from benchmarks.quantile import quantile

MOST_SAMPLES = 4000
"""Points kept of the cache over time; a plot has fewer pixels."""


@dataclass(frozen=True)
class Outcome:
    """One run of one policy. Times in seconds, usage 0 to 1; `latencies` by name, e.g. `ttft_p99_s`.

    `recomputed_share` is None where it cannot be told.
    """

    workload: str
    policy: str
    seed: int
    requests_per_s: float
    tokens_per_s: float
    usage: float
    usage_overall: float
    usage_after_steps: float
    preemptions_per_1000: float
    recomputed_share: float | None
    latencies: dict[str, float]
    cpu_s: float = 0.0
    samples: list[tuple[float, int, float, bool]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        name: str,
        policy: str,
        seed: int,
        workload: Workload,
        meter: Meter,
        cpu_s: float = 0.0,
    ) -> Outcome:
        """Return the outcome of a run."""
        lives, count = meter.lives, len(meter.lives)
        output_tokens = sum(life.tokens for life in lives)
        # The KV of the last token is never written.
        needed = sum(item.prompt_tokens + item.output_tokens - 1 for item in workload.items)
        times = {
            "wait": [life.entered_ns - life.arrived_ns for life in lives],
            "ttft": [life.first_ns - life.arrived_ns for life in lives],
            "engine_ttft": [life.first_ns - life.entered_ns for life in lives],
            "e2e": [life.done_ns - life.arrived_ns for life in lives],
        }
        latencies = {
            f"{what}_p{share}_s": quantile(values, share / 100) / SECOND_NS
            for what, values in times.items()
            for share in (50, 99)
        }
        latencies |= {f"itl_p{share}_s": quantile(meter.gaps_ns, share / 100) / SECOND_NS for share in (50, 99)}
        every = -(-len(meter.samples) // MOST_SAMPLES) or 1
        return cls(
            name,
            policy,
            seed,
            count / meter.elapsed_s,
            output_tokens / meter.elapsed_s,
            meter.backlog_usage,
            meter.usage,
            meter.usage_after_steps,
            1000 * meter.preemptions / count,
            meter.recomputed_tokens / needed,
            latencies,
            cpu_s,
            [(moment / SECOND_NS, index, usage, backlog) for moment, index, usage, backlog in meter.samples[::every]],
        )


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the median with the range, the median alone if there is one value."""
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) < 2 else f"{middle} [{min(values):.{digits}f}-{max(values):.{digits}f}]"


def ratios(runs: list[Outcome], base: list[Outcome], what: str) -> list[float]:
    """Return a figure of each run over the same figure of the base's run on the same requests."""
    pairs = zip(runs, base, strict=True)
    return [_figure(run, what) / (_figure(other, what) or float("nan")) for run, other in pairs]


def _figure(outcome: Outcome, what: str) -> float:
    return outcome.latencies[what] if what in outcome.latencies else float(getattr(outcome, what))


LATENCIES = {
    "TTFT p50": "ttft_p50_s", "TTFT p99": "ttft_p99_s", "ITL p50": "itl_p50_s", "ITL p99": "itl_p99_s",
    "e2e p50": "e2e_p50_s", "e2e p99": "e2e_p99_s",
}  # fmt: skip
"""Shown relative to the first policy, by the heads of their columns."""


def print_table(outcomes: list[Outcome], out: Path | None = None) -> list[dict[str, Any]]:
    """Print how every policy of one workload compares with the first; return the closing JSON objects."""
    by_policy: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_policy.setdefault(outcome.policy, []).append(outcome)
    base_name, base = next(iter(by_policy.items()))
    heads = ("policy", f"requests/s vs {base_name}", f"tokens/s vs {base_name}", "KV usage", "overall",
             "preempted/1000", "recomputed")  # fmt: skip
    _print_columns([heads, *(_row(policy, runs, base) for policy, runs in by_policy.items())])
    print(f"  times vs {base_name}")
    rows = [_times(policy, runs, base) for policy, runs in by_policy.items()]
    _print_columns([("policy", *LATENCIES), *rows])
    if out is not None:
        _write(outcomes, out)
    return [_line(policy, runs, base) for policy, runs in by_policy.items()]


def _print_columns(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), flush=True)


def _row(policy: str, runs: list[Outcome], base: list[Outcome]) -> tuple[str, ...]:
    return (
        policy,
        spread(ratios(runs, base, "requests_per_s"), 3),
        spread(ratios(runs, base, "tokens_per_s"), 3),
        spread([run.usage for run in runs], 3),
        f"{statistics.median(run.usage_overall for run in runs):.3f}",
        spread([run.preemptions_per_1000 for run in runs], 1),
        _recomputed(runs),
    )


def _times(policy: str, runs: list[Outcome], base: list[Outcome]) -> tuple[str, ...]:
    return policy, *(spread(ratios(runs, base, what)) for what in LATENCIES.values())


def _recomputed(runs: list[Outcome]) -> str:
    shares = [run.recomputed_share for run in runs if run.recomputed_share is not None]
    return f"{statistics.median(shares):.1%}" if shares else "–"


def _line(policy: str, runs: list[Outcome], base: list[Outcome]) -> dict[str, Any]:
    return {
        "workload": runs[0].workload,
        "policy": policy,
        "rps_ratio_vs_push": round(statistics.median(ratios(runs, base, "requests_per_s")), 3),
        "kv_usage": round(statistics.median(run.usage for run in runs), 3),
        "preemptions_per_1000": round(statistics.median(run.preemptions_per_1000 for run in runs), 2),
        "rps_ratios": [round(ratio, 3) for ratio in ratios(runs, base, "requests_per_s")],
        "time_ratios": {what: [round(ratio, 3) for ratio in ratios(runs, base, what)] for what in LATENCIES.values()},
        "kv_usage_after_steps": round(statistics.median(run.usage_after_steps for run in runs), 3),
        "cpu_s": round(sum(run.cpu_s for run in runs), 1),
    }


def _write(outcomes: list[Outcome], out: Path) -> None:
    """Write every outcome as JSON, and the first run of each policy as one picture, to a directory that is there."""
    for outcome in outcomes:
        path = out / f"{outcome.workload}-{outcome.policy}-{outcome.seed}.json"
        path.write_text(json.dumps(outcome.__dict__))
    first = [outcome.__dict__ for outcome in outcomes if outcome.seed == outcomes[0].seed]
    plot(first, out / f"{outcomes[0].workload}.png", outcomes[0].workload)
