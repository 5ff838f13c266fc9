"""Workers that the scheduler knew a moment ago and knows no longer: it forgets one at the end of its grace period."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.live.history import SPAN_S
from penstock.live.reading import Reading
from penstock.live.state import GONE, state_of

SETTLING_S = 10.0
"""Age of a scheduler up to which who is missing may still come back to it."""

MOST_REMEMBERED = 1000
"""Workers that have gone: more than a large fleet loses at once. Of more the latest are kept."""


@dataclass(frozen=True, slots=True)
class Departed:
    """A worker that has gone."""

    name: str
    model: str
    was: str
    """Its state when it was last connected: up, draining or drained; empty if it was never seen so.

    One that was up has died, or was cut off."""
    ago_s: float
    """How long it has not been connected, to the reading."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A worker as it was when it was last connected."""

    model: str
    state: str
    at_s: float


class Departures:
    """Remembers for a few minutes who has gone."""

    def __init__(self, span_s: float = SPAN_S) -> None:
        """Remember each for `span_s` seconds."""
        self._span_s = span_s
        self._there: dict[str, _Seen] = {}
        """Whom the scheduler told of last."""
        self._gone: dict[str, _Seen] = {}
        """Whom it tells of no more, the latest last."""

    def take(self, reading: Reading) -> tuple[Departed, ...]:
        """Return who has gone as of `reading`, the latest; those first that went last.

        A scheduler that does not answer tells of nobody's end, nor does one that has just been started, which knows
        nobody at first.
        """
        if reading.fleet is not None:
            told = {worker.worker_id: worker for worker in reading.fleet.workers}
            there: dict[str, _Seen] = {}
            for name, worker in told.items():
                self._gone.pop(name, None)
                before = self._there.get(name)
                away = state_of(worker) == GONE
                seen = _Seen(worker.model, "" if away else state_of(worker), reading.at_s)
                there[name] = before if away and before else seen
            missing = {name: seen for name, seen in self._there.items() if name not in told}
            if 0 < reading.fleet.up_ns < SETTLING_S * 1e9:
                there |= missing
            else:
                self._gone |= missing
            self._there = there
        self._gone = {name: seen for name, seen in self._gone.items() if reading.at_s - seen.at_s <= self._span_s}
        for name in list(self._gone)[:-MOST_REMEMBERED]:
            del self._gone[name]
        latest = sorted(self._gone.items(), key=lambda item: (-item[1].at_s, item[0]))
        return tuple(Departed(name, seen.model, seen.state, reading.at_s - seen.at_s) for name, seen in latest)
