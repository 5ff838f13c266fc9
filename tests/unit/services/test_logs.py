"""Log records name request and trace, as text and as JSON."""

from __future__ import annotations

import json
import logging

import pytest

from penstock.request.v1 import request_pb2
from services.logs import FIELDS, Form, about, start_logging
from services.worker.core.values import Lease
from services.worker.run import Run

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def _restore_logging() -> object:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before


def said(form: Form, capsys: pytest.CaptureFixture[str], **extra: str) -> str:
    """Return what one warning with a stack trace looks like."""
    start_logging("info", form)
    log = logging.getLogger("worker")
    log.debug("not this")
    try:
        raise ValueError("bad\nvalue")
    except ValueError:
        log.warning("it %s", "failed", exc_info=True, extra=extra)
    return capsys.readouterr().err


def test_a_line_of_text_ends_with_request_and_trace(capsys: pytest.CaptureFixture[str]) -> None:
    first, *rest = said("text", capsys, **about("r-1", TRACEPARENT)).splitlines()
    assert first.endswith(f" WARNING worker it failed request_id=r-1 trace_id={TRACE}")
    assert rest[0].startswith("Traceback")


def test_a_line_of_text_without_a_request_has_no_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert said("text", capsys).splitlines()[0].endswith(" WARNING worker it failed")


def test_a_record_in_json_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = said("json", capsys, **about("r-1", TRACEPARENT)).splitlines()
    record = json.loads(line)
    assert record.pop("time").endswith("Z")
    assert record.pop("exception").endswith("ValueError: bad\nvalue")
    assert record == {
        "level": "warning", "logger": "worker", "message": "it failed", "request_id": "r-1", "trace_id": TRACE,
    }  # fmt: skip
    (plain,) = said("json", capsys).splitlines()
    assert not set(FIELDS) & json.loads(plain).keys()


@pytest.mark.parametrize(
    ("request_id", "traceparent", "known"),
    [
        ("", "", {}),
        ("r", "", {"request_id": "r"}),
        ("", TRACEPARENT, {"trace_id": TRACE}),
        ("r", "x", {"request_id": "r"}),
    ],
)
def test_only_what_is_known_is_said(request_id: str, traceparent: str, known: dict[str, str]) -> None:
    assert about(request_id, traceparent) == known


def test_a_run_of_the_worker_knows_both() -> None:
    run = Run(Lease("r-1", 2, 7), "r-1#2", request_pb2.Request(traceparent=TRACEPARENT), 0, 0)
    assert run.about == {"request_id": "r-1", "trace_id": TRACE}
