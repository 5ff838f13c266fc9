"""Jittered exponential pauses between reconnects."""

from __future__ import annotations

import random

from services.rpc.limits import BACKOFF_FIRST_S, BACKOFF_MOST_S


class Backoff:
    """Pauses that double up to a bound, each drawn between half and the whole of its step.

    The jitter keeps a fleet that lost one peer from returning in step.
    """

    def __init__(self, first_s: float = BACKOFF_FIRST_S, most_s: float = BACKOFF_MOST_S) -> None:
        """Start at `first_s` seconds and never exceed `most_s`."""
        self._first_s = first_s
        self._most_s = most_s
        self._step_s = first_s

    def reset(self) -> None:
        """Forget the failures: the peer answered."""
        self._step_s = self._first_s

    def next_s(self) -> float:
        """Return the next pause in seconds."""
        pause_s = self._step_s * random.uniform(0.5, 1.0)
        self._step_s = min(self._step_s * 2, self._most_s)
        return pause_s
