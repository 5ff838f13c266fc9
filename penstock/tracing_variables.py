"""The standard variables by which spans are exported: whether any are, and what OpenTelemetry makes nothing of.

OpenTelemetry ends some of them in an exception that names no variable, and others in a stack trace in the log.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import inf
from urllib.parse import urlparse

from penstock.errors import PenstockError

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""Either says where spans go; without one they are not even made."""

QUEUE_VARIABLE, BATCH_VARIABLE = "OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"
WHOLE_VARIABLES = (QUEUE_VARIABLE, BATCH_VARIABLE, "OTEL_BSP_SCHEDULE_DELAY", "OTEL_BSP_EXPORT_TIMEOUT")
SECONDS_VARIABLES = ("OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT")
COMPRESSION_VARIABLES = ("OTEL_EXPORTER_OTLP_COMPRESSION", "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION")

SPANS_OF_AN_EXPORT = 512
"""Of OpenTelemetry, where BATCH_VARIABLE says nothing else."""


class TracingError(PenstockError, ValueError):
    """A standard variable of OpenTelemetry's has a value that no spans can be exported by."""


def exports_spans() -> bool:
    """Return whether the environment asks for spans."""
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return not disabled and any(os.environ.get(name) for name in ENDPOINT_VARIABLES)


def check_variables() -> None:
    """Raise TracingError with a line for each variable that no spans can be exported by, if any are to be."""
    if exports_spans() and (wrong := "\n".join(_faults())):
        raise TracingError(wrong)


def _faults() -> Iterator[str]:
    for name in WHOLE_VARIABLES:
        if (value := os.environ.get(name)) and not _is_whole(value):
            yield f"{name}: must be a whole number from 1 on, not {value!r}"
    most, at_once = (os.environ.get(name) for name in (QUEUE_VARIABLE, BATCH_VARIABLE))
    if most and _is_whole(most) and _is_whole(at_once or "1") and int(most) < int(at_once or SPANS_OF_AN_EXPORT):
        yield f"{QUEUE_VARIABLE}: must be at least {BATCH_VARIABLE}, {at_once or SPANS_OF_AN_EXPORT}, not {most}"
    # An empty one is not the same as none to OpenTelemetry, from here on.
    for name in SECONDS_VARIABLES:
        if (value := os.environ.get(name)) is not None and not _is_time(value):
            yield f"{name}: must be a number of seconds above 0, not {value!r}"
    for name in COMPRESSION_VARIABLES:
        if (value := os.environ.get(name)) is not None and value.strip().lower() != "gzip":
            yield f"{name}: must be 'gzip', not {value!r}; without it nothing is compressed"
    for name in ENDPOINT_VARIABLES:
        try:
            urlparse(os.environ.get(name, ""))
        except ValueError as error:
            yield f"{name}: {error}"
    yield from _limit_faults()


def _is_whole(value: str) -> bool:
    try:
        return int(value) >= 1
    except ValueError:
        return False


def _is_time(value: str) -> bool:
    try:
        return 0 < float(value) < inf
    except ValueError:
        return False


def _limit_faults() -> Iterator[str]:
    from opentelemetry.sdk.trace import SpanLimits

    try:
        SpanLimits()
    except ValueError as error:  # it names the variable
        yield str(error)
