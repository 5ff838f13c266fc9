"""Prometheus metrics of the queue service."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from services.auth.setup import AuthMetrics
from services.born import begin
from services.local_metrics import LocalCounter, LocalHistogram
from services.queue.core.effects import QueueView, RefusedReason
from services.queue.core.lifecycle import TABLE, Input, Outcome, State
from services.telemetry import LATENCY_BUCKETS_S

BATCH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
"""Edges in messages: from a lone request to a full inbox."""

SYNC_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
"""Edges in seconds: from a fast SSD to a disk that stalls."""

REFUSALS = INVALID, BEYOND_QUOTA, UNAVAILABLE = "invalid", "over_quota", "unavailable"
"""Why submits are refused."""

WENT_BACK = tuple(
    event.value for (_, event), (after, _) in TABLE.items() if after is State.READY and event is not Input.SUBMIT
)
"""What puts a request back in line."""


@dataclass
class Tally:
    """What one channel has seen since the service started."""

    accepted: int = 0
    ended: list[int] = field(default_factory=lambda: [0] * (max(Outcome) + 1))
    prompt_tokens: int = 0
    completion_tokens: int = 0


class TallyCollector(Collector):
    """Owner of the tallies by channel: Stats and the metrics endpoint read the same numbers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register with `registry`."""
        self.by_channel: defaultdict[str, Tally] = defaultdict(Tally)
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield what was accepted and what ended."""
        accepted = CounterMetricFamily("penstock_queue_accepted", "Requests accepted.", labels=["channel"])
        ended = CounterMetricFamily("penstock_queue_ended", "Requests ended.", labels=["channel", "outcome"])
        for channel, tally in list(self.by_channel.items()):
            accepted.add_metric([channel], tally.accepted)
            for outcome in Outcome:
                ended.add_metric([channel, outcome.name.lower()], tally.ended[outcome])
        yield accepted
        yield ended


class QueueMetrics:
    """Every metric of the service, registered once per registry."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        """Register with `registry`."""
        self.registry = registry
        channel = ["channel"]
        self.ready = Gauge("penstock_queue_ready_requests", "Requests waiting.", channel, registry=registry)
        self.leased = Gauge("penstock_queue_leased_requests", "Requests leased.", channel, registry=registry)
        self.oldest = Gauge(
            "penstock_queue_oldest_ready_age_seconds", "Age of the oldest waiting request.", channel, registry=registry
        )
        self.oldest_servable = Gauge(
            "penstock_queue_oldest_servable_age_seconds",
            "Age of the oldest waiting request whose model somebody serves.",
            channel,
            registry=registry,
        )
        self.dead = Gauge("penstock_queue_dead_requests", "Dead letters.", registry=registry)
        self.results = Gauge("penstock_queue_results_kept", "Results kept.", registry=registry)
        self.workers = Gauge("penstock_queue_workers_connected", "Open Work streams.", registry=registry)
        self.scheduler = Gauge(
            "penstock_queue_scheduler_connected", "1 if a Backlog stream is open, else 0.", registry=registry
        )
        self.watchers = Gauge("penstock_queue_watchers_open", "Open Watch streams.", registry=registry)
        self.disk_free = Gauge(
            "penstock_queue_disk_free_bytes",
            "Free bytes of the store's disk; NaN while that cannot be told.",
            registry=registry,
        )
        self.disk_free_min = Gauge(
            "penstock_queue_disk_free_min_bytes", "Watermark below which submits are refused.", registry=registry
        )
        self.reclaimed = Counter(
            "penstock_queue_reclaimed_bytes_total",
            "Bytes of the store's disk that deleted payloads, results and parts gave back.",
            registry=registry,
        )
        self.clock_behind = Gauge(
            "penstock_queue_clock_behind_seconds",
            "Seconds by which the machine's clock was set forward since the queue read it, at its start.",
            registry=registry,
        )
        self.duplicates = Counter("penstock_queue_duplicates_total", "Submits with a known key.", registry=registry)
        self.refused_submits = Counter(
            "penstock_queue_refused_submits_total", "Submits refused, by cause.", ["cause"], registry=registry
        )
        begin(self.refused_submits, REFUSALS)
        self.requeues = Counter(
            "penstock_queue_requeues_total", "Requests put back in line.", ["channel", "cause"], registry=registry
        )
        self.stale = Counter(
            "penstock_queue_stale_completions_total", "Completions under a lost lease, dropped.", registry=registry
        )
        self.refused_claims = Counter(
            "penstock_queue_refused_claims_total", "Claims refused, by reason.", ["reason"], registry=registry
        )
        # Not of those that were withdrawn, which are none that a worker made in vain.
        begin(self.refused_claims, (each.name.lower() for each in RefusedReason if each is not RefusedReason.WITHDRAWN))
        self.deltas = LocalCounter("penstock_queue_token_deltas", "Token deltas passed on to watchers.", registry)
        self.dropped_deltas = LocalCounter(
            "penstock_queue_dropped_token_deltas",
            "Token deltas nobody watches or of an attempt that is over.",
            registry,
        )
        self.expired_results = Counter(
            "penstock_queue_expired_results_total", "Results deleted because they were too old.", registry=registry
        )
        self.auth = AuthMetrics("queue", registry)
        self.audit_violations = Counter(
            "penstock_queue_audit_violations_total",
            "Contradictions between the indexes of requests; must be 0.",
            registry=registry,
        )
        self.store_failures = Counter(
            "penstock_queue_store_failures_total",
            "Commits the store could not write, reads it could not answer, and seconds without its directory.",
            registry=registry,
        )
        self.commit_messages = Histogram(
            "penstock_queue_commit_messages", "Messages per commit.", buckets=BATCH_BUCKETS, registry=registry
        )
        self.commit_seconds = Histogram(
            "penstock_queue_commit_seconds", "Time of one synced commit.", buckets=SYNC_BUCKETS_S, registry=registry
        )
        self.commit_age = Gauge(
            "penstock_queue_commit_age_seconds",
            "Age of the commit under way, of requests or files, 0 if there is none; it ages also if the loop stands.",
            registry=registry,
        )
        self.e2e_seconds = LocalHistogram(
            "penstock_queue_e2e_seconds", "Time from submitted to completed.", LATENCY_BUCKETS_S, registry, "channel"
        )
        self.tallies = TallyCollector(registry)
        self._channels: set[str] = set()
        # Of a store that is being loaded they are not known, and 0 would be news: no dead letters, a full disk.
        for gauge in (self.dead, self.results, self.workers, self.scheduler, self.watchers, self.disk_free):
            gauge.set(math.nan)

    def show(self, view: QueueView, now_ns: int, watchers: int, disk_free_bytes: float) -> None:
        """Set the gauges; begin the counters of a channel that is new."""
        for line in view.lines:
            if line.channel not in self._channels:
                self._channels.add(line.channel)
                begin(self.requeues, [line.channel], WENT_BACK)
                _ = self.tallies.by_channel[line.channel]
            self.ready.labels(line.channel).set(line.ready)
            self.leased.labels(line.channel).set(line.leased)
            self.oldest.labels(line.channel).set(age_ns(line.oldest_submitted_ns, now_ns) / 1e9)
            self.oldest_servable.labels(line.channel).set(age_ns(line.oldest_servable_ns, now_ns) / 1e9)
        self.dead.set(view.dead)
        self.results.set(view.results)
        self.workers.set(view.workers)
        self.scheduler.set(view.scheduler_connected)
        self.watchers.set(watchers)
        self.disk_free.set(disk_free_bytes)


def age_ns(since_ns: int, now_ns: int) -> int:
    """Return the time since `since_ns`, or 0 if that is 0."""
    return max(0, now_ns - since_ns) if since_ns else 0
