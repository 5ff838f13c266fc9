"""KV usage of each worker over the last minutes, in a ring of samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

SPAN_S = 300.0
"""Five minutes: long enough to see a load come and go."""

STEP_S = 2.0
"""Least time between two samples: 150 points are as many as a line a few hundred pixels wide can show."""


class Series(NamedTuple):
    """The samples, oldest first."""

    ages_s: list[float]
    usage: dict[str, list[float | None]]
    """Share of KV-cache blocks in use by worker, one per age; None where the worker was not there."""


class History:
    """At most SPAN_S / STEP_S samples of the usage of every worker."""

    def __init__(self, span_s: float = SPAN_S, step_s: float = STEP_S) -> None:
        """Keep what is at most `span_s` old, and of samples closer than `step_s` the first."""
        self._span_s = span_s
        self._step_s = step_s
        self._samples: deque[tuple[float, dict[str, float]]] = deque(maxlen=int(span_s / step_s) + 1)

    def add(self, at_s: float, usage: Mapping[str, float]) -> None:
        """Take a sample of a monotonic time, unless there is one of just before; empty if nobody could be asked."""
        # A timer that fires a little early is still on time.
        if not self._samples or at_s - self._samples[-1][0] >= 0.9 * self._step_s:
            self._samples.append((at_s, dict(usage)))

    def series(self, now_s: float, workers: list[str]) -> Series:
        """Return the samples of `workers`."""
        kept = [(at_s, usage) for at_s, usage in self._samples if now_s - at_s <= self._span_s]
        ages = [round(now_s - at_s, 1) for at_s, _ in kept]
        return Series(ages, {worker: [_rounded(usage.get(worker)) for _, usage in kept] for worker in workers})


def _rounded(usage: float | None) -> float | None:
    return None if usage is None else round(usage, 4)
