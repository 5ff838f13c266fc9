"""The live audit of the scheduler: each ledger by its own law, and the backlog against lines and ledgers.

The ledgers are recomputed whole, as many of them as REQUESTS_PER_LOOK reservations go into, the next ones at the
next look; so are the requests of the backlog. An audit never holds the loop up however large the fleet is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.scheduler.core.backlog import Backlog
from services.scheduler.core.entry import Entry
from services.scheduler.core.fleet import Fleet
from services.scheduler.core.lifecycle import State
from services.scheduler.core.sharing.channel import Channel

REQUESTS_PER_LOOK = 2048
"""Reservations, and requests of the backlog, looked at each time: a millisecond's work; at five looks a second a fleet
that runs 10,000 requests comes round once a second."""

BACKLOG = "backlog"
"""Named in the place of a worker by violations that concern none."""

HELD_STATES = (State.GRANTED, State.UNLISTED, State.RELISTED)


class Audit:
    """Walks ledgers and backlog. It only reads."""

    def __init__(self, fleet: Fleet, backlog: Backlog, channels: dict[str, Channel]) -> None:
        """Begin with the first worker and the first request."""
        self._fleet = fleet
        self._backlog = backlog
        self._channels = channels
        self._epochs: list[int] = []
        self._names: list[str] = []

    def look(self, channel_of: Callable[[str], Channel]) -> list[tuple[str, tuple[str, ...]]]:
        """Check the totals and the next slice; return (worker, violations) of each that has some.

        `channel_of` tells in which arbitration channel the requests of a channel wait.
        """
        found = list(self._next_ledgers())
        violations = (*self._totals(), *self._next_requests(channel_of))
        return [*found, (BACKLOG, violations)] if violations else found

    def _next_ledgers(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        if not self._epochs:
            self._epochs = [worker.epoch for worker in self._fleet]
        looked_at = 0
        while self._epochs and looked_at < REQUESTS_PER_LOOK:
            worker = self._fleet.get(self._epochs.pop())
            if worker is None:
                continue
            looked_at += max(len(worker.ledger), 1)
            violations = worker.ledger.audit()
            if violations:
                yield worker.worker_id, tuple(violations)

    def _totals(self) -> Iterator[str]:
        counted = sum(self._backlog.waiting.values())
        waiting = sum(len(channel) for channel in self._channels.values())
        in_lines = sum(len(line) for channel in self._channels.values() for line in channel.lines.values())
        if not counted == waiting == in_lines:
            yield f"the backlog counts {counted} waiting requests, the channels {waiting}, their lines hold {in_lines}"
        if min(self._backlog.waiting.values(), default=0) < 0:
            yield f"a channel counts less than no request: {dict(self._backlog.waiting)}"

    def _next_requests(self, channel_of: Callable[[str], Channel]) -> Iterator[str]:
        if not self._names:
            self._names = self._backlog.names()
        for _ in range(min(REQUESTS_PER_LOOK, len(self._names))):
            entry = self._backlog.get(self._names.pop())
            fault = self._fault_of(entry, channel_of) if entry is not None else None
            if entry is not None and fault is not None:
                yield f"request {entry.request_id} ({entry.state.value}) {fault}"

    def _fault_of(self, entry: Entry, channel_of: Callable[[str], Channel]) -> str | None:
        """Return what is wrong with an entry, None if nothing is; nearly always nothing, so that is what is quick."""
        if entry.state is State.WAITING:
            if entry.epoch:
                return f"names epoch {entry.epoch}"
            return None if entry in channel_of(entry.announced.channel) else "is in no line"
        if entry.state in HELD_STATES:
            # Without credits no message could ever move it again.
            worker = self._fleet.get(entry.epoch)
            held = worker is not None and entry.request_id in worker.ledger
            return None if held else f"has no credits in epoch {entry.epoch}"
        if entry.state is State.PARTED:
            awaited = not entry.epoch and self._backlog.is_parted(entry)
            return None if awaited else "is waited for by nobody"
        return "is in the backlog"
