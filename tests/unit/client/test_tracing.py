"""Spans wait for export in numbers that a busy service makes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context
from prometheus_client import REGISTRY

import penstock
import services.telemetry  # noqa: F401 - it has the metric
from penstock.fields import RequestFields
from penstock.span_export import span_processor
from tests.support.fake_queue import FakeQueue, serving
from tests.support.otlp import OtlpReceiver

SPANS = 10_000
LOST_SPANS = "penstock_lost_spans_total"


class Blocked(SpanExporter):
    """An exporter whose collector does not answer for a while."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.answers.wait(60)
        self.spans += len(spans)
        return SpanExportResult.SUCCESS


def exported() -> int:
    """Return how many of many spans arrive at a collector that answers late."""
    exporter = Blocked()
    provider = TracerProvider()
    provider.add_span_processor(span_processor(exporter))
    tracer = provider.get_tracer("test")
    for _ in range(SPANS):
        tracer.start_span("x").end()
    exporter.answers.set()
    provider.shutdown()
    return exporter.spans


def test_a_slow_collector_costs_no_spans() -> None:
    assert exported() == SPANS


def test_the_standard_variable_overrides_how_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "1024")
    assert exported() < SPANS


class Refusing(SpanExporter):
    """An exporter whose collector takes nothing while it is `away`."""

    def __init__(self) -> None:
        self.away = True
        self.spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += 0 if self.away else len(spans)
        return SpanExportResult.FAILURE if self.away else SpanExportResult.SUCCESS


@pytest.mark.parametrize("exporter", [Blocked(), Refusing()], ids=["waits", "fails"])
def test_every_span_arrives_or_is_counted_as_lost(
    exporter: Blocked | Refusing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "1024")
    before = REGISTRY.get_sample_value(LOST_SPANS) or 0
    provider = TracerProvider()
    provider.add_span_processor(span_processor(exporter))
    tracer = provider.get_tracer("test")
    unsampled = NonRecordingSpan(SpanContext(7, 7, is_remote=False, trace_flags=TraceFlags(0)))
    for _ in range(SPANS):
        tracer.start_span("x").end()
        tracer.start_span("nobody's", context=set_span_in_context(unsampled)).end()
    if isinstance(exporter, Blocked):
        exporter.answers.set()
    else:
        provider.force_flush()
        exporter.away = False
        tracer.start_span("x").end()
    provider.shutdown()
    lost = (REGISTRY.get_sample_value(LOST_SPANS) or 0) - before
    assert lost > 0
    assert lost + exporter.spans == SPANS + isinstance(exporter, Refusing)
    assert f"lost spans: {lost:.0f}, not taken by the collector in time" in caplog.text


async def test_the_spans_of_a_batchs_lines_name_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    with OtlpReceiver() as receiver:
        for name, value in receiver.environment.items():
            monkeypatch.setenv(name, value)
        async with serving(FakeQueue()) as address, penstock.Client(address, retry_for_s=20) as client:
            lines = [RequestFields(prompt=f"line {number}", batch="b-1") for number in range(3)]
            acks = [ack async for ack in client.submit_many(lines)]
            alone = await client.submit(prompt="alone")
    told = [span.attributes for span in receiver.spans if span.name == "penstock.submit"]
    assert sorted(told, key=len) == [{"penstock.batch.id": "b-1"}] * len(acks) + [{"penstock.request.id": alone}]
