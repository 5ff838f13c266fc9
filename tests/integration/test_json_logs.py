"""The log of a worker with a real engine, as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from tests.support.fleet import Fleet

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(240)]

NO_RECORD = re.compile(r"ready: |\[W\d{4} |W\d{4} .*torch/")
"""The ready line, which is no log, what C++ writes, and what torch says while it is imported."""


def test_what_vllm_and_python_say_are_records(make_fleet: Callable[..., Fleet], engine_flags: list[str]) -> None:
    fleet = make_fleet()
    worker = fleet.add_worker("w1", [*engine_flags, "--log-format", "json"])
    lines = [line for line in worker.log().splitlines() if not NO_RECORD.match(line)]
    assert [line for line in lines if not line.startswith("{")] == []
    loggers = {json.loads(line)["logger"] for line in lines}
    assert {"worker", "vllm"} <= {logger.split(".")[0] for logger in loggers}
    assert "vllm.v1.worker.cpu_worker" in loggers, "the engine core's own"
