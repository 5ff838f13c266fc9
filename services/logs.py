"""Log records as every service writes them: one line each to standard error, as text or as JSON.

A record that is about a request says so in fields of its own, `request_id` and, where the request's trace is at hand,
`trace_id`, so that a log search and a trace find each other.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from typing import Literal, TextIO, TypeAlias

Form: TypeAlias = Literal["text", "json"]

TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s%(fields)s"
FIELDS = ("request_id", "trace_id")
TRACEPARENT_PARTS = 4
"""Version, trace id, parent id and flags (W3C trace context)."""


def about(request_id: str, traceparent: str = "") -> dict[str, str]:
    """Return the `extra` of a log record about a request, known by its id, its W3C traceparent, or both."""
    parts = traceparent.split("-")
    found = {"request_id": request_id, "trace_id": parts[1] if len(parts) >= TRACEPARENT_PARTS else ""}
    return {name: value for name, value in found.items() if value}


class TextFormatter(logging.Formatter):
    """A line for people, the fields behind the message; a stack trace follows on lines of its own."""

    def __init__(self) -> None:
        """Write lines like TEXT."""
        super().__init__(TEXT)

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and the stack trace below it."""
        record.fields = "".join(f" {name}={getattr(record, name)}" for name in FIELDS if hasattr(record, name))
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """An object a line: time (UTC), level, logger, message, the fields, and the stack trace of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def start_logging(level: str, form: Form) -> None:
    """Log to standard error, one record a line, at `level` and above; Python's warnings too."""
    logging.basicConfig(level=level.upper(), handlers=[handler_of(form)], force=True)
    log_warnings()


def handler_of(form: Form) -> logging.Handler:
    """Return what writes records to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    return handler


def log_warnings() -> None:
    """Have Python's warnings logged: on their own they are two lines of text each."""
    warnings.showwarning = _log_warning


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,  # noqa: ARG001 - as `warnings` calls it
    line: str | None = None,  # noqa: ARG001
) -> None:
    logging.getLogger("py.warnings").warning("%s:%d: %s: %s", filename, lineno, category.__name__, message)
