"""A timer for a loop that is woken far more often than its timer rings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LEAST_S = 0.001
"""uvloop's timers count whole milliseconds, rounded: one that is set for less rings at once, and one that rang half a
millisecond early would be set again and again until its time has come."""


class Alarm:
    """Rings no later than it was last asked to; one that would ring earlier is left as it is.

    What a session has planned moves on with almost every step of the engine. To ring in vain now and then costs less
    than to cancel a timer and set another one each time.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        """Call `ring` when it rings; it is not set yet."""
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None
        self._at_s = 0.0

    def within(self, delay_s: float) -> None:
        """Ring in `delay_s` seconds at the latest, or LEAST_S if that is less."""
        loop = asyncio.get_running_loop()
        at_s = loop.time() + max(delay_s, LEAST_S)
        if self._timer is not None:
            if self._at_s <= at_s:
                return
            self._timer.cancel()
        self._at_s = at_s
        self._timer = loop.call_at(at_s, self._rung)

    def cancel(self) -> None:
        """Do not ring."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _rung(self) -> None:
        self._timer = None
        self._ring()
