"""How long the requests of a channel hold their blocks, as far as it has shown."""

from __future__ import annotations

from typing import Final

MEAN_GAIN: Final = 8
DEVIATION_GAIN: Final = 4
"""An observation moves the mean by 1/8 of what it differs, the deviation by 1/4 (RFC 6298, sections 2 and 3)."""

CAUTIOUS_DEVIATIONS: Final = 4
"""What hardly any exceeds: the mean and four mean deviations, as RFC 6298 sets a retransmission timer."""

UNKNOWN_HOLD_NS: Final = 1_000_000_000
"""What the mean is taken for before any request has ended."""


class HoldTime:
    """A running mean and mean deviation of times, kept as TCP keeps its round-trip time."""

    def __init__(self) -> None:
        """Start with nothing known."""
        self.known = False
        self.mean_ns = UNKNOWN_HOLD_NS
        self.deviation_ns = 0

    def observe(self, held_ns: int) -> None:
        """Take the time for which one request has held blocks."""
        if not self.known:
            self.known = True
            self.mean_ns = held_ns
            self.deviation_ns = held_ns // 2
            return
        off_ns = held_ns - self.mean_ns
        self.deviation_ns += (abs(off_ns) - self.deviation_ns) // DEVIATION_GAIN
        self.mean_ns += off_ns // MEAN_GAIN

    @property
    def cautious_ns(self) -> int | None:
        """A time that hardly any request exceeds; None while nothing is known."""
        return self.mean_ns + CAUTIOUS_DEVIATIONS * self.deviation_ns if self.known else None
