"""Time for the shells; the cores are told the time and never ask for it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of the `now_ns` that shells hand to the cores."""

    def now_ns(self) -> int:
        """Return Unix time in nanoseconds, never smaller than the call before."""


class SystemClock:
    """Unix time that cannot run backwards.

    The wall clock is read once; after that the monotonic clock is added, so a
    stepped wall clock neither expires a lease early nor keeps it forever.
    """

    def __init__(self) -> None:
        """Read the wall clock, once."""
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def now_ns(self) -> int:
        """Return Unix time in nanoseconds, never smaller than the call before."""
        return self._offset_ns + time.monotonic_ns()

    def behind_s(self) -> float:
        """Return by how many seconds the wall clock has been set forward since it was read; negative: backward."""
        return (time.time_ns() - self.now_ns()) / 1e9
