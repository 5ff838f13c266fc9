"""The scheduler's runner without a server, for tests to wake by hand."""

from __future__ import annotations

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from penstock.scheduler.v1 import scheduler_pb2
from services.scheduler.core import messages as m
from services.scheduler.core.admission.policies import POLICIES
from services.scheduler.core.machine import Machine
from services.scheduler.core.sharing.share import Share
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.runner import Runner, WorkerStream
from services.scheduler.tracing import CreditSpans
from services.telemetry import Telemetry
from tests.support.scheduling import SECOND_NS


class SetClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        """Begin with the second second."""
        self.time_ns = SECOND_NS

    def now_ns(self) -> int:
        """Return what was set."""
        return self.time_ns


class Shell:
    """A runner without a server: wake-ups by hand, spans and metrics kept in memory."""

    def __init__(self, policy: str = "virtual-channels", standing_ns: int = 0) -> None:
        """Start with a queue connected and no worker."""
        self.clock = SetClock()
        self.registry = CollectorRegistry()
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        machine = Machine(POLICIES[policy], {"batch": Share()}, 0, 0, standing_ns=standing_ns)
        spans = CreditSpans(Telemetry(provider))
        self.runner = Runner(machine, self.clock, spans, SchedulerMetrics(self.registry), 20)
        self.runner.feed([m.QueueOpened(("batch",))])

    def open(self, worker_id: str = "w1") -> WorkerStream:
        """Open an epoch of a worker of ten blocks."""
        opened = scheduler_pb2.CreditsOpen(
            worker_id=worker_id, instance_id="i", capacity_blocks=10, block_size=1, max_model_len=100,
            model="m", role=scheduler_pb2.WORKER_ROLE_UNIFIED, max_num_seqs=5, takes_standing_grants=True,
            model_aliases=["tuned"], adapters=["tuned"],
        )  # fmt: skip
        stream = self.runner.open_worker(scheduler_pb2.WorkerToScheduler(open=opened))
        self.runner.wake()
        return stream
