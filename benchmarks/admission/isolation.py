"""What a flood of one channel costs another, on a simulated engine: waits for a grant and for the first token.

Usage: python -m benchmarks.admission.isolation [--policies predictive,virtual-channels] [--share 0.1]
       [--per-second 10] [--ratio 100] [--seconds 240] [--seeds 0,1,2]

`interactive` (weight 4, a guarantee of 0.1 as the default configuration has it) has ten short requests a second, which
hold about a fiftieth of the cache. `batch` has a backlog that never ends, of outputs that are long and differ: `flood`,
with a hundred of them in the cache at once, or `whales`, with two dozen. `--ratio` of it wait for each request of
`interactive` that has not ended, and at least 300. `alone` is `interactive` on a worker as large as its share. Nothing
is known at first; the first quarter of the time, in which the policy learns, is told apart (`cold`). What `interactive`
has booked on the worker is told as a part of its guarantee, in the mean and at most: it is isolated while it stays
within that. Batch throughput is relative to a run without `interactive`. Last line of each is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.admission.clock import MS, SECOND_NS
from benchmarks.admission.report import spread
from benchmarks.admission.stage import Stage
from benchmarks.options import above, at_least, each, from_on, some_of
from benchmarks.quantile import quantile
from services.scheduler.core.admission.policies import POLICIES
from services.scheduler.core.sharing.share import Share

INTERACTIVE, BATCH = "interactive", "batch"
SHARE = 0.1
PER_SECOND = 10.0
LEAST_SECONDS = 60
"""The shortest of the outputs of `whales` take a sixth of it, and the requests of a quarter of it have a p99."""

RATIO = 100.0
"""Batch requests that wait for each interactive one that has not ended."""

LEAST_BACKLOG = 300
"""Batch requests that wait however few interactive ones there are: more than the cache of any load takes."""

TOP_UP_NS = 50 * MS
LOOK_NS = 100 * MS
"""Between two looks at what is booked."""

COLD = 0.25
"""Part of the time that counts as cold."""


class Load(NamedTuple):
    """What waits beside `interactive`: output tokens from and to, their limit, and the blocks of the worker."""

    outputs: tuple[int, int]
    max_tokens: int
    blocks: int


LOADS = {"flood": Load((300, 1200), 2000, 6000), "whales": Load((1000, 6000), 8000, 4000)}


class Waits(NamedTuple):
    """Of one run: waits in ms by what for, cold and later; batch tokens/s, preemptions per 1,000, and usage.

    `booked` is what `interactive` had booked after the cold part, of what it is guaranteed: the mean and the most.
    `unended` is how many of its requests had come and not ended then, in the mean; `ratio` how many of `batch` waited
    for each of them, at least.
    """

    waits_ms: dict[str, float]
    batch_tokens_per_s: float
    preemptions_per_1000: float
    usage: float
    booked: tuple[float, float]
    unended: float
    ratio: float


class Run:
    """One run of `seconds`, with or without either channel."""

    def __init__(
        self,
        policy: str,
        load: Load,
        seconds: float,
        seed: int,
        channels: Sequence[str],
        share: float = SHARE,
        per_second: float = PER_SECOND,
        ratio: float = RATIO,
    ) -> None:
        """Submit for these channels, `per_second` for `interactive`, which is guaranteed `share`.

        Without `batch` it is alone on a worker of that size; else `ratio` of `batch` wait for each of its requests.
        """
        alone = BATCH not in channels
        blocks = max(int(load.blocks * share), 512) if alone else load.blocks
        shares = {INTERACTIVE: Share(4.0, 0.0 if alone else share), BATCH: Share()}
        self._stage = Stage(policy, shares, blocks)
        self._load, self._seconds, self._per_second, self._ratio = load, seconds, per_second, ratio
        self._guaranteed_blocks = load.blocks * share
        self._booked: list[float] = []
        self._unended: list[int] = []
        self._ratios: list[tuple[int, int]] = []
        """At each look: requests of `interactive` that have not ended, and those of `batch` that wait."""
        self._draws = {channel: random.Random(f"{seed} {channel}") for channel in channels}
        if INTERACTIVE in channels:
            self._stage.clock.after(0, self._come)
        if BATCH in channels:
            self._stage.clock.after(0, self._top_up)
        self._stage.clock.after(int(seconds * COLD * SECOND_NS), self._look)

    def waits(self) -> Waits:
        """Run to the end and return what was seen."""
        stage = self._stage
        stage.run_until(self._seconds)
        end_ns = stage.clock.now_ns
        warm_ns = int(end_ns * COLD)
        found: dict[str, float] = {}
        for when, came in (
            ("cold ", stage.of(INTERACTIVE, 0, warm_ns)),
            ("", stage.of(INTERACTIVE, warm_ns, end_ns)),
        ):
            for what, wait_ns in (("grant", stage.grant_wait_ns), ("ttft", stage.first_token_ns)):
                waits = [wait_ns(number) for number in came]
                found |= {f"{when}{what} p{share}": quantile(waits, share / 100) / MS for share in (50, 99)}
        lives, meter = stage.meter.lives, stage.meter
        batch = sum(lives[number].tokens for number in stage.of(BATCH) if lives[number].done_ns >= warm_ns)
        preemptions = 1000 * meter.preemptions / max(meter.finished, 1)
        booked = (statistics.mean(self._booked), max(self._booked))
        unended = statistics.mean(count for count, _ in self._ratios)
        ratio = min((waiting / count for count, waiting in self._ratios if count), default=0.0)
        throughput = batch * SECOND_NS / (end_ns - warm_ns)
        return Waits(found, throughput, preemptions, meter.backlog_usage, booked, unended, ratio)

    def _come(self) -> None:
        draw = self._draws[INTERACTIVE]
        self._unended.append(self._stage.ask(INTERACTIVE, draw.randint(30, 60), draw.randint(30, 90), 100))
        if BATCH in self._draws:
            self._fill()
        self._stage.clock.after(int(draw.expovariate(self._per_second) * SECOND_NS), self._come)

    def _top_up(self) -> None:
        self._fill()
        self._stage.clock.after(TOP_UP_NS, self._top_up)

    def _fill(self) -> None:
        draw, load = self._draws[BATCH], self._load
        wanted = max(round(self._ratio * self._count_unended()), LEAST_BACKLOG)
        for _ in range(wanted - self._stage.penstock.waiting(BATCH)):
            self._stage.ask(BATCH, draw.randint(100, 300), draw.randint(*load.outputs), load.max_tokens)

    def _look(self) -> None:
        blocks = sum(worker.ledger.held_by(INTERACTIVE) for worker in self._stage.penstock.machine.fleet)
        self._booked.append(blocks / self._guaranteed_blocks)
        self._ratios.append((self._count_unended(), self._stage.penstock.waiting(BATCH)))
        self._stage.clock.after(LOOK_NS, self._look)

    def _count_unended(self) -> int:
        lives = self._stage.meter.lives
        self._unended = [number for number in self._unended if lives[number].done_ns < 0]
        return len(self._unended)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", type=some_of(POLICIES), default="predictive,virtual-channels")
    parser.add_argument("--loads", type=some_of(LOADS), default="flood,whales")
    parser.add_argument("--share", type=above(0, 1), default=SHARE, help="what `interactive` is guaranteed")
    parser.add_argument("--per-second", type=from_on(1), default=PER_SECOND, help="requests of `interactive`")
    parser.add_argument("--ratio", type=from_on(0), default=RATIO, help="of `batch` wait for each of `interactive`")
    parser.add_argument("--seconds", type=at_least(LEAST_SECONDS), default=240)
    parser.add_argument("--seeds", type=each(at_least(0)), default="0,1,2")
    options = parser.parse_args()
    for load in options.loads:
        for policy in options.policies:
            compare(load, policy, options)


def compare(load: str, policy: str, options: argparse.Namespace) -> None:
    """Run alone, beside the flood, and the flood alone; print the waits and a line of JSON."""
    share, per_second, ratio = options.share, options.per_second, options.ratio
    ways = {"alone": (INTERACTIVE,), "beside": (INTERACTIVE, BATCH), "batch alone": (BATCH,)}
    runs = {
        way: [
            Run(policy, LOADS[load], options.seconds, seed, channels, share, per_second, ratio).waits()
            for seed in options.seeds
        ]
        for way, channels in ways.items()
    }
    print(f"{load}, {policy}, guaranteed {share:g}, {per_second:g} a second:")
    for way in ("alone", "beside"):
        waits = [run.waits_ms for run in runs[way]]
        row = "  ".join(f"{name} {spread([found[name] for found in waits], 1)}" for name in waits[0])
        print(f"  {way:7} ms: {row}")
    pairs = zip(runs["beside"], runs["batch alone"], strict=True)
    throughput = [beside.batch_tokens_per_s / alone.batch_tokens_per_s for beside, alone in pairs]
    preemptions = [run.preemptions_per_1000 for run in runs["beside"]]
    usage = [run.usage for run in runs["beside"]]
    booked = {way: [[run.booked[which] for run in runs[way]] for which in (0, 1)] for way in ("alone", "beside")}
    print(
        f"  batch tokens/s of what it does alone {spread(throughput, 3)}, "
        f"preemptions per 1,000 {spread(preemptions, 0)}, KV usage {spread(usage, 3)}"
    )
    for way, (mean, most) in booked.items():
        print(f"  {way:7} booked, of the guarantee: mean {spread(mean)}, most {spread(most)}", flush=True)
    unended, ratios = [run.unended for run in runs["beside"]], [run.ratio for run in runs["beside"]]
    print(f"  interactive, not ended: mean {spread(unended, 1)}; batch that wait for each: least {spread(ratios, 0)}")
    medians = {
        way: {name: round(statistics.median(run.waits_ms[name] for run in runs[way]), 2) for name in found.waits_ms}
        for way, (found, *_) in runs.items()
        if way != "batch alone"
    }
    line = {"benchmark": "isolation", "load": load, "policy": policy, "share": share, "per_second": per_second}
    line |= {
        **medians,
        "booked": {way: [round(statistics.median(of), 3) for of in both] for way, both in booked.items()},
        "unended": round(statistics.median(unended), 1),
        "ratio": round(min(ratios), 1),
    }
    print(json.dumps({**line, "batch_throughput": round(statistics.median(throughput), 3)}), flush=True)


if __name__ == "__main__":
    main()
