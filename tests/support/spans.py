"""Spans as a service would export them, kept in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from services.telemetry import Telemetry


class Kept:
    """Telemetry whose spans a test looks at."""

    def __init__(self) -> None:
        """Have none yet."""
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.telemetry = Telemetry(provider)

    def named(self, name: str) -> Sequence[ReadableSpan]:
        """Return those of a name, in the order in which they ended."""
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        """Return the only one of a name."""
        (span,) = self.named(name)
        return span


def told(span: ReadableSpan, *names: str) -> Mapping[str, Any]:
    """Return these attributes of a span, those that it has."""
    attributes = span.attributes or {}
    return {name: attributes[name] for name in names if name in attributes}


def is_error(span: ReadableSpan) -> bool:
    """Return whether its status says that something went wrong."""
    return span.status.status_code is StatusCode.ERROR
