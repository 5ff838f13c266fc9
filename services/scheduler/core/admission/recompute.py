"""What a preemption costs the engine of one worker, measured in requests.

A preempted request is computed again as a prefill. How much of the engine's time
that takes, against what a request takes from its first token to its last, differs
a hundredfold: where prompts are long and outputs short a preemption costs as much
as a whole request, where thousands of tokens are decoded next to few others a few
hundredths of one.
"""

from __future__ import annotations

import math

from services.scheduler.core.messages import EngineReport

REMEMBERED_REQUESTS = 256
"""Each end makes older ones count less by one part in so many: a few hundred are enough for a mean."""

LEAST_REQUESTS = 8
"""Before so many have ended the cost is not known."""


class RecomputeCost:
    """Mean cost of a preemption on one worker, from its engine's reports and the requests that ended there."""

    def __init__(self) -> None:
        """Start with nothing known."""
        self._newest: EngineReport | None = None
        self._busy_ns = 0.0
        self._prefill_ns = 0.0
        self._prefill_tokens = 0.0
        self._tokens = 0.0
        self._requests = 0

    def observe(self, report: EngineReport) -> None:
        """Take the engine's counters; what lies before the first report is not known."""
        before, self._newest = self._newest or report, report
        self._busy_ns += max(report.busy_ns - before.busy_ns, 0)
        self._prefill_ns += max(report.prefill_ns - before.prefill_ns, 0)
        self._prefill_tokens += max(report.prefill_tokens - before.prefill_tokens, 0)

    def completed(self, tokens: int) -> None:
        """Note a request that ran to its end with so many tokens, prompt and output."""
        kept = 1 - 1 / REMEMBERED_REQUESTS
        self._requests += 1
        self._tokens = self._tokens * kept + tokens
        self._busy_ns *= kept
        self._prefill_ns *= kept
        self._prefill_tokens *= kept

    @property
    def requests(self) -> float:
        """Engine time of one preemption over that of one request; infinite while it is not known.

        Had every request that ended been preempted at its last token, the engine would have computed all their tokens
        once more, at the speed of its prefills: that time over the time it was busy. It errs upwards: a request that
        is preempted has come less far, some of its blocks may still be in the prefix cache, and prompts that are
        computed in the same step are charged the whole of it each. At first it errs downwards: the engine was busy with
        many requests of which only the short ones have ended, a tenth of the cost where outputs are thousands of tokens
        long (`near-critical` in docs/benchmarks.md). So it does where many are cancelled, which take time and are not
        counted.
        """
        once_ns = self._busy_ns * self._prefill_tokens
        again_ns = self._tokens * self._prefill_ns
        if self._requests < LEAST_REQUESTS or not once_ns or not again_ns:
            return math.inf
        return again_ns / once_ns
