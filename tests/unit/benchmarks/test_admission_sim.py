"""The simulated admission benchmark: every policy does the same work, whole, and what it says of it adds up."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.admission import isolation, makespan, real, sim, workloads
from benchmarks.admission.clock import SECOND_NS
from benchmarks.admission.meter import Life, Meter
from benchmarks.admission.report import Outcome, print_table
from benchmarks.admission.sides import Done, Pushed
from benchmarks.admission.workloads import Workload
from services.worker.engine import ENGINE_WATERMARK

SMALL = replace(workloads.SCALES["cpu"], factor=1 / 16, block_size=16, pool_windows=2)


def small(name: str, count: int = 60) -> Workload:
    """Return a workload whose windows are a sixteenth of the full ones."""
    return workloads.WORKLOADS[name](count, SMALL, 0)


def check(meter: Meter, workload: Workload) -> None:
    """Assert that every request ran once, to its length, and that no time or block is counted twice."""
    assert [life.tokens for life in meter.lives] == [item.output_tokens for item in workload.items]
    assert meter.finished == len(workload.items)
    assert meter.waiting == 0
    assert len(meter.gaps_ns) == sum(item.output_tokens - 1 for item in workload.items)
    for life in meter.lives:
        assert life.arrived_ns <= life.entered_ns < life.first_ns <= life.last_ns == life.done_ns
    # The KV of a last token is never written; a prefix cache computes less, a preemption the lost part again.
    needed = sum(item.prompt_tokens + item.output_tokens - 1 for item in workload.items)
    if not workload.shape.prefix_caching:
        assert meter.computed_tokens == needed + meter.recomputed_tokens
    assert (workload.load is None) <= (meter.backlog_block_ns > 0)
    assert meter.backlog_block_ns <= meter.block_ns
    assert 0 < meter.held_block_ns <= meter.block_ns


@pytest.mark.parametrize("policy", sim.SIDES)
def test_every_policy_runs_every_request_once(policy: str) -> None:
    workload = small("kv-bound")
    check(sim.run(policy, workload), workload)


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_every_workload_runs_to_its_end(name: str) -> None:
    workload = small(name)
    rps = sim.saturated_rps(workload) if workload.load else 0.0
    for policy in ("push", "predictive"):
        check(sim.run(policy, workload, rps), workload)


def test_a_run_repeats_to_the_nanosecond() -> None:
    workload = small("kv-bound")
    assert sim.run("predictive", workload) == sim.run("predictive", small("kv-bound"))


def test_noise_changes_what_prompts_say_of_themselves_and_not_what_they_are() -> None:
    workload = small("kv-bound", 400)
    noisy = workloads.noisy(workload, 0.3, 0)
    assert [replace(item, bytes_per_token=4.0) for item in noisy.items] == workload.items
    logs = [math.log(item.bytes_per_token) for item in noisy.items]
    assert statistics.pstdev(logs) == pytest.approx(0.3, rel=0.1)
    assert statistics.mean(item.bytes_per_token for item in noisy.items) == pytest.approx(4.0, rel=0.05)
    assert sim.run("push", noisy) == sim.run("push", workload)
    meter = sim.run("predictive", noisy)
    check(meter, noisy)
    assert meter != sim.run("predictive", workload)


def test_the_old_pull_keeps_to_whole_windows_and_pushing_preempts() -> None:
    workload = small("limit32k-use4k")
    pull, push = sim.run("old-pull", workload), sim.run("push", workload)
    assert pull.preemptions == 0 < push.preemptions
    assert max(usage for _, _, usage, _ in pull.samples) < max(usage for _, _, usage, _ in push.samples)
    assert push.recomputed_tokens > 0


def test_the_live_pull_goes_by_what_is_free_and_not_by_what_requests_grow_to() -> None:
    workload = small("limit32k-use4k")
    old, live, push = (sim.run(policy, workload) for policy in ("old-pull", "live-pull", "push"))
    assert 2 * old.backlog_usage < live.backlog_usage < push.backlog_usage
    assert live.preemptions < push.preemptions
    # Half a window each when they start, a whole one when they end: there is always room for one more.
    half = workload.shape.window_tokens // 2
    growing = replace(workload, items=[workloads.Item(half, half, half)] * 20)
    old, live = (sim.run(policy, growing) for policy in ("old-pull", "live-pull"))
    assert old.preemptions == 0 < live.preemptions


def test_timed_requests_arrive_at_their_times() -> None:
    workload = small("near-critical")
    meter = sim.run("push", workload, 10.0)
    wanted = [int(moment * 1e9) for moment in workload.arrivals_s(10.0)]
    assert [life.arrived_ns for life in meter.lives] == wanted
    mean_gap_ns = wanted[-1] / (len(wanted) - 1)
    assert mean_gap_ns == pytest.approx(1e9 / 9.5, rel=0.5)


@pytest.mark.parametrize("way", makespan.WAYS)
def test_a_fleet_divides_the_work(way: str) -> None:
    workload = small("bimodal", 102)
    batch = makespan.Batch(workload.items, "predictive")
    shapes = makespan.fleet(workload.shape, (1.0, 0.5))
    meter = makespan.run(way, batch, shapes)
    check(meter, workload)
    assert {index for _, index, _, _ in meter.samples} == {0, 1}
    least = makespan.Alone(batch).least(shapes)
    assert 0 < least.steady_s <= least.as_one_s
    assert meter.elapsed_s >= least.as_one_s * 0.95


def test_the_rivals_of_penstock_have_its_watermark_too() -> None:
    for name, way in makespan.WAYS.items():
        assert (way.watermark == ENGINE_WATERMARK) == (name == "penstock" or name.endswith("-0.02"))
    assert {name.removesuffix("-0.02") for name in makespan.WAYS if name.endswith("-0.02")} == {
        name for name, way in makespan.WAYS.items() if way.router and not way.watermark
    }


def test_a_steady_speed_is_that_of_the_middle() -> None:
    # A request of ten tokens ends every second, but for the last, which ends after as long again.
    lives = [Life(arrived_ns=0, done_ns=second * SECOND_NS) for second in (*range(1, 10), 20)]
    items = [workloads.Item(6, 4, 8)] * len(lives)
    assert makespan.steady_tokens_per_s(Meter(lives), items) == pytest.approx(10 * 8 / (0.7 * 20))


def test_every_way_is_told_relative_to_both_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["makespan", "--requests", "60", "--seeds", "0,1"])
    monkeypatch.setattr(makespan, "FLEETS", {"2 equal": (1.0, 1.0)})
    makespan.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["policy"] for line in lines] == list(makespan.WAYS)
    for line in lines:
        for what in ("as_one", "steady"):
            assert line[f"over_{what}"] == pytest.approx(statistics.median(line[f"{what}_ratios"]), abs=1e-3)
            assert len(line[f"{what}_ratios"]) == 2


def test_what_a_channel_has_booked_follows_its_load() -> None:
    load = isolation.LOADS["flood"]
    channels = (isolation.INTERACTIVE,)
    runs = [isolation.Run("predictive", load, 8, 0, channels, per_second=rate).waits() for rate in (10.0, 40.0)]
    (mean, most), (mean_of_more, _) = (run.booked for run in runs)
    assert 0 < mean < most < 1
    assert mean_of_more == pytest.approx(4 * mean, rel=0.5)


@pytest.mark.parametrize("ratio", [20.0, 100.0])
def test_a_flood_is_as_many_times_the_other_channel_as_it_is_said_to_be(ratio: float) -> None:
    channels = (isolation.INTERACTIVE, isolation.BATCH)
    run = isolation.Run("predictive", isolation.LOADS["flood"], 4, 0, channels, per_second=40.0, ratio=ratio).waits()
    assert run.unended > isolation.LEAST_BACKLOG / ratio
    assert run.ratio > 0.99 * ratio  # a grant of `batch` is made up for within 50 ms


def test_the_closing_lines_have_their_form(capsys: pytest.CaptureFixture[str]) -> None:
    workload = small("kv-bound")
    outcomes = [Outcome.of("kv-bound", policy, 0, workload, sim.run(policy, workload)) for policy in ("push", "aimd")]
    first, second = print_table(outcomes)
    wanted = ["workload", "policy", "rps_ratio_vs_push", "kv_usage", "preemptions_per_1000"]
    assert list(first)[:5] == wanted
    assert (first["policy"], first["rps_ratio_vs_push"]) == ("push", 1.0)
    assert second["rps_ratio_vs_push"] == pytest.approx(
        outcomes[1].requests_per_s / outcomes[0].requests_per_s, abs=1e-3
    )
    assert second["time_ratios"]["itl_p99_s"] == [
        pytest.approx(outcomes[1].latencies["itl_p99_s"] / outcomes[0].latencies["itl_p99_s"], abs=1e-3)
    ]
    assert sum(line.split()[:1] == ["aimd"] for line in capsys.readouterr().out.splitlines()) == 2


def test_every_ratio_has_its_spread(capsys: pytest.CaptureFixture[str]) -> None:
    workload = small("kv-bound")
    first = Outcome.of("kv-bound", "push", 0, workload, sim.run("push", workload))
    slower = replace(first, policy="aimd", latencies={what: 2 * value for what, value in first.latencies.items()})
    print_table([first, replace(first, seed=1), slower, replace(first, policy="aimd", seed=1)])
    times = [line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["aimd"]][1]
    assert times.split()[1:] == ["1.50", "[1.00-2.00]"] * 6


def test_what_cannot_be_told_is_not_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    workload = small("kv-bound")
    outcome = Outcome.of("kv-bound", "push", 0, workload, sim.run("push", workload))
    print_table([replace(outcome, recomputed_share=None)])
    row = capsys.readouterr().out.splitlines()[1]
    assert row.endswith(" –")
    assert "%" not in row


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_what_preemptions_cost_is_not_told_beside_a_prefix_cache(
    prefix_caching: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = small("kv-bound", 1)
    shape = replace(made.shape, prefix_caching=prefix_caching)
    workload = replace(made, shape=shape, items=[workloads.Item(8, 1, 8)])
    step = {"scheduled_ns": 1, "updated_ns": 2, "held": 1, "held_after": 0, "running": 1, "preempted": 0}

    class Ran(Pushed):
        """A side whose engine computed ten tokens for a prompt of eight."""

        async def run(self, *_arguments: Any) -> Done:
            line = {**step, "computed": 10, "entered": [0], "tokens": [(0, 1, True)]}
            self.trace.write_text(json.dumps(line) + "\n")
            return Done(0, 3, 1)

    monkeypatch.setattr(real, "batch_lines", lambda *_arguments: [])
    bench = real.Bench({"push": Ran([], tmp_path, 1)}, tmp_path, tmp_path)
    outcome = asyncio.run(bench.run("push", workload, 0, 0.0))
    assert outcome.recomputed_share == (None if prefix_caching else 2 / 8)


@pytest.mark.parametrize("policies", ["ab", "abc", "abcd", "abcde", "abcdefg"])
def test_no_policy_always_follows_the_same_other(policies: str) -> None:
    rounds = [real.order(list(policies), number) for number in range(2 * len(policies))]
    assert all(sorted(one) == list(policies) for one in rounds)
    places = Counter((policy, at) for one in rounds for at, policy in enumerate(one))
    assert set(places.values()) == {2}
    followed = Counter(pair for one in rounds for pair in pairwise(one))
    assert set(followed.values()) == {2}
    assert len(followed) == len(policies) * (len(policies) - 1)


def test_each_seed_has_its_own_stretch_of_the_mooncake_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"input_length": 600 + number, "output_length": 40, "hash_ids": [number, -1]} for number in range(9)]
    (tmp_path / workloads.MOONCAKE_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("PENSTOCK_TRACES", str(tmp_path))
    found = [workloads.mooncake(4, workloads.SCALES["gpu"], seed).items for seed in (0, 1)]
    assert [[item.prompt_tokens for item in items] for items in found] == [[600, 601, 602, 603], [604, 605, 606, 607]]
    with pytest.raises(SystemExit, match="has 1 requests"):
        workloads.mooncake(4, workloads.SCALES["gpu"], 2)


@pytest.mark.parametrize("main", [sim, real], ids=["sim", "real"])
def test_a_trace_that_is_too_short_for_one_workload_is_told_before_any_runs(
    main: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / workloads.MOONCAKE_FILE).write_text("")
    monkeypatch.setenv("PENSTOCK_TRACES", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["main", "--workload", "all", "--requests", "20"])
    monkeypatch.setattr(main, "compare", lambda *_arguments: pytest.fail("something ran"))
    with pytest.raises(SystemExit, match=r"^mooncake: .* has 0 requests .* leave mooncake out"):
        main.main()
