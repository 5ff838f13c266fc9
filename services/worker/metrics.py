"""Prometheus metrics of the worker: histograms as things happen, the rest read from the session when scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.local_metrics import LocalCounter, LocalHistogram, Samples
from services.telemetry import LATENCY_BUCKETS_S
from services.worker.core.lifecycle import State
from services.worker.core.session import Session

TOKEN_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)
"""Edges in seconds for the time between tokens: one decode step, up to a pause by preemption."""

GAUGES = {
    "engine_running": "Sequences running in the engine.",
    "engine_waiting": "Sequences waiting in the engine.",
    "free_blocks": "KV-cache blocks free by the engine's last report.",
    "held_blocks": "Blocks held by reservations.",
    "capacity_blocks": "Blocks that may be booked.",
    "kv_cache_usage_ratio": "Share of KV-cache blocks in use, 0 to 1.",
    "unrecorded_completions": "Completions not yet recorded by the queue.",
}

COUNTERS = {
    "grants": "Grants taken.",
    "refused_claims": "Claims the queue refused.",
    "over_need": "Requests that needed more blocks than were booked.",
    "leases_lost": "Leases lost while the request was here.",
    "given_back": "Leases handed back unharmed.",
    "stale_completions": "Completions dropped by the queue because the lease was stale.",
    "successors": "Grants for a request whose earlier run was still here.",
    "audit_violations": "Contradictions between reservations, pool and engine; must be 0.",
    "ignored": "Messages for something that no longer exists.",
}


class WorkerMetrics:
    """The worker's metrics in one registry."""

    def __init__(self, session: Session, capacity_blocks: int, registry: CollectorRegistry = REGISTRY) -> None:
        """Register everything with `registry`."""

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Samples:
            return LocalHistogram(f"penstock_worker_{name}_seconds", text, buckets, registry).of("")

        def counter(name: str, text: str) -> LocalCounter:
            return LocalCounter(f"penstock_worker_{name}", text, registry)

        self.time_to_first_token = histogram(
            "time_to_first_token", "From the engine's start to the first token.", LATENCY_BUCKETS_S
        )
        self.inter_token = histogram("inter_token", "Between two tokens of a sequence.", TOKEN_BUCKETS_S)
        self.request = histogram("request", "From delivery to the end of the attempt.", LATENCY_BUCKETS_S)
        self.tokenizer = histogram("tokenizer", "From delivery to the tokenized prompt.", LATENCY_BUCKETS_S)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens given to the engine.")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens taken from the prefix cache.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.unwritable_results = counter("unwritable_results", "Runs whose output no message could carry.")
        registry.register(SessionCollector(session, capacity_blocks))


class SessionCollector(Collector):
    """Reads the session at each scrape; one owner of the numbers, no copies to keep in step."""

    def __init__(self, session: Session, capacity_blocks: int) -> None:
        """Read `session`."""
        self._session = session
        self._capacity_blocks = capacity_blocks

    def collect(self) -> Iterator[Metric]:
        """Yield the current numbers."""
        session, stats = self._session, self._session.view.stats
        states = session.states()
        values: dict[str, float] = {
            "engine_running": stats.running,
            "engine_waiting": stats.waiting,
            "free_blocks": stats.blocks_free,
            "held_blocks": session.held_blocks,
            "capacity_blocks": self._capacity_blocks,
            "kv_cache_usage_ratio": stats.kv_cache_usage,
            "unrecorded_completions": states[State.FINISHING],
        }
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"penstock_worker_{name}", text, value=values[name])
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"penstock_worker_{name}", text, value=getattr(session.counters, name))
        yield CounterMetricFamily(
            "penstock_worker_preemptions", "Preemptions since the worker started.", value=stats.preemptions
        )
        requests = GaugeMetricFamily("penstock_worker_requests", "Requests by state.", labels=["state"])
        for state, count in states.items():
            requests.add_metric([state.value], count)
        yield requests
        releases = CounterMetricFamily("penstock_worker_releases", "Reservations released.", labels=["cause"])
        for cause, count in session.counters.releases.items():
            releases.add_metric([cause.value], count)
        yield releases
