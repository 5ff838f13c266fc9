"""What operators have last asked of workers, so that it holds whatever becomes of the streams meanwhile.

A worker remembers that it drains and says so on each new stream; what was asked while it was away, or was lost on its
way, it does not know.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from services.scheduler.core.fleet import Worker

MOST_REMEMBERED: Final = 4096
"""Workers of which it is remembered, the oldest of more forgotten: of a fleet whose every worker has a new name, those
that were drained do not come back."""


class Asked(NamedTuple):
    """What was asked last of one life of a worker."""

    instance_id: str
    undo: bool
    told_epoch: int | None = None
    """The last epoch in which the worker, which said that it drains, was told that it need not."""


class Drains:
    """By worker, for one life of its process: whether it is to drain, or to drain no more."""

    def __init__(self) -> None:
        """Nothing has been asked."""
        self._asked: dict[str, Asked] = {}

    def ask(self, worker: Worker, undo: bool) -> None:
        """Remember what was asked last."""
        self._asked.pop(worker.worker_id, None)
        self._asked[worker.worker_id] = Asked(worker.instance_id, undo)
        if len(self._asked) > MOST_REMEMBERED:
            del self._asked[next(iter(self._asked))]

    def is_to_drain(self, worker: Worker) -> bool:
        """Return whether a worker that has come was to drain; another life of it was not."""
        asked = self._asked.get(worker.worker_id)
        if asked is None:
            return False
        if asked.instance_id != worker.instance_id:
            del self._asked[worker.worker_id]
            return False
        return not asked.undo

    def tell_undo(self, worker: Worker) -> bool:
        """Return, once an epoch, whether a worker that says that it drains is to be told that it need not.

        Once, for one that ends says so again; in each epoch, for what it is told may be lost with the stream.
        """
        asked = self._asked.get(worker.worker_id)
        if asked is None or asked.instance_id != worker.instance_id or not asked.undo:
            return False
        self._asked[worker.worker_id] = asked._replace(told_epoch=worker.epoch)
        return asked.told_epoch != worker.epoch
