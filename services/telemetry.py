"""Traces and metrics as every service sets them up; logs are in `logs`.

Traces go out over OTLP when the standard environment variables name an
endpoint, else they cost one attribute check. W3C trace context travels in the
messages themselves (`traceparent`), because one request crosses processes and
restarts that no call stack spans.
"""

from __future__ import annotations

import logging
import os
import ssl
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import prometheus_client
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.exits import EX_UNAVAILABLE
from penstock.lost_spans import LOST
from penstock.tracing_variables import exports_spans

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger(__name__)

Attribute: TypeAlias = str | bool | int | float | Sequence[str]

LATENCY_BUCKETS_S = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1,
    2,
    5,
    10,
    30,
    60,
    300,
    1800,
    7200,
)
"""Edges in seconds: from one decode step of a small model to two hours in a long batch's line."""

_propagator = TraceContextTextMapPropagator()


class LostSpans(Collector):
    """Reads how many spans of this process no collector got."""

    def collect(self) -> Iterator[Metric]:
        """Yield the count."""
        yield CounterMetricFamily("penstock_lost_spans", "Spans that no collector got.", value=LOST.spans)


prometheus_client.REGISTRY.register(LostSpans())


class Telemetry:
    """Spans of one service. With no endpoint configured every method is a cheap no-op."""

    def __init__(self, provider: TracerProvider | None) -> None:
        """Export through `provider`, or nothing if it is None."""
        self._provider = provider
        self._tracer = provider.get_tracer("penstock") if provider else None
        self.enabled = self._tracer is not None
        """Whether spans are exported; looked at several times for each request."""

    def start(
        self,
        name: str,
        parent: str,
        start_ns: int,
        attributes: Mapping[str, Attribute] | None = None,
        kind: trace.SpanKind = trace.SpanKind.INTERNAL,
    ) -> trace.Span:
        """Start a span at Unix time `start_ns`, child of the traceparent `parent` (a new trace if empty)."""
        if self._tracer is None:
            return trace.INVALID_SPAN
        return self._tracer.start_span(
            name, context=parent_context(parent), start_time=start_ns, attributes=attributes, kind=kind
        )

    def record(
        self,
        name: str,
        parent: str,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, Attribute] | None = None,
        error: str = "",
        events: Mapping[str, int] | None = None,
    ) -> str:
        """Export a span that is already over; return its traceparent (or `parent` when disabled).

        `events` are moments within it, Unix time in nanoseconds by name.
        """
        if self._tracer is None:
            return parent
        span = self.start(name, parent, start_ns, attributes)
        for event, at_ns in (events or {}).items():
            span.add_event(event, timestamp=at_ns)
        if error:
            span.set_status(trace.StatusCode.ERROR, error)
        span.end(end_time=max(start_ns, end_ns))
        return traceparent_of(span) or parent

    def close(self) -> None:
        """Export what is buffered, for a moment at most, and stop."""
        if self._provider is not None:
            self._provider.shutdown()


def parent_context(traceparent: str) -> otel_context.Context:
    """Return the context of a W3C traceparent; an empty one if it is empty or malformed."""
    return _propagator.extract({"traceparent": traceparent}, context=otel_context.Context())


def traceparent_of(span: trace.Span) -> str:
    """Return the W3C traceparent of `span`, empty if it has none."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span, otel_context.Context()))
    return carrier.get("traceparent", "")


def names_trace_of(span: trace.Span, traceparent: str) -> bool:
    """Return whether `traceparent` is good and of the trace that `span` belongs to; a malformed one has no child."""
    return traceparent.split("-")[1:2] == [trace.format_trace_id(span.get_span_context().trace_id)]


def start_telemetry(service: str, instance: str = "") -> Telemetry:
    """Set up traces for `service` from the standard OTEL_… environment variables."""
    if not exports_spans():
        return Telemetry(None)
    # A service that exports no spans starts without all this.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    from penstock.span_export import span_processor

    attributes = {"service.name": os.environ.get("OTEL_SERVICE_NAME") or f"penstock-{service}"}
    if instance:
        attributes["service.instance.id"] = instance
    provider = TracerProvider(resource=Resource.create(attributes))
    provider.add_span_processor(span_processor(OTLPSpanExporter()))
    return Telemetry(provider)


def start_metrics(listen: str, tls: ssl.SSLContext | None = None) -> None:
    """Serve Prometheus metrics on "HOST:PORT"; nothing if empty. Raises SystemExit if the port cannot be had."""
    # A creation time beside every counter doubles what is scraped and answers no question of ours. A gateway has a
    # port of its own for what is scraped.
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    if not listen:
        return
    host, _, port = listen.rpartition(":")
    host = host.strip("[]") or "0.0.0.0"
    try:
        server, _ = prometheus_client.start_http_server(int(port), addr=host)
        server.handle_error = _scrape_failed  # type: ignore[assignment]
        if tls is not None:
            # A connection's handshake then happens at its first read, in its own thread.
            server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{host!r} is no name of a host"
        print(f"cannot serve metrics on {listen}: {reason}", file=sys.stderr)
        raise SystemExit(EX_UNAVAILABLE) from None


def _scrape_failed(_connection: object, address: tuple[str, int]) -> None:
    """Say in a line what a connection to the metrics port ended with: plain HTTP to a TLS port, no certificate."""
    error = sys.exc_info()[1]
    log.warning("no metrics for %s: %s: %s", address[0], type(error).__name__, error)
