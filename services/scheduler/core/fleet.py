"""The workers as the scheduler sees them: one record per epoch, its ledger inside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from services.scheduler.core.ledger import Ledger
from services.scheduler.core.messages import EngineReport, EngineShape, WorkerOpened


@dataclass(slots=True, eq=False)
class Worker:
    """One epoch of one worker.

    `closed_ns` is when its stream ended (None while it is open), `paused_until_ns`
    keeps grants away from a worker that has just handed one back unclaimed.
    """

    epoch: int
    worker_id: str
    instance_id: str
    models: tuple[str, ...]
    shape: EngineShape
    most_sequences: int
    ledger: Ledger
    draining: bool = False
    closed_ns: int | None = None
    paused_until_ns: int = 0
    drift_blocks: int = 0
    report: EngineReport | None = None

    @property
    def usable_blocks(self) -> int:
        """Free credit that both ledger and engine agree on.

        The engine's view is a little old: the difference measured at its last report stands until the next one.
        An idle worker is taken at the ledger's word, or a request as large as its pool could never start.
        """
        if not self.drift_blocks or not len(self.ledger):
            return self.ledger.free_blocks
        return max(self.ledger.free_blocks - self.drift_blocks, 0)

    def serves(self, model: str) -> bool:
        """Return whether the worker answers to this model name; "" accepts any."""
        return not model or model in self.models

    def takes_grants(self, now_ns: int) -> bool:
        """Return whether grants may be sent to it now."""
        return not self.draining and self.closed_ns is None and now_ns >= self.paused_until_ns

    def observe(self, report: EngineReport) -> None:
        """Take the engine's own view; ledger minus engine, where positive, is the drift."""
        self.report = report
        if report.blocks_free is None:
            self.drift_blocks = 0
        else:
            self.drift_blocks = max(self.ledger.free_blocks - report.blocks_free, 0)


class Fleet:
    """Every live epoch, and which one is the present life of each worker."""

    def __init__(self, sequence_slack: float) -> None:
        """Let a worker have `sequence_slack` times its max_num_seqs completions reserved at once."""
        self._sequence_slack = sequence_slack
        self._by_epoch: dict[int, Worker] = {}
        self._by_id: dict[str, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        """Iterate over the workers, those in their grace period included."""
        return iter(self._by_epoch.values())

    def __len__(self) -> int:
        """Return the number of live epochs."""
        return len(self._by_epoch)

    def open(self, opened: WorkerOpened) -> Worker:
        """Add the epoch; the worker's earlier one must have been removed."""
        worker = Worker(
            opened.epoch,
            opened.worker_id,
            opened.instance_id,
            opened.models,
            opened.shape,
            max(int(opened.shape.max_num_seqs * self._sequence_slack), 1),
            Ledger(opened.shape.capacity_blocks),
        )
        worker.ledger.adopt(opened.inventory)
        self._by_epoch[worker.epoch] = worker
        self._by_id[worker.worker_id] = worker
        return worker

    def get(self, epoch: int) -> Worker | None:
        """Return the worker of this epoch, None if the epoch is over."""
        return self._by_epoch.get(epoch)

    def named(self, worker_id: str) -> Worker | None:
        """Return the present life of the worker, None if it has none."""
        return self._by_id.get(worker_id)

    def remove(self, worker: Worker) -> None:
        """Forget the epoch."""
        del self._by_epoch[worker.epoch]
        if self._by_id.get(worker.worker_id) is worker:
            del self._by_id[worker.worker_id]

    def serving(self, model: str) -> list[Worker]:
        """Return the workers that answer to the model, in the order they came."""
        return [worker for worker in self._by_epoch.values() if worker.serves(model)]

    def sequences(self) -> int:
        """Return how many requests the connected engines can run at once."""
        return sum(worker.shape.max_num_seqs for worker in self._by_epoch.values() if worker.closed_ns is None)
