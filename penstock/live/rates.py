"""How fast requests end, from counters that a restart sets back to 0."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from penstock.live.reading import Reading

WINDOW_S = 10.0
"""Rates are means over this long: requests end in bursts, and a number that jumps every second cannot be read."""


class Rate(NamedTuple):
    """Of one channel, or of all; both count requests when they end."""

    requests_per_s: float
    tokens_per_s: float


class _Sample(NamedTuple):
    at_s: float
    ended: Mapping[str, int]
    tokens: Mapping[str, int]


class Rates:
    """Rates per channel over the last readings in which the queue answered."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        """Look back `window_s` seconds, or to the reading before if that is longer ago."""
        self._window_s = window_s
        self._samples: deque[_Sample] = deque()

    def take(self, reading: Reading) -> dict[str, Rate]:
        """Return the rate of each channel as of `reading`, the latest.

        Empty if the queue did not tell, or has told only once.
        """
        if reading.counts is None:
            return {}
        self._samples.append(_Sample(reading.at_s, reading.ended(), reading.tokens()))
        while len(self._samples) > 2 and self._samples[1].at_s <= reading.at_s - self._window_s:
            self._samples.popleft()
        past_s = reading.at_s - self._samples[0].at_s
        if past_s <= 0:
            return {}
        return {channel: self._rate(channel, past_s) for channel in self._samples[-1].ended}

    def _rate(self, channel: str, past_s: float) -> Rate:
        ended = grown([sample.ended.get(channel, 0) for sample in self._samples])
        tokens = grown([sample.tokens.get(channel, 0) for sample in self._samples])
        return Rate(ended / past_s, tokens / past_s)


def grown(counts: list[int]) -> int:
    """Return by how much a counter grew over its values in order of time.

    A value below the one before means that the counter began again at 0 (as Prometheus' `increase` has it); what it
    counted between the last value and the restart is not known and left out.
    """
    return sum(after - before if after >= before else after for before, after in pairwise(counts))


def total(rates: Mapping[str, Rate]) -> Rate | None:
    """Return the rate over all channels; None if it is not known."""
    if not rates:
        return None
    return Rate(sum(r.requests_per_s for r in rates.values()), sum(r.tokens_per_s for r in rates.values()))
