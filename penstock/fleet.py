"""What a scheduler's Status says of the fleet, and what it cannot say yet."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.scheduler.v1 import scheduler_pb2

BACK_WITHIN_S = 10.0
"""Within which workers come back to a scheduler that was started anew: one whose stream has ended pauses for 2 s at
most, takes 2 s to connect, and pauses once more where it was too soon (`services/rpc/limits.py`); the rest is for a
busy machine. Until then a worker or a model that the scheduler does not know may be there all the same."""


def young_for_s(status: scheduler_pb2.StatusResponse) -> float:
    """Return for how many seconds more workers may be missing in `status`; 0 from a scheduler that has been up longer.

    One that does not tell for how long it has been up counts as such.
    """
    return max(BACK_WITHIN_S - status.up_ns / 1e9, 0.0) if status.up_ns > 0 else 0.0


def names_of(status: scheduler_pb2.StatusResponse) -> frozenset[str]:
    """Return the names that the models of the workers in `status` answer to."""
    return _names(status.workers)


def drained_of(status: scheduler_pb2.StatusResponse) -> frozenset[str]:
    """Return those of the names in `status` that only workers answer to which take no new grants."""
    return names_of(status) - _names(worker for worker in status.workers if not worker.draining)


def all_drained(model: str = "") -> str:
    """Return what is said where all workers that answer to `model`, or all there are, take no new grants."""
    return f"all workers{f' of the model {model!r}' if model else ''} are drained or ending"


def _names(workers: Iterable[scheduler_pb2.WorkerStatus]) -> frozenset[str]:
    return frozenset(name for worker in workers for name in (worker.model, *worker.model_aliases) if name)
