"""How spans leave a process: in batches, and at its end for a moment only, whatever the collector does."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic

from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE, OTEL_BSP_SCHEDULE_DELAY
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from penstock.lost_spans import LOST, Losses

log = logging.getLogger(__name__)

MOST_UNSENT_SPANS = 16_384
"""Spans that wait for export before the oldest are dropped. OpenTelemetry's default of 2,048 is less than a queue
makes in a second under load, five a request; of its spans this many take up to 64 MiB."""

EXPORT_DELAY_MS = 200.0
"""Longest that a span waits for others. What waits is lost if its process is killed, and OpenTelemetry's default is
five seconds; an export costs about a millisecond."""

LAST_EXPORT_S = 2.0
"""Longest that the end of a process waits for its collector. All that may wait is sent in less if the collector
answers; if it does not, OpenTelemetry's own 30 s are longer than what stops a service gives it."""


def span_processor(exporter: SpanExporter) -> BatchSpanProcessor:
    """Return a processor that exports in batches; the standard OTEL_BSP_… variables override our defaults."""
    return _Batches(exporter)


class _Outlet(SpanExporter):
    """Passes spans on to an exporter until its last moments are over, and counts those that do not arrive."""

    def __init__(self, exporter: SpanExporter, lost: Losses) -> None:
        self._lost = lost
        self._exporter = exporter
        self._ends_at: float | None = None
        self._closed = False

    def end_within(self, most_s: float) -> None:
        """Take no spans after `most_s` seconds."""
        self._ends_at = monotonic() + most_s

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export, unless it is too late."""
        result = SpanExportResult.FAILURE
        try:
            if self._ends_at is None or monotonic() < self._ends_at:
                result = self._exporter.export(spans)
        except Exception:
            if not self._closed:  # else its channel was closed under it, and it ends with anything
                raise
        finally:
            if result is not SpanExportResult.SUCCESS:
                self._lost.add(len(spans))
        return result

    def shutdown(self) -> None:
        """End the export under way, once."""
        if not self._closed:
            self._closed = True
            self._exporter.shutdown()


class _Batches(BatchSpanProcessor):
    """OpenTelemetry's batches, with an end that comes soon: also the one that it registers for the process's exit."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._lost = Losses(LOST)
        outlet = _Outlet(exporter, self._lost)
        # None is "as the variable says".
        most = None if os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE) else MOST_UNSENT_SPANS
        delay_ms = None if os.environ.get(OTEL_BSP_SCHEDULE_DELAY) else EXPORT_DELAY_MS
        super().__init__(outlet, max_queue_size=most, schedule_delay_millis=delay_ms)
        self._outlet = outlet
        self._full = threading.Lock()

    def on_end(self, span: ReadableSpan) -> None:
        """Keep a span until it is exported; where too many wait the oldest is lost."""
        if not span.context.trace_flags.sampled:
            return
        waiting, most = self._batch_processor._queue, self._batch_processor._max_queue_size
        # Taken out here and not left to the queue, which drops without a word: what an export takes out between the two
        # would be counted as lost.
        with self._full:
            if len(waiting) == most:
                with suppress(IndexError):
                    waiting.pop()
                    self._lost.add(1)
            super().on_end(span)

    def shutdown(self) -> None:
        """Export what is buffered, for a moment; give the rest up and say how much was lost, from the start on."""
        self._outlet.end_within(LAST_EXPORT_S)
        timer = threading.Timer(LAST_EXPORT_S, self._outlet.shutdown)
        timer.daemon = True
        # In an exit handler newer Pythons start no thread: the export under way then has the whole of its timeout.
        with suppress(RuntimeError):
            timer.start()
        super().shutdown()  # type: ignore[no-untyped-call]
        timer.cancel()
        if self._lost.spans:
            log.warning("lost spans: %d, not taken by the collector in time", self._lost.spans)
