"""What a channel with a guarantee has lately used of a worker: so much of an idle guarantee is not lent.

A channel of people's requests is often empty for a moment. Lent to the last block each
time, its guarantee would have to be recalled each time, and every request would wait for a
completion. So what it held at its busiest moment of late stays fenced off; what it has not
used lately is lent whole.
"""

from __future__ import annotations

from typing import Final

MEMORY_HOLDS: Final = 16
"""How long is lately, in times of what the channel's requests hold their blocks: time for some bursts to show."""


class Lately:
    """The most blocks and sequences held in this window of time and in the one before. One channel, one worker."""

    __slots__ = ("before_blocks", "before_sequences", "began_ns", "window_blocks", "window_sequences")

    def __init__(self, began_ns: int) -> None:
        """Begin the first window."""
        self.began_ns = began_ns
        self.window_blocks = self.window_sequences = 0
        self.before_blocks = self.before_sequences = 0

    def note(self, blocks: int, sequences: int, now_ns: int, hold_ns: int) -> None:
        """Note what is held now; requests of the channel hold their blocks for about `hold_ns`."""
        self._turn(now_ns, hold_ns)
        self.window_blocks = max(self.window_blocks, blocks)
        self.window_sequences = max(self.window_sequences, sequences)

    def peak_blocks(self, now_ns: int, hold_ns: int) -> int:
        """Return the most blocks that were held lately."""
        self._turn(now_ns, hold_ns)
        return max(self.window_blocks, self.before_blocks)

    def peak_sequences(self, now_ns: int, hold_ns: int) -> int:
        """Return the most sequences that were held lately."""
        self._turn(now_ns, hold_ns)
        return max(self.window_sequences, self.before_sequences)

    def _turn(self, now_ns: int, hold_ns: int) -> None:
        """Begin a new window if this one is over; what is older than two is forgotten."""
        window_ns = MEMORY_HOLDS * hold_ns
        age_ns = now_ns - self.began_ns
        if age_ns >= window_ns:
            recent = age_ns < 2 * window_ns
            self.before_blocks = self.window_blocks if recent else 0
            self.before_sequences = self.window_sequences if recent else 0
            self.window_blocks = self.window_sequences = 0
            self.began_ns = now_ns
