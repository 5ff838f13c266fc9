"""How near the brim a worker is filled, steered by how often its engine preempts.

A slow integral controller: each preemption widens the margin by a step, each
completed request narrows it by the share of a step that brings the two into
balance at the target rate. Where a preemption costs little (`recompute`) and a
margin much, more of them are worth the usage they buy, in proportion.
It also keeps grants away from an engine that has just preempted, until the
preempted requests run again and usage has fallen.
"""

from __future__ import annotations

from typing import Final

from services.scheduler.core.admission.recompute import RecomputeCost
from services.scheduler.core.messages import EngineReport

FIRST_DEVIATIONS: Final = -0.25
"""Margin before anything is known, in standard deviations of the predicted demand: three looks in five overflow, if
normal, and mostly the engine's own watermark (`services/worker/engine.py`) then keeps a newcomer waiting for a step
or two before anybody is preempted. A controller that starts near where it settles does not spend its first thousand
requests on the way."""

UNTARGETED_DEVIATIONS: Final = 3.0
"""The same for a target of 0, which never narrows it: one look in 740 overflows."""

LEAST_DEVIATIONS: Final = -1.0
"""The least margin. The forecast counts what has been granted as if it were in the cache already, and what has ended
as if it still were until that is known. A margin below zero takes this back, as far as preemptions allow."""

MOST_DEVIATIONS: Final = 6.0
"""Beyond this, more margin prevents nothing that a model of independent requests can foresee."""

STEP_DEVIATIONS: Final = 0.2
"""What one preemption adds where few are worth it: at the default target 1,000 requests without one narrow the margin
by a deviation."""

MOST_NARROWING_DEVIATIONS: Final = 0.01
"""The most that one completion takes away: where more than one preemption in twenty requests is worth it, each says
less of the margin, and adds less than a step. With whole steps the margin swings by half a deviation about where it
belongs, and what it leaves empty above costs more than it saves below. So a hundred requests still find it."""

MOST_BURST_STEPS: Final = 5
"""Most steps until the engine has recovered: one overflow preempts many, and it must not cost usage for thousands
of requests."""

DEFAULT_TARGET_PER_1000: Final = 5.0
"""Preemptions per 1,000 completed requests that are worth the usage they buy, or more where they cost less."""

FULL_PRICE_SHARE: Final = 0.025
"""Share of the cache that a deviation of margin leaves empty for each request that a preemption costs, where the
target holds as it is: a pool of some fifty requests (`kv-bound` in docs/benchmarks.md).

Derivation: a narrower margin by one deviation fills `spread` more of the cache, which raises throughput by
`e * spread`; it multiplies the rate r of preemptions, each of which costs c requests, by about `1 + l`. The two
balance at `r = e / l * spread / c`. With e = 0.3 (the part of a step's time that does not grow with what it
computes) and l = 1.5, r = 5 per 1,000 where spread / c = 0.025, and rises in proportion.
"""

MOST_PREEMPTIONS_PER_REQUEST: Final = 0.5
"""However little they cost: more than 500 preemptions per 1,000 requests are a cache that is never at rest. Of one
burst MOST_BURST_STEPS are counted; where bursts are larger more of them happen, as at any target."""


class Margin:
    """The margin of one worker in standard deviations, and whether the engine recovers from a preemption."""

    def __init__(self, target_per_1000: float) -> None:
        """Steer towards `target_per_1000` preemptions at full price for 1,000 requests; 0 never narrows the margin."""
        self.deviations = FIRST_DEVIATIONS if target_per_1000 else UNTARGETED_DEVIATIONS
        self.recovering = False
        self.cost = RecomputeCost()
        self.target_preemptions = 0.0
        """Preemptions that were worth it so far, over all completed requests: as many as it steers to."""
        self._target = target_per_1000 / 1000
        self._step_deviations = STEP_DEVIATIONS
        self._preemptions: int | None = None
        self._burst_steps = 0
        self._usage = 0.0
        self._usage_before = 0.0

    def completed(self, tokens: int, spread: float) -> None:
        """Note a request that ran to its end with so many tokens, prompt and output.

        `spread` is one standard deviation of the predicted demand as a share of the capacity.
        """
        self.cost.completed(tokens)
        worth = max(spread / (FULL_PRICE_SHARE * self.cost.requests), 1.0)
        per_request = max(min(self._target * worth, MOST_PREEMPTIONS_PER_REQUEST), self._target)
        self.target_preemptions += per_request
        if not per_request:
            return
        narrowing = min(per_request * STEP_DEVIATIONS, MOST_NARROWING_DEVIATIONS)
        self._step_deviations = narrowing / per_request
        self.deviations = max(self.deviations - narrowing, LEAST_DEVIATIONS)

    def observe(self, report: EngineReport) -> None:
        """Take the engine's report; preemptions are counted from the first one on."""
        self.cost.observe(report)
        known = report.preemptions if self._preemptions is None else self._preemptions
        new = max(report.preemptions - known, 0)
        self._preemptions = report.preemptions
        if new:
            self._widen(new)
            self.recovering = True
            self._usage_before = max(self._usage, report.kv_cache_usage)
        elif self.recovering:
            fallen = report.waiting == 0 and report.kv_cache_usage < self._usage_before
            self.recovering = not (fallen or report.running + report.waiting == 0)
        self._usage = report.kv_cache_usage

    def _widen(self, preemptions: int) -> None:
        """Widen by a step for each preemption, up to so many in one burst."""
        self._burst_steps = self._burst_steps if self.recovering else 0
        steps = min(preemptions, MOST_BURST_STEPS - self._burst_steps)
        self._burst_steps += steps
        self.deviations = min(self.deviations + steps * self._step_deviations, MOST_DEVIATIONS)
