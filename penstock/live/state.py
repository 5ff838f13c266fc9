"""What a worker is said to be doing, in one word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from penstock.scheduler.v1.scheduler_pb2 import WorkerStatus

UP = "up"
GONE = "gone"
"""State of a worker in its grace period."""

STATES = (GONE, "draining", "drained", UP)
"""Those to look at first come first."""


def state_of(worker: WorkerStatus) -> str:
    """Return the state of a worker in one word, one of STATES."""
    if not worker.connected:
        return GONE
    if not worker.draining:
        return UP
    return "draining" if worker.reservations else "drained"


def urgency(state: str, drift_blocks: int) -> tuple[int, int]:
    """Return by what workers are sorted, those to look at first: that are not up, then whose ledger is ahead."""
    return STATES.index(state), -drift_blocks


def tally(states: Iterable[str]) -> str:
    """Return how many workers are in which state, such as "2 gone, 90 up"."""
    counts = Counter(states)
    return ", ".join(f"{counts[state]:,} {state}" for state in STATES if counts[state])
