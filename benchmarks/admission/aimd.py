"""A client's window that adapts to the engine's preemptions, whoever keeps it."""

from __future__ import annotations

FIRST_WINDOW = 4
"""Requests that an AIMD client begins with; it knows nothing of the engine."""


class AdaptiveWindow:
    """A window that grows by one for every window's worth of answers and is halved by a preemption.

    As TCP's congestion avoidance (RFC 5681, section 3.1), slow start included; halved at most once for the requests
    that were inside when it last was: they may still be preempted for the same reason.
    """

    def __init__(self) -> None:
        """Begin small."""
        self.size = float(FIRST_WINDOW)
        self._protected = 0
        self._growing = True

    def adapt(self, answered: int, inside: int, preempted: bool) -> None:
        """Change the size after so many answers, with so many requests left inside."""
        self._protected = max(self._protected - answered, 0)
        if preempted and not self._protected:
            self._growing = False
            self._protected = inside
            self.size = max(self.size / 2, 1.0)
        elif not preempted:
            # Slow start doubles the window in its own round trip; afterwards a window's worth of answers adds one.
            self.size += answered * (1.0 if self._growing else 1.0 / self.size)
