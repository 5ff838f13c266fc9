"""One frame of a live view: plain values, ready to be drawn by a terminal or a browser. None stands for "not known"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.fleet import all_drained, drained_of
from penstock.live.departed import Departed
from penstock.live.rates import Rate, total
from penstock.live.reading import Reading
from penstock.live.state import GONE, state_of, urgency
from penstock.queue.v1.queue_pb2 import ChannelStats, StatsResponse
from penstock.scheduler.v1.scheduler_pb2 import ChannelStatus, StatusResponse, WorkerStatus

SEVERAL = 2
"""Tenants: of one alone there is nothing to tell apart."""

TENANT_LETTERS = 64
"""As long as a tenant's name may be in a keys file; where there is none a request may name a longer one."""


@dataclass(frozen=True, slots=True)
class Channel:
    """One channel, as the queue and the scheduler see it."""

    name: str
    waiting: int | None
    """Requests waiting at the queue."""
    oldest_s: float | None
    """Age of the oldest of them; 0 if none waits."""
    running: int | None
    """Reservations over all workers."""
    held_blocks: int | None
    requests_per_s: float | None
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker, as the scheduler's ledger and the engine's last report have it."""

    name: str
    model: str
    state: str
    """up, draining, drained or gone."""
    capacity_blocks: int
    free_blocks: int
    held_blocks: dict[str, int]
    """By channel; only channels that hold any."""
    reservations: int
    drift_blocks: int
    running: int
    """Requests in the engine."""
    waiting: int
    """Requests waiting inside the engine."""
    kv_usage: float
    """Share of KV-cache blocks in use, 0 to 1."""
    step_ms: float
    preemptions: int
    """Since the worker started."""

    @property
    def all_held_blocks(self) -> int:
        """Blocks held over all channels."""
        return sum(self.held_blocks.values())


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is said of the whole."""

    waiting: int | None
    running: int | None
    requests_per_s: float | None
    tokens_per_s: float | None
    dead: int | None
    results: int | None
    submits_refused: bool
    policy: str
    """Empty if the scheduler does not answer."""
    grants: int | None
    capacity_blocks: int
    """Of the workers that are connected."""
    drift_blocks: int | None
    preemptions: int | None
    audit_violations: int | None


@dataclass(frozen=True, slots=True)
class Tenant:
    """What waits of one tenant."""

    name: str
    requests: int
    bytes: int


@dataclass(frozen=True, slots=True)
class View:
    """Everything a frame shows."""

    fleet: Fleet
    channels: tuple[Channel, ...]
    """By name."""
    workers: tuple[Worker, ...]
    """By name; those in their grace period as well."""
    departed: tuple[Departed, ...]
    """Workers that have gone within the last minutes, the latest first."""
    tenants: tuple[Tenant, ...]
    """Those of which most waits, most first, as far as the queue tells; none where only one has anything waiting."""
    problems: tuple[str, ...]
    """What does not work, worst first: lines for a person."""


def view_of(reading: Reading, rates: Mapping[str, Rate], departed: tuple[Departed, ...] = ()) -> View:
    """Return the frame of `reading`."""
    queued = {c.channel: c for c in reading.counts.channels} if reading.counts else {}
    scheduled = {c.channel: c for c in reading.fleet.channels} if reading.fleet else {}
    channels = tuple(
        _channel(name, queued.get(name), scheduled.get(name), rates.get(name)) for name in channel_names(reading)
    )
    workers = tuple(sorted(map(_worker, reading.fleet.workers if reading.fleet else ()), key=lambda w: w.name))
    fleet = _fleet(reading, channels, workers, total(rates))
    tenants = tenants_of(reading.counts) if reading.counts else ()
    return View(fleet, channels, workers, departed, tenants, tuple(_problems(reading)))


def worst_first(workers: Iterable[Worker]) -> list[Worker]:
    """Return the workers, those to look at first: that are not up, then whose ledger is ahead of their engine."""
    return sorted(workers, key=lambda worker: urgency(worker.state, worker.drift_blocks))


def busiest_first(channels: Iterable[Channel]) -> list[Channel]:
    """Return the channels, those first in which most waits, then that hold most."""
    return sorted(channels, key=lambda c: (-(c.waiting or 0), -(c.held_blocks or 0)))


def channel_names(reading: Reading) -> list[str]:
    """Return the names of all channels that either service told."""
    queued = reading.queue.channels if reading.queue else ()
    scheduled = reading.fleet.channels if reading.fleet else ()
    return sorted({*(c.channel for c in queued), *(c.channel for c in scheduled)})


def _channel(name: str, queued: ChannelStats | None, scheduled: ChannelStatus | None, rate: Rate | None) -> Channel:
    return Channel(
        name,
        queued.ready if queued else None,
        queued.oldest_ready_age_ns / 1e9 if queued else None,
        scheduled.running if scheduled else None,
        scheduled.held_blocks if scheduled else None,
        rate.requests_per_s if rate else None,
        rate.tokens_per_s if rate else None,
    )


def _worker(status: WorkerStatus) -> Worker:
    engine = status.engine
    return Worker(
        name=status.worker_id,
        model=status.model,
        state=state_of(status),
        capacity_blocks=status.capacity_blocks,
        free_blocks=status.free_blocks,
        held_blocks={channel: blocks for channel, blocks in sorted(status.held_blocks.items()) if blocks},
        reservations=status.reservations,
        drift_blocks=status.drift_blocks,
        running=engine.running,
        waiting=engine.waiting,
        kv_usage=engine.kv_cache_usage,
        step_ms=engine.step_ns / 1e6,
        preemptions=engine.preemptions,
    )


def _fleet(reading: Reading, channels: tuple[Channel, ...], workers: tuple[Worker, ...], rate: Rate | None) -> Fleet:
    queue, fleet = reading.counts, reading.fleet
    return Fleet(
        waiting=sum(c.waiting or 0 for c in channels) if queue else None,
        running=sum(c.running or 0 for c in channels) if fleet else None,
        requests_per_s=rate.requests_per_s if rate else None,
        tokens_per_s=rate.tokens_per_s if rate else None,
        dead=queue.dead if queue else None,
        results=queue.results if queue else None,
        submits_refused=queue.submits_refused if queue else False,
        policy=fleet.policy if fleet else "",
        grants=fleet.grants if fleet else None,
        capacity_blocks=sum(w.capacity_blocks for w in workers if w.state != GONE),
        drift_blocks=sum(w.drift_blocks for w in workers) if fleet else None,
        preemptions=sum(w.preemptions for w in workers) if fleet else None,
        audit_violations=fleet.audit_violations if fleet else None,
    )


def _problems(reading: Reading) -> list[str]:
    problems = list(reading.problems)
    if reading.queue is not None and reading.queue.submits_refused:
        problems.append(f"submits are refused: {why_refused(reading.queue)}")
    if reading.fleet is not None:
        if stands_by(reading):
            problems.append("the scheduler stands by: another one is connected to the queue")
        elif not reading.fleet.queue_connected:
            problems.append("the scheduler is not connected to the queue")
        if reading.fleet.audit_violations:
            problems.append(f"the scheduler's audit found {reading.fleet.audit_violations} violations")
        problems += unserved_lines(reading.fleet)
    return problems


def stands_by(reading: Reading) -> bool:
    """Whether the scheduler that was asked is not the one that is connected to the queue, as far as that is told."""
    queue, fleet = reading.counts, reading.fleet
    return fleet is not None and not fleet.queue_connected and queue is not None and queue.scheduler_connected


def tenants_of(queue: StatsResponse) -> tuple[Tenant, ...]:
    """Return the tenants of which most waits, none unless there are several."""
    several = queue.tenants if len(queue.tenants) >= SEVERAL else ()
    return tuple(Tenant(each.tenant[:TENANT_LETTERS], each.requests, each.bytes) for each in several)


def tenants_line(queue: StatsResponse) -> str:
    """Return of which tenants most waits, empty unless there are several."""
    most = ", ".join(f"{each.name!r} {each.requests} ({each.bytes / 1e6:.1f} MB)" for each in tenants_of(queue))
    return f"waiting by tenant: {most}" if most else ""


def why_refused(queue: StatsResponse) -> str:
    """Return why the queue takes no submits now, in its words; those of old had only one reason."""
    return queue.refusal or "the disk of the queue is nearly full"


def unserved_lines(fleet: StatusResponse) -> list[str]:
    """Return a line for each model that requests wait for in vain, and for each of which no worker takes any."""
    drained = drained_of(fleet).intersection(worker.model for worker in fleet.workers)
    return [
        f"{unserved.waiting} requests wait for "
        + (f"the model {unserved.model!r}, which no connected worker serves" if unserved.model else "a worker")
        for unserved in fleet.unserved_models
    ] + [f"{all_drained(model)}: none takes requests for it" for model in sorted(drained)]
