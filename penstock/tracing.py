"""The client's end of a request's trace: whose child the request is."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock.trace_context import state_of
from penstock.tracing_variables import check_variables, exports_spans

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_propagator = TraceContextTextMapPropagator()


class SubmitTracer:
    """Gives each submit its trace context.

    Inside a span of the caller's, that span is the parent. Outside any, and
    with an OTLP endpoint in the environment, a `penstock.submit` span is made.
    """

    def __init__(self) -> None:
        """Export spans if the standard environment variables name an endpoint; raises TracingError if one is wrong."""
        self._provider = _provider()
        self._tracer = self._provider.get_tracer("penstock") if self._provider else None

    def context(self, batch: str = "") -> tuple[str, str, trace.Span]:
        """Return (traceparent, tracestate, span) for a request of `batch`; end the span when the submit is durable."""
        current = trace.get_current_span()
        if current.get_span_context().is_valid:
            span: trace.Span = trace.INVALID_SPAN
            scope = otel_context.get_current()
        elif self._tracer is not None:
            span = self._tracer.start_span("penstock.submit", kind=trace.SpanKind.PRODUCER)
            if batch:
                span.set_attribute("penstock.batch.id", batch)
            scope = trace.set_span_in_context(span)
        else:
            return "", "", trace.INVALID_SPAN
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, scope)
        return carrier.get("traceparent", ""), state_of(carrier.get("tracestate", "")), span

    def close(self) -> None:
        """Export what is buffered, for a moment at most, and stop."""
        if self._provider is not None:
            self._provider.shutdown()


def _provider() -> TracerProvider | None:
    if not exports_spans():
        return None
    check_variables()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    from penstock.span_export import span_processor

    name = os.environ.get("OTEL_SERVICE_NAME") or "penstock-client"
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(span_processor(OTLPSpanExporter()))
    return provider
