"""`penstock up` and the commands against real services with the simulated engine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.batch_lines import mixed
from tests.support.fleet import ROOT, alive, descendants, penstock, read_jsonl, write_jsonl
from tests.support.modules import python_path
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


class Up:
    """A running `penstock up`."""

    def __init__(self, data_dir: Path, *flags: str) -> None:
        self.data_dir = data_dir
        self.output = data_dir.parent / "up.log"
        command = ["up", "--data-dir", str(data_dir), "--base-port", "0", "--engine", "simulated"]
        with self.output.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "penstock", *command, *flags],
                cwd=ROOT, env={**os.environ, "PYTHONPATH": python_path()}, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def said(self) -> str:
        """Return everything it printed."""
        return self.output.read_text()

    def address(self, service: str) -> str:
        """Return the address of a service, once everything is ready."""
        wait_for(lambda: "ready;" in self.said() or self.process.poll() is not None, "penstock up to be ready")
        found = re.search(rf"^{service} +(\S+)$", self.said(), re.MULTILINE)
        assert found, self.said()
        return found.group(1)

    def flags(self) -> list[str]:
        """Return the flags that lead a command here."""
        return ["--queue", self.address("queue"), "--scheduler", self.address("scheduler")]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    running = Up(tmp_path / "data", "--workers", "2", "--served-model-name", "sim")
    yield running
    if running.process.poll() is None:
        running.process.send_signal(signal.SIGINT)
        running.process.wait(60)


def test_one_request_from_submit_to_status(up: Up) -> None:
    queue = ["--queue", up.address("queue")]
    text = penstock("submit", "the river", "--max-tokens", "8", "--wait", *queue)
    assert text.returncode == 0, text.stderr + up.said()
    assert text.stdout.strip()
    streamed = penstock("submit", "--chat", "hello", "--max-tokens", "8", "--ignore-eos", "--stream", *queue)
    assert streamed.returncode == 0, streamed.stderr
    assert streamed.stdout.strip()

    shown = penstock("status", "--json", *up.flags())
    status = json.loads(shown.stdout)
    assert [worker["worker_id"] for worker in status["scheduler"]["workers"]] == ["worker-1", "worker-2"]
    assert status["scheduler"]["audit_violations"] == 0
    printed = re.search(r"^try +(curl .+)$", up.said(), re.MULTILINE)
    assert printed, up.said()
    pasted = subprocess.run(
        f"{printed.group(1)} --silent --fail", shell=True, capture_output=True, text=True, check=False
    )
    assert pasted.returncode == 0, pasted.stderr
    assert json.loads(pasted.stdout)["model"] == "sim"
    table = penstock("status", "--once", *up.flags()).stdout
    assert "worker-2" in table
    assert "interactive" in table


def test_ctrl_c_stops_everything(up: Up) -> None:
    up.address("queue")
    family = descendants(up.process.pid)
    assert len(family) >= 5, "queue, scheduler, two workers and the gateway"
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(60) == 0
    assert not any(alive(pid) for pid in family)
    assert "stopped" in up.said()


def test_kill_9_leaves_nothing(up: Up) -> None:
    up.address("queue")
    family = descendants(up.process.pid)
    up.process.kill()
    up.process.wait()
    wait_for(lambda: not any(alive(pid) for pid in family), "every service to be gone")


def test_a_killed_service_is_started_again_on_its_port(up: Up, tmp_path: Path) -> None:
    source = write_jsonl(
        tmp_path / "in.jsonl", [{**line, "body": {**line["body"], "model": "sim"}} for line in mixed(50)]
    )
    flags = up.flags()
    queue = next(
        pid for pid in descendants(up.process.pid) if b"services.queue" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(queue, signal.SIGKILL)
    done = penstock("run-batch", "-i", str(source), "-o", str(tmp_path / "out.jsonl"), "--wait-s", "60", *flags)
    assert done.returncode == 0, done.stderr + up.said()
    assert len(read_jsonl(tmp_path / "out.jsonl")) == 50
    assert "starting it again" in up.said()


def test_a_batch_with_its_own_services(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", mixed(40))
    output, summary = tmp_path / "out.jsonl", tmp_path / "summary.json"
    command = ["run-batch", "--up", "--data-dir", str(tmp_path / "data"), "-i", str(source), "-o", str(output)]
    engine = ["--engine", "simulated", "--served-model-name", "tiny"]
    done = penstock(*command, "--summary-json", str(summary), *engine)
    assert done.returncode == 0, done.stderr
    assert [line["custom_id"] for line in read_jsonl(output)] == [f"line-{i}" for i in range(40)]
    said = json.loads(summary.read_text())
    assert (said["requests"], said["preemptions"]) == (40, 0)
    assert said["completion_refunds"] == 40
    first = output.read_bytes()
    again = penstock(*command, *engine)
    assert "40 of 40 lines were answered earlier" in again.stderr
    assert output.read_bytes() == first


def test_a_wrong_engine_flag_ends_the_command_with_its_reason(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", mixed(1))
    done = penstock(
        "run-batch", "--up", "--data-dir", str(tmp_path / "data"), "-i", str(source), "-o", str(tmp_path / "out.jsonl"),
        "--engine", "simulated", "--no-such-flag", "3",
    )  # fmt: skip
    assert done.returncode == 78
    assert "no-such-flag" in done.stderr
    assert "Traceback" not in done.stderr
