"""Tables for a person, and the figures for the closing line of JSON. Absolute times are shown, ratios are reported."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.lifecycle.beside import Beside
from benchmarks.lifecycle.growth import Grown, Growth, Usage, mean_held
from benchmarks.lifecycle.measure import Round
from benchmarks.lifecycle.systems import PENSTOCK, PENSTOCK_COMPILED
from benchmarks.quantile import quantile


def comparison(rounds: Mapping[str, list[Round]], notes: Mapping[str, str]) -> dict[str, Any]:
    """Print the systems side by side; return the figures."""
    print(
        f"{'system':17} {'requests/s':>11} {'CPU us/request':>15} {'wire bytes':>11} {'lone p50 ms':>12} {'p99 ms':>8}"
    )
    systems: dict[str, Any] = {}
    for name, runs in rounds.items():
        figures = systems[name] = _system(runs)
        if notes[name]:
            figures["note"] = notes[name]
        print(
            f"{name:17} {figures['per_s']:11.0f} {figures['cpu_us']:15.0f} {figures['wire_bytes']:11.0f}"
            f" {figures['lone_ms_p50']:12.2f} {figures['lone_ms_p99']:8.2f}  {notes[name]}"
        )
        print(f"{'':17} by process: {figures['cpu_us_by_process']}")
    answer: dict[str, Any] = {"systems": systems}
    ours = rounds.get(PENSTOCK, rounds.get(PENSTOCK_COMPILED))
    if ours is None:
        return answer
    for name in [name for name in rounds if name not in {PENSTOCK, PENSTOCK_COMPILED}]:
        answer[f"rps_ratio_vs_{name}"] = _per_s_ratio(ours, rounds[name])
    answer["lone_added_ms"] = _added(ours)
    if {PENSTOCK, PENSTOCK_COMPILED} <= rounds.keys():
        answer["compiled_vs_interpreted"] = _compiled(rounds[PENSTOCK_COMPILED], ours)
    return answer


def _system(runs: Sequence[Round]) -> dict[str, Any]:
    lone_s = [seconds for run in runs for seconds in run.through_s]
    per_s = [run.flood.per_s for run in runs]
    return {
        "per_s": round(statistics.median(per_s)),
        "per_s_all": [round(value) for value in per_s],
        "cpu_us": round(statistics.median(run.flood.total_cpu_us for run in runs), 1),
        "cpu_us_by_process": {
            name: round(statistics.median(run.flood.cpu_us[name] for run in runs), 1) for name in runs[0].flood.cpu_us
        },
        "wire_bytes": round(statistics.median(run.flood.wire_bytes for run in runs)),
        "lone_ms_p50": round(quantile(lone_s, 0.5) * 1e3, 3),
        "lone_ms_p99": round(quantile(lone_s, 0.99) * 1e3, 3),
    }


def _compiled(compiled: Sequence[Round], interpreted: Sequence[Round]) -> dict[str, Any]:
    """Print and return what compiled services take relative to the same ones interpreted, round by round."""
    pairs = list(zip(compiled, interpreted, strict=True))
    answer: dict[str, Any] = {"per_s": _per_s_ratio(compiled, interpreted)}
    answer["cpu"] = {"all": _spread([a.flood.total_cpu_us / b.flood.total_cpu_us for a, b in pairs])}
    for process in interpreted[0].flood.cpu_us:
        answer["cpu"][process] = _spread([a.flood.cpu_us[process] / b.flood.cpu_us[process] for a, b in pairs])
    answer["lone_p50"] = _spread([quantile(a.through_s, 0.5) / quantile(b.through_s, 0.5) for a, b in pairs])
    print("compiled relative to interpreted, median [least, most] of the rounds:")
    for what, ratio in {"requests/s": answer["per_s"], "lone p50": answer["lone_p50"], **answer["cpu"]}.items():
        print(f"  {what:16} {ratio['median']:.2f} [{ratio['least']:.2f}, {ratio['most']:.2f}]")
    return answer


def _per_s_ratio(ours: Sequence[Round], theirs: Sequence[Round]) -> dict[str, float]:
    return _spread([a.flood.per_s / b.flood.per_s for a, b in zip(ours, theirs, strict=True)])


def _spread(ratios: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
    }


def _added(runs: Sequence[Round]) -> dict[str, float]:
    """Return what a lone request takes beyond calling the engine directly, in milliseconds."""
    through_s = [seconds for run in runs for seconds in run.through_s]
    direct_s = [seconds for run in runs for seconds in run.direct_s]
    return {f"p{int(q * 100)}": round((quantile(through_s, q) - quantile(direct_s, 0.5)) * 1e3, 3) for q in (0.5, 0.99)}


def growth(what: str, by_count: Mapping[int, Grown]) -> dict[str, Any]:
    """Print the figures by number of workers or waiting requests; return them."""
    print(
        f"{what:>10} {'requests/s':>11} {'wire bytes':>11} {'lone p50 ms':>12} {'p99 ms':>8}  CPU us/request by process"
    )
    answer = {}
    for count, (cost, lone_s) in by_count.items():
        by_process = {name: round(us, 1) for name, us in cost.cpu_us.items()}
        p50, p99 = (quantile(lone_s, q) * 1e3 for q in (0.5, 0.99))
        print(f"{count:10} {cost.per_s:11.0f} {cost.wire_bytes:11.0f} {p50:12.2f} {p99:8.2f}  {by_process}")
        answer[str(count)] = {
            "per_s": round(cost.per_s),
            "wire_bytes": round(cost.wire_bytes),
            "lone_ms_p50": round(p50, 3),
            "lone_ms_p99": round(p99, 3),
            "cpu_us_by_process": by_process,
        }
    return answer


def usage(shape: Growth, found: Usage) -> dict[str, Any]:
    """Print how full the fleet was kept; return the figures."""
    held = mean_held(found)
    by_process = {name: round(us, 1) for name, us in found.cost.cpu_us.items()}
    print(
        f"{shape.workers} workers, {found.completed} requests, all completed: {held:.3f} of the blocks held while"
        f" a backlog existed ({len(found.held)} looks, least {min(found.held, default=0.0):.3f});"
        f" {found.completed / found.seconds:.0f} requests/s; CPU us/request {by_process}"
    )
    return {
        "workers": shape.workers,
        "completed": found.completed,
        "held": round(held, 4),
        "held_all": [round(value, 3) for value in found.held],
        "per_s": round(found.completed / found.seconds),
        "cpu_us_by_process": by_process,
    }


def beside(rounds: Sequence[Beside]) -> dict[str, Any]:
    """Print how long lone requests took beside a flood, and alone; return the figures."""
    answer: dict[str, Any] = {"per_s": _spread([run.per_s for run in rounds])}
    for name, q in {"p50": 0.5, "p99": 0.99}.items():
        pairs = [(quantile(run.beside_s, q), quantile(run.alone_s, q)) for run in rounds]
        answer[f"lone_{name}_ms"] = _spread([beside_s * 1e3 for beside_s, _ in pairs])
        answer[f"lone_{name}_vs_alone"] = _spread([beside_s / alone_s for beside_s, alone_s in pairs])
    print("a lone request beside a flood, median [least, most] of the rounds:")
    for what, figure in answer.items():
        print(f"  {what:17} {figure['median']:.2f} [{figure['least']:.2f}, {figure['most']:.2f}]")
    return answer
