"""The machine's state at one moment, copied out for status and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from services.scheduler.core.admission.policy import Outlook
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.machine import Machine
from services.scheduler.core.messages import EngineReport
from services.scheduler.core.sharing.share import Share
from services.scheduler.core.standing import PREFIX


class WorkerView(NamedTuple):
    """One worker epoch; blocks as its ledger has them, `report` as its engine last said, `outlook` as predicted."""

    worker_id: str
    epoch: int
    models: tuple[str, ...]
    block_size: int
    max_model_len: int
    capacity_blocks: int
    free_blocks: int
    usable_blocks: int
    overcommitted_blocks: int
    held_blocks: dict[str, int]
    reservations: int
    drift_blocks: int
    shared_blocks: int
    report: EngineReport | None
    draining: bool
    leaving: bool
    connected: bool
    outlook: Outlook | None = None
    adapters: tuple[str, ...] = ()


class ChannelView(NamedTuple):
    """One channel over all workers; `waiting` and `running` in requests."""

    channel: str
    share: Share
    waiting: int
    running: int
    held_blocks: int
    grants: int


class Snapshot(NamedTuple):
    """Everything status and metrics show. Counts are since the start, by kind, cause or channel."""

    policy: str
    workers: tuple[WorkerView, ...]
    channels: tuple[ChannelView, ...]
    queue_connected: bool
    audit_violations: int
    refused_settles: int
    grants: dict[str, int]
    standing_used: dict[str, int]
    refunds: dict[str, int]
    refunded_blocks: dict[str, int]
    stale: dict[str, int]
    duplicates: dict[str, int]
    unknown: dict[str, int]
    refused: dict[str, int]
    rejected: dict[str, int]


def take_snapshot(machine: Machine) -> Snapshot:
    """Return a copy of the machine's state that later steps do not change. It only reads, O(workers + reservations).

    What the lines wait for (`Demand`) is no part of it: that takes forecasts, and of many lines each has its turn.
    """
    counters = machine.counters
    return Snapshot(
        policy=machine.policy.name,
        workers=tuple(sorted(_workers(machine))),
        channels=tuple(_channels(machine)),
        queue_connected=machine.queue_connected,
        audit_violations=counters.audit_violations,
        refused_settles=counters.refused_settles,
        grants=dict(counters.grants),
        standing_used=dict(counters.standing_used),
        refunds=dict(counters.refunds),
        refunded_blocks=dict(counters.refunded_blocks),
        stale=dict(counters.stale),
        duplicates=dict(counters.duplicates),
        unknown=dict(counters.unknown),
        refused=dict(machine.backlog.refused),
        rejected=dict(counters.rejected),
    )


def _workers(machine: Machine) -> list[WorkerView]:
    outlooks = {worker.epoch: machine.policy.outlook(worker) for worker in machine.fleet}
    return [
        WorkerView(
            worker_id=worker.worker_id,
            epoch=worker.epoch,
            models=worker.models,
            block_size=worker.shape.block_size,
            max_model_len=worker.shape.max_model_len,
            capacity_blocks=worker.ledger.capacity_blocks,
            free_blocks=worker.ledger.free_blocks,
            usable_blocks=worker.usable_blocks,
            overcommitted_blocks=worker.ledger.overcommitted_blocks,
            held_blocks=worker.ledger.held_by_channel(),
            reservations=len(worker.ledger),
            drift_blocks=worker.drift_blocks,
            shared_blocks=worker.ledger.shared_blocks,
            report=worker.report,
            draining=worker.draining,
            leaving=worker.leaving,
            connected=worker.closed_ns is None,
            outlook=outlooks[worker.epoch],
            adapters=worker.adapters,
        )
        for worker in machine.fleet
    ]


def _standing(ledger: Ledger) -> Iterator[str]:
    """Yield the channel of each reservation that has no request yet."""
    for name in ledger:
        reservation = ledger.reservation(name)
        if reservation is not None and name.startswith(PREFIX):
            yield reservation.channel


def _channels(machine: Machine) -> list[ChannelView]:
    held: Counter[str] = Counter()
    running: Counter[str] = Counter()
    for worker in machine.fleet:
        held.update(worker.ledger.held_by_channel())
        running.update(worker.ledger.reservations_by_channel())
        running.subtract(_standing(worker.ledger))
    names = {*machine.shares, *held, *machine.backlog.waiting, *machine.counters.grants}
    return [
        ChannelView(
            name,
            machine.shares.get(name, Share()),
            machine.backlog.waiting.get(name, 0),
            running[name],
            held[name],
            machine.counters.grants.get(name, 0),
        )
        for name in sorted(names)
    ]
