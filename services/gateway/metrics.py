"""What the gateway counts."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from penstock.openai.bodies import CHAT_URL, COMPLETIONS_URL
from services.born import begin
from services.gateway.core.batch import Status
from services.gateway.limits import CLIENT_CLOSED
from services.telemetry import LATENCY_BUCKETS_S

PREFIX = "penstock_gateway_"

USUAL = ("200", "400", "429", str(CLIENT_CLOSED), "500", "503")
"""Statuses that every gateway answers with some day: counted from the start, others from their first on."""

ENDS = (Status.COMPLETED, Status.FAILED, Status.EXPIRED, Status.CANCELLED)
"""How a batch may end."""

STEPS = ("submitted", "completed", "failed")
"""What becomes of a batch's line."""


class GatewayMetrics:
    """Counters and histograms of one gateway."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        """Register in `registry`."""
        self.registry = registry
        self.requests = Counter(
            f"{PREFIX}requests", "Generations asked for, by the status they ended with.", ["endpoint", "status"],
            registry=registry,
        )  # fmt: skip
        begin(self.requests, (CHAT_URL, COMPLETIONS_URL), USUAL)
        self.open_requests = Gauge(f"{PREFIX}open_requests", "Generations being answered.", registry=registry)
        self.seconds = Histogram(
            f"{PREFIX}request_seconds", "From the headers to the end of the answer.", ["endpoint"],
            buckets=LATENCY_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.first_token = Histogram(
            f"{PREFIX}time_to_first_token_seconds", "From the headers to the first chunk of a stream.", ["endpoint"],
            buckets=LATENCY_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.hangups = Counter(f"{PREFIX}hangups", "Clients that went away before their answer.", registry=registry)
        self.cancels = Counter(f"{PREFIX}cancels", "Requests cancelled because of that.", registry=registry)
        self.uncancelled = Counter(
            f"{PREFIX}uncancelled", "Requests that go on without their clients, as cancelling them failed.",
            registry=registry,
        )  # fmt: skip
        self.diverged = Counter(
            f"{PREFIX}diverged_streams", "Streams ended because a later attempt said something else.", registry=registry
        )
        self.uploads = Counter(f"{PREFIX}uploads", "Files asked to be taken, by status.", ["status"], registry=registry)
        begin(self.uploads, USUAL)
        self.upload_bytes = Counter(f"{PREFIX}upload_bytes", "Content of the files taken.", registry=registry)
        self.open_batches = Gauge(
            f"{PREFIX}open_batches", "Batches of the whole queue that have not ended.", registry=registry
        )
        self.ended_batches = Counter(
            f"{PREFIX}ended_batches", "Batches ended by this gateway.", ["status"], registry=registry
        )
        begin(self.ended_batches, ENDS)
        self.batch_lines = Counter(
            f"{PREFIX}batch_lines",
            "Lines of batches submitted, completed and failed here.",
            ["step"],
            registry=registry,
        )
        begin(self.batch_lines, STEPS)
