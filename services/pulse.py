"""Whether a service's event loop still turns, told by the thread of the metrics, which goes on where the loop stands.

Every other gauge is set by the loop. One that stands still, as in a write to a disk that hangs, leaves them as they
were last, which is mostly well.
"""

from __future__ import annotations

import asyncio
import time

from prometheus_client import Gauge

BEAT_S = 1.0
"""Between two looks of the loop at the clock."""

SILENT = Gauge("penstock_loop_silent_seconds", "Seconds since the service's event loop last took its turn.")


class Pulse:
    """The pulse of one event loop, from before its first turn: what it begins with may be what hangs."""

    def __init__(self) -> None:
        """Count from now on, and have the gauge ask when it is scraped."""
        self._last_s = time.monotonic()
        SILENT.set_function(self.silent_s)

    def beat(self) -> None:
        """Note that the running loop takes its turn, now and for as long as it runs."""
        self._last_s = time.monotonic()
        asyncio.get_running_loop().call_later(BEAT_S, self.beat)

    def silent_s(self) -> float:
        """Return the seconds since the last beat. Any thread may ask."""
        return time.monotonic() - self._last_s
