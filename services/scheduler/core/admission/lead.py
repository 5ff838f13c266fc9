"""How many steps a worker's engine takes until what is granted now runs there.

Two measures say so, each a running mean: the time from a grant to its first ACK, and the time of a step. What a disk,
a network or a slow tokenizer puts between them is in the first; no setting names it.
"""

from __future__ import annotations

from typing import Final

from services.scheduler.core.messages import EngineReport
from services.scheduler.core.sharing.hold_time import HoldTime

WAYS: Final = 1.5
"""From the end of one request to the first step of the next there are five messages, its completion ACK before the four
from a grant to its ACK; and what is known of those that run is as old. The simulation tells nothing apart between 1.5
and 4 (`kv-bound`, messages of 1.5 to 40 ms)."""

STEPS_JOINED: Final = 1
"""What has arrived waits for the step under way."""

MOST_ROUND_TRIP_NS: Final = 2_000_000_000
"""An ACK that took longer says no more of the next one: a worker stood still, or a prompt took minutes to count. The
mean is back after some twenty others."""

MOST_STEPS: Final = 256
"""Farther ahead outputs of most kinds have ended: all that runs would seem to make room."""


class Lead:
    """Steps ahead at which a grant meets the cache, of one worker."""

    def __init__(self) -> None:
        """Know nothing: a grant is there at once."""
        self._round_trip = HoldTime()
        self._step = HoldTime()
        self.steps = 0.0

    def answered(self, passed_ns: int) -> None:
        """Take the time from a grant to its first ACK."""
        self._round_trip.observe(min(max(passed_ns, 0), MOST_ROUND_TRIP_NS))
        self._measure()

    def observe(self, report: EngineReport) -> None:
        """Take the time of a step; an engine that has just begun has none."""
        if report.step_ns > 0:
            self._step.observe(report.step_ns)
            self._measure()

    def _measure(self) -> None:
        if self._round_trip.known and self._step.known:
            away = WAYS * self._round_trip.mean_ns / max(self._step.mean_ns, 1)
            self.steps = min(away + STEPS_JOINED, MOST_STEPS)
