"""How old what a store keeps is, where the clocks of its lives contradict each other.

Each life reads the machine's clock once, and stamps by it what it stores. Between the last that is known of the clock
of one life and the first of the next lies a gap: time for which no queue ran, or what one of the clocks is wrong by,
and nobody can tell which. What is kept for some time would be gone at once if a wrong clock were taken for time that
has passed, so a long gap counts for none.
"""

from __future__ import annotations

from typing import Final, NamedTuple

COUNTED_GAP_NS: Final = 600 * 1_000_000_000
"""A gap up to here is counted: to start a queue again, on another machine too, takes minutes. So a clock that is wrong
by less costs what is kept as much of its time, and few starts leave a gap to be remembered."""

MOST_GAPS: Final = 256
"""Gaps that are remembered; of more, the two oldest count as one, with what lies between them."""


class Gap(NamedTuple):
    """From the last that is known of the clock of one life to the first of the next, Unix time."""

    from_ns: int
    until_ns: int


class Ages(NamedTuple):
    """The gaps that are not counted, oldest first; none reaches beyond the start of the present life."""

    gaps: tuple[Gap, ...] = ()

    def begun(self, known_ns: int, now_ns: int) -> Ages:
        """Return the ages of a life that begins at `now_ns`, after one of whose clock `known_ns` is the last known.

        Where the clock has gone back, what it said beyond `now_ns` is forgotten.
        """
        gaps = [Gap(gap.from_ns, min(gap.until_ns, now_ns)) for gap in self.gaps if gap.from_ns < now_ns]
        if now_ns - known_ns > COUNTED_GAP_NS:
            gaps.append(Gap(known_ns, now_ns))
        if len(gaps) > MOST_GAPS:
            gaps[:2] = [Gap(gaps[0].from_ns, gaps[1].until_ns)]
        return Ages(tuple(gaps))

    def ago(self, now_ns: int, age_ns: int) -> int:
        """Return what the clock said when that was stored which is `age_ns` old now."""
        for gap in reversed(self.gaps):
            since_ns = now_ns - gap.until_ns
            if since_ns >= age_ns:
                break
            age_ns -= since_ns
            now_ns = gap.from_ns
        return now_ns - age_ns


NO_GAPS: Final = Ages()
"""Of a store whose clock has never leapt, as far as is known."""
