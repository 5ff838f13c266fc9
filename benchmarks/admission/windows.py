"""How many requests a client without Penstock lets into an engine, whoever keeps count."""

from __future__ import annotations

EVERYBODY, WHOLE_WINDOWS, LIVE, ADAPTIVE = "everybody", "whole windows", "live", "adaptive"
"""Who is let in: all; as many as whole windows fit the empty cache, or what is free of it now; by AIMD."""

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


class LiveWindow:
    """A window as large as what runs and the whole windows that are free beside it.

    Who is inside and does not run, on the way or in the engine's line, has taken nothing yet of what the engine says is
    free: for each of them a whole window is set aside.
    """

    def __init__(self, kv_tokens: int, window_tokens: int) -> None:
        """Begin with an empty cache for `kv_tokens` tokens; the longest request has `window_tokens`."""
        self._window_tokens = window_tokens
        self.size = kv_tokens // window_tokens

    def heard(self, running: int, free_tokens: int) -> None:
        """Take in what the engine says: how many requests run, and for how many tokens it has free blocks."""
        self.size = running + free_tokens // self._window_tokens
