"""What a batch lets out, and when: some of it while it is being written, the rest once it is durable."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from services.queue.core.effects import (
    Announce,
    BacklogReady,
    Cancelled,
    ChannelsChanged,
    Deleted,
    Deliver,
    Effect,
    Gone,
    Inspected,
    QueueView,
    Requeued,
    Submitted,
    WorkOpened,
)
from services.queue.core.entry import BatchKey
from services.queue.core.machine import Machine

ANSWERS = frozenset({Submitted, Cancelled, Deleted, Requeued, Inspected, QueueView})
"""Effects that answer a caller, by ticket."""

FOR_WORKERS = frozenset({WorkOpened, Deliver})
"""What workers are told while it is being written: requests that they claimed, and before them that the queue listens.
"""

FOR_SCHEDULER = frozenset({BacklogReady, ChannelsChanged, Announce, Gone})
"""What the scheduler is told while it is being written: everything that it is told."""

EARLY = FOR_WORKERS | FOR_SCHEDULER
"""What leaves before it is on disk.

Nobody can act on it in a way that a failed write would not undo. What a worker or the scheduler answers is handled
after this write, or by a machine built anew, which ends all their streams; a scheduler then forgets what it was told,
and a worker learns that its lease is lost. Neither name nor fencing token is ever given a second time
(`Recovery.pass_numbers_over`). Clients get no answer that is not on disk: a watcher of a batch may see tokens of a
request that a worker was offered before its submit is, and its result after."""


class Early(NamedTuple):
    """What a batch lets out while it is being written, in this order."""

    for_workers: list[Effect]
    payloads: dict[int, bytes]
    """Encoded requests of the deliveries that are in the store, by seq."""
    for_scheduler: list[Effect]


class Released(NamedTuple):
    """What one durable batch lets out."""

    effects: list[Effect]
    progress: dict[BatchKey, tuple[int, int]]


class Outlet(Protocol):
    """Where effects go."""

    def foretell(self, early: Early) -> None:
        """Say what need not wait for its batch to be durable."""

    def release(self, released: Released) -> None:
        """Say what a durable batch says."""

    def reset(self, machine: Machine) -> None:
        """Start over with a rebuilt machine: end the peers' streams so that they come back."""

    def observe_commit(self, messages: int, seconds: float) -> None:
        """Note the size and time of one synced batch."""
