"""A real OTLP gRPC receiver: keeps every span it is sent."""

from __future__ import annotations

import threading
from concurrent import futures
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tests.support.ports import free_port


@dataclass(frozen=True)
class ReceivedSpan:
    """One span as it came over the wire."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: dict[str, int]
    """Moments within it by name, Unix time in nanoseconds."""
    is_error: bool = False
    """Whether its status says that something went wrong."""


@dataclass
class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """OTLP trace service on a free port of the loopback interface; use as a context manager."""

    spans: list[ReceivedSpan] = field(default_factory=list)
    _mutex: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> OtlpReceiver:
        self.port = free_port()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.stop(None)

    @property
    def environment(self) -> dict[str, str]:
        """The standard variables that point an exporter here and flush it quickly."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "OTEL_EXPORTER_OTLP_INSECURE": "true",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Keep the spans of one export."""
        received = spans_of(request)
        with self._mutex:
            self.spans.extend(received)
        return trace_service_pb2.ExportTraceServiceResponse()

    def of_trace(self, trace_id: str) -> list[ReceivedSpan]:
        """Return the spans of one trace, by start."""
        with self._mutex:
            return sorted((s for s in self.spans if s.trace_id == trace_id), key=lambda s: s.start_ns)


def spans_of(request: trace_service_pb2.ExportTraceServiceRequest) -> list[ReceivedSpan]:
    """Return the spans of one export."""
    return [
        ReceivedSpan(
            service=str(plain(resource_attributes(resource)["service.name"])),
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            start_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            attributes={item.key: plain(item.value) for item in span.attributes},
            events={event.name: event.time_unix_nano for event in span.events},
            is_error=span.status.code == Status.STATUS_CODE_ERROR,
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def resource_attributes(resource: Any) -> dict[str, AnyValue]:
    """Return the attributes of a resource by key."""
    return {item.key: item.value for item in resource.resource.attributes}


def plain(value: AnyValue) -> Any:
    """Return an OTLP attribute value as a Python value."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
