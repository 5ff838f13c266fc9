"""Prometheus metrics of the scheduler.

Latencies are observed as they happen; everything else is read, when Prometheus asks, from what the runner saw at its
last look, so that counting costs the hot path nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.born import from_zero
from services.local_metrics import LocalHistogram
from services.scheduler.core import counters
from services.scheduler.core.admission.estimate import REJECTIONS
from services.scheduler.core.admission.policy import Outlook
from services.scheduler.core.lifecycle import Event
from services.scheduler.core.snapshot import Snapshot, WorkerView
from services.scheduler.core.waiting import Demand
from services.telemetry import LATENCY_BUCKETS_S

ARBITRATION_BUCKETS_S = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
"""Edges in seconds: from a pass that finds nothing to one that grants to a whole idle fleet."""

PREFIX = "penstock_scheduler_"

EVENTS = tuple(event.value for event in Event)


def grantable_blocks(worker: WorkerView) -> int:
    """Return the blocks that grants may still take: what is free, or less where a policy has predicted a peak."""
    if worker.draining or not worker.connected:
        return 0
    if worker.outlook is None:
        return worker.usable_blocks
    return max(min(worker.usable_blocks, worker.capacity_blocks - worker.outlook.peak_blocks), 0)


def starvation(
    workers: Sequence[WorkerView], waiting_blocks: Mapping[tuple[str, str], int]
) -> dict[tuple[str, str], float]:
    """Return the blocks that what waits needs for each that may be granted, by channel and model asked for.

    A model's workers are wanted by whatever no other can run: requests for several names of one pool add up, and a
    pool that is idle does not hide one that is full.
    """
    serving: dict[str, set[int]] = {model: set() for _, model in waiting_blocks}
    for worker in workers:
        for model in serving.keys() & {"", *worker.models}:
            serving[model].add(worker.epoch)
    pools = {model: frozenset(epochs) for model, epochs in serving.items()}
    grantable = {worker.epoch: grantable_blocks(worker) for worker in workers}
    needed: Counter[tuple[str, frozenset[int]]] = Counter()
    for (channel, model), blocks in waiting_blocks.items():
        needed[channel, pools[model]] += blocks
    ratios = {
        (channel, pool): sum(blocks for (of, within), blocks in needed.items() if of == channel and within <= pool)
        / max(sum(grantable[epoch] for epoch in pool), 1)
        for channel, pool in needed
    }
    return {(channel, model): ratios[channel, pools[model]] for channel, model in waiting_blocks}


WORKER_GAUGES: tuple[tuple[str, str, Callable[[WorkerView], float]], ...] = (
    ("capacity_blocks", "Blocks that may be booked.", lambda worker: worker.capacity_blocks),
    ("free_blocks", "Blocks not booked.", lambda worker: worker.free_blocks),
    ("usable_blocks", "Blocks that grants may take, some ahead of what is free.", lambda worker: worker.usable_blocks),
    ("grantable_blocks", "Blocks that grants may still take.", grantable_blocks),
    ("overcommitted_blocks", "Blocks held beyond the capacity.", lambda worker: worker.overcommitted_blocks),
    ("drift_blocks", "Blocks by which the ledger is more optimistic.", lambda worker: worker.drift_blocks),
    ("shared_blocks", "Blocks booked again for requests that hold them together.", lambda worker: worker.shared_blocks),
    ("reservations", "Requests that hold credits, and standing grants.", lambda worker: worker.reservations),
    ("worker_connected", "1 while the worker's stream is open.", lambda worker: worker.connected),
    ("worker_draining", "1 while the worker takes no new grants.", lambda worker: worker.draining),
)

OUTLOOK_GAUGES: tuple[tuple[str, str, Callable[[Outlook], float]], ...] = (
    ("predicted_peak_blocks", "Blocks its requests will need, margin included.", lambda outlook: outlook.peak_blocks),
    ("margin_deviations", "Margin in standard deviations.", lambda outlook: outlook.margin_deviations),
    (
        "preemption_cost_requests",
        "Engine time of one preemption, in requests; infinite while unknown.",
        lambda outlook: outlook.preemption_cost_requests,
    ),
    ("worker_recovering", "1 while a preemption keeps grants away.", lambda outlook: outlook.recovering),
)
"""Policies that predict say these; for the others they have no samples."""

REPORT_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("kv_cache_usage_ratio", "Share of KV-cache blocks in use, as the engine reports.", "kv_cache_usage"),
    ("engine_running_requests", "Requests running in the engine.", "running"),
    ("engine_waiting_requests", "Requests waiting in the engine.", "waiting"),
)


class SchedulerMetrics(Collector):
    """Histograms fed by the runner, and a collector over what it last saw."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        """Register in `registry`; what is collected stays empty until something is `shown`."""
        self.shown: tuple[Snapshot, Demand] | None = None
        """Replaced whole at each look: Prometheus asks on a thread of its own."""
        self.grant_wait = LocalHistogram(
            f"{PREFIX}grant_wait_seconds", "Announcement to grant.", LATENCY_BUCKETS_S, registry, "channel"
        )
        self.arbitration = LocalHistogram(
            f"{PREFIX}arbitration_seconds", "One arbitration pass.", ARBITRATION_BUCKETS_S, registry
        )
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric that is read from what is shown."""
        if self.shown is None:
            return
        snapshot, demand = self.shown
        yield from _workers(snapshot)
        yield from _channels(snapshot)
        yield from _demand(snapshot, demand)
        yield from _counts(snapshot)


def _workers(snapshot: Snapshot) -> Iterator[Metric]:
    for name, text, read in WORKER_GAUGES:
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=["worker"])
        for worker in snapshot.workers:
            gauge.add_metric([worker.worker_id], read(worker))
        yield gauge
    yield from _outlooks(snapshot)
    held = GaugeMetricFamily(f"{PREFIX}held_blocks", "Blocks held.", labels=["worker", "channel"])
    for worker in snapshot.workers:
        for channel, blocks in worker.held_blocks.items():
            held.add_metric([worker.worker_id, channel], blocks)
    yield held
    reported = [(worker.worker_id, worker.report) for worker in snapshot.workers if worker.report is not None]
    for name, text, attribute in REPORT_GAUGES:
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=["worker"])
        for worker_id, report in reported:
            gauge.add_metric([worker_id], getattr(report, attribute))
        yield gauge
    preemptions = CounterMetricFamily(
        f"{PREFIX}worker_preemptions", "Preemptions since the worker started.", labels=["worker"]
    )
    for worker_id, report in reported:
        preemptions.add_metric([worker_id], report.preemptions)
    yield preemptions


def _outlooks(snapshot: Snapshot) -> Iterator[Metric]:
    for name, text, read in OUTLOOK_GAUGES:
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=["worker"])
        for worker in snapshot.workers:
            if worker.outlook is not None:
                gauge.add_metric([worker.worker_id], read(worker.outlook))
        yield gauge
    target = CounterMetricFamily(f"{PREFIX}target_preemptions", "Preemptions steered to.", labels=["worker"])
    for worker in snapshot.workers:
        if worker.outlook is not None:
            target.add_metric([worker.worker_id], worker.outlook.target_preemptions)
    yield target


def _channels(snapshot: Snapshot) -> Iterator[Metric]:
    waiting = GaugeMetricFamily(f"{PREFIX}waiting_requests", "Announced requests not yet granted.", labels=["channel"])
    running = GaugeMetricFamily(f"{PREFIX}running_requests", "Requests that hold credits.", labels=["channel"])
    for view in snapshot.channels:
        waiting.add_metric([view.channel], view.waiting)
        running.add_metric([view.channel], view.running)
    yield waiting
    yield running
    yield GaugeMetricFamily(
        f"{PREFIX}queue_connected", "1 while the Backlog stream is open.", value=snapshot.queue_connected
    )


def _demand(snapshot: Snapshot, demand: Demand) -> Iterator[Metric]:
    ratios = starvation(snapshot.workers, demand.blocks)
    # A channel with nothing in line says 0: what scales a fleet on this number must not take its absence for a fault.
    idle: dict[tuple[str, str], float] = {(view.channel, ""): 0 for view in snapshot.channels}
    for name, text, values in (
        ("waiting_blocks", "Blocks that what waits is expected to need.", demand.blocks),
        ("starvation_ratio", "Blocks that what waits needs for each that may be granted.", ratios),
    ):
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=["channel", "model"])
        for labels, value in (idle | values).items():
            gauge.add_metric(labels, value)
        yield gauge
    unserved = GaugeMetricFamily(
        f"{PREFIX}unserved_requests", "Announced requests that wait for a model no worker serves.", labels=["model"]
    )
    for model, count in demand.unserved.items():
        unserved.add_metric([model], count)
    yield unserved


def _counts(snapshot: Snapshot) -> Iterator[Metric]:
    channels = [view.channel for view in snapshot.channels]
    for name, text, label, known, counted in (
        ("grants", "Grants.", "channel", channels, snapshot.grants),
        ("standing_grants_used", "Grants that stood ready.", "channel", channels, snapshot.standing_used),
        ("refunds", "ACKs and epoch ends that sent blocks home.", "cause", counters.REFUNDS, snapshot.refunds),
        ("refunded_blocks", "Blocks sent home.", "cause", counters.REFUNDS, snapshot.refunded_blocks),
        ("stale_messages", "Messages of an epoch that is over.", "kind", counters.STALE_KINDS, snapshot.stale),
        ("duplicate_acks", "ACKs repeated or overtaken.", "kind", counters.DUPLICATE_KINDS, snapshot.duplicates),
        ("unknown_acks", "ACKs of requests that hold nothing.", "kind", counters.UNKNOWN_KINDS, snapshot.unknown),
        ("refused_events", "Events a request's lifecycle had no use for.", "event", EVENTS, snapshot.refused),
        ("rejected_requests", "Requests no worker could ever hold.", "code", REJECTIONS, snapshot.rejected),
    ):
        yield _counter(name, text, label, from_zero(known, counted))
    yield CounterMetricFamily(
        f"{PREFIX}refused_settles", "Tokenizer ACKs refused for want of room.", value=snapshot.refused_settles
    )
    yield CounterMetricFamily(
        f"{PREFIX}audit_violations",
        "Faults in ledgers and backlog; must be 0.",
        value=snapshot.audit_violations,
    )


def _counter(name: str, text: str, label: str, values: Mapping[str, int]) -> CounterMetricFamily:
    counter = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for key, value in sorted(values.items()):
        counter.add_metric([key], value)
    return counter
