"""Jittered exponential pauses between reconnects."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from penstock.limits import BACKOFF_FIRST_S, BACKOFF_MOST_S


class Backoff:
    """Pauses that double up to a bound, each drawn between half and the whole of its step.

    The jitter keeps a fleet that lost one peer from returning in step. The steps begin
    again only after a connection that lasted: two peers that push each other off a
    stream (two workers of one name, two schedulers at one queue) must slow down.
    """

    def __init__(
        self,
        first_s: float = BACKOFF_FIRST_S,
        most_s: float = BACKOFF_MOST_S,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start at `first_s` seconds and never exceed `most_s`."""
        self._first_s = first_s
        self._most_s = most_s
        self._step_s = first_s
        self._monotonic_s = monotonic_s
        self._connected_s: float | None = None

    def connected(self) -> None:
        """Note that the peer answered."""
        self._connected_s = self._monotonic_s()

    def next_s(self) -> float:
        """Return the next pause in seconds."""
        if self._connected_s is not None and self._monotonic_s() - self._connected_s >= self._most_s:
            self._step_s = self._first_s
        self._connected_s = None
        pause_s = self._step_s * random.uniform(0.5, 1.0)
        self._step_s = min(self._step_s * 2, self._most_s)
        return pause_s
