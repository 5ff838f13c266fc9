"""What operators last asked of workers that are not there, so that it holds however long they are away.

Of a worker that is there its epoch says it, and the worker itself keeps what it has heard: a new scheduler learns it
from the next stream.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from services.core.drain import Drain
from services.scheduler.core.fleet import Worker
from services.scheduler.core.messages import WorkerOpened

MOST_REMEMBERED: Final = 4096
"""Workers of which it is remembered, the oldest of more forgotten: of a fleet whose every worker has a new name, those
that were drained do not come back."""


class Left(NamedTuple):
    """What was asked last of a life of a worker whose epoch is over."""

    instance_id: str
    drain: Drain


class Drains:
    """By worker, for one life of its process."""

    def __init__(self) -> None:
        """Start with no worker that has left."""
        self._left: dict[str, Left] = {}

    def left(self, worker: Worker) -> None:
        """Remember what was asked of a worker whose epoch is over."""
        if worker.drain.version:
            self._left[worker.worker_id] = Left(worker.instance_id, worker.drain)
            if len(self._left) > MOST_REMEMBERED:
                del self._left[next(iter(self._left))]

    def returned(self, opened: WorkerOpened) -> Drain:
        """Return what holds for a worker that has come: what it has heard, or, in the same life, of later."""
        left = self._left.pop(opened.worker_id, None)
        return max(left.drain, opened.drain) if left and left.instance_id == opened.instance_id else opened.drain
