"""A collector that takes no spans holds no process up: what it has not taken in time is given up, and told of once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from penstock.span_export import LAST_EXPORT_S, MOST_UNSENT_SPANS
from tests.support.otlp import OtlpReceiver
from tests.support.ports import free_port

SPANS = 3_000
"""Six exports."""

BOUND_S = 30
"""Generous for a process that imports, makes the spans and ends."""

EXPORT_S = 120
"""Time that each export has: a process that waits for one takes longer than that."""

SERVICE = f"""
import logging
from services.telemetry import start_telemetry
logging.basicConfig()
telemetry = start_telemetry("queue")
for at in range({SPANS}):
    telemetry.record("x", "", at, at)
"""

CLIENT = f"""
import logging
from penstock.tracing import SubmitTracer
logging.basicConfig()
telemetry = SubmitTracer()
for _ in range({SPANS}):
    telemetry.context()[2].end()
"""

BACKLOG = f"""
import logging, sys
from services.telemetry import start_telemetry
from tests.support.resident import resident_bytes
logging.disable()
telemetry = start_telemetry("queue")
before = resident_bytes()
for at in range({MOST_UNSENT_SPANS}):
    request = {{"penstock.request.id": f"801c213e-{{at:012x}}", "penstock.attempt": 1}}
    line = {{**request, "penstock.channel": "interactive"}}
    lease = {{**line, "penstock.worker.id": f"worker-{{at % 9}}", "penstock.lease.end": "complete"}}
    trace = telemetry.record("queue.persist", "", at, at, line)
    telemetry.record("queue.wait", trace, at, at, line)
    telemetry.record("queue.lease", trace, at, at, lease, events={{"first_token": at, "last_token": at}})
    telemetry.record("queue.complete", trace, at, at, {{**request, "penstock.outcome": "completed"}})
print(resident_bytes() - before, file=sys.stderr)
"""
"""The queue's own spans of four times as many requests as may wait for export."""

NO_TIMER = """
import threading
def refuse(timer):
    raise RuntimeError("can't start new thread at interpreter shutdown")
threading.Timer.start = refuse
"""


@dataclass
class Hung(OtlpReceiver):
    """A collector that takes what it is sent and never answers."""

    asked: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.asked += 1
        self.over.wait(EXPORT_S)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def hung() -> Iterator[int]:
    receiver = Hung()
    with receiver:
        yield receiver.port
        receiver.over.set()


@contextmanager
def mute() -> Iterator[int]:
    """A port where connections are taken and nothing is said."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


@contextmanager
def absent() -> Iterator[int]:
    yield free_port()


@pytest.mark.parametrize("collector", [hung, mute, absent])
@pytest.mark.parametrize("end", ["telemetry.close()", "# it is left to the exit of the process"])
@pytest.mark.parametrize("process", [SERVICE, CLIENT], ids=["service", "client"])
def test_a_process_ends_though_its_collector_takes_nothing(
    process: str, end: str, collector: Callable[[], AbstractContextManager[int]]
) -> None:
    with collector() as port:
        errors = ended(process + end, port)
    told = [line for line in errors.splitlines() if "not taken" in line]
    assert len(told) == 1, errors
    assert f"lost spans: {SPANS}," in told[0]
    assert "Traceback" not in errors


def test_where_no_thread_can_be_started_the_end_waits_for_one_export_alone() -> None:
    receiver = Hung()
    with receiver:
        errors = ended(NO_TIMER + SERVICE + "telemetry.close()", receiver.port, export_s=2 * LAST_EXPORT_S)
        receiver.over.set()
    assert f"lost spans: {SPANS}," in errors
    assert receiver.asked <= 2  # of six; the second if it took long to make the spans


def test_what_waits_for_a_collector_takes_64_mib_at_most() -> None:
    with hung() as port:
        grown_bytes = int(ended(BACKLOG, port))
    assert 16 << 20 < grown_bytes < 64 << 20  # 57 MiB when it was written


def test_a_collector_that_answers_is_sent_everything() -> None:
    with OtlpReceiver() as receiver:
        errors = ended(SERVICE + "telemetry.close()", receiver.port)
    assert len(receiver.spans) == SPANS
    assert errors == ""


def ended(source: str, port: int, export_s: float = EXPORT_S) -> str:
    """Run `source` with the collector's `port` until it ends, which it must; return what it said."""
    environment = {
        **os.environ,
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_EXPORTER_OTLP_TIMEOUT": str(export_s),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=BOUND_S, check=True
    )
    return done.stderr
