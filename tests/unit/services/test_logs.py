"""Log records name request and trace, as text and as JSON."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import warnings

import pytest

from penstock.request.v1 import request_pb2
from services.logs import FIELDS, Form, about, start_logging
from services.worker.core.values import Lease
from services.worker.run import Run
from services.worker.vllm import logs
from tests.support.fleet import ROOT

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


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_warning_of_pythons_is_a_record(form: Form, capsys: pytest.CaptureFixture[str]) -> None:
    start_logging("info", form)
    warnings.warn("not for long", FutureWarning, stacklevel=1)
    (line,) = capsys.readouterr().err.splitlines()
    message = json.loads(line)["message"] if form == "json" else line.split(" WARNING py.warnings ")[1]
    assert message.startswith(f"{__file__}:")
    assert message.endswith(": FutureWarning: not for long")


VLLM_LOGS = """
import json, logging.config, os
from pathlib import Path
from services.logs import start_logging
from services.worker.vllm import logs
start_logging("info", "text")
logs.log_as_json()
logging.config.dictConfig(json.loads(Path(os.environ["VLLM_LOGGING_CONFIG_PATH"]).read_text()))
logging.getLogger("vllm.v1").info("not this")
logging.getLogger("vllm.v1").warning("this")
logging.getLogger("worker").info("nor is the worker's own level changed")
"""
"""In a process of its own: what is configured is the whole process's."""


def test_vllm_is_configured_to_log_as_we_do() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    process = subprocess.run(
        [sys.executable, "-c", VLLM_LOGS], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    first, second = (json.loads(line) for line in process.stderr.splitlines())
    assert (first["logger"], first["message"]) == ("vllm.v1", "this")
    assert second["logger"] == "worker"


@pytest.mark.parametrize("theirs", [("VLLM_CONFIGURE_LOGGING", "0"), ("VLLM_LOGGING_CONFIG_PATH", "/theirs.json")])
def test_a_users_own_configuration_of_vllms_logging_stays(
    theirs: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", "")  # which notes what to put back
    monkeypatch.delenv("VLLM_LOGGING_CONFIG_PATH")
    monkeypatch.setenv(*theirs)
    logs.log_as_json()
    assert os.environ.get("VLLM_LOGGING_CONFIG_PATH") == dict([theirs]).get("VLLM_LOGGING_CONFIG_PATH")


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
