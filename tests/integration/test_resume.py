"""The batch command can die at any moment; the same command then finishes the job, no line twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.batch_lines import mixed
from tests.support.fleet import ROOT, Fleet, alive, descendants, penstock, read_jsonl, write_jsonl
from tests.support.modules import python_path
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(300)]

LINES = 120


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """Start the `penstock` command in the background."""
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": python_path()}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def answered(journal: Path) -> int:
    """Return the number of whole lines after the journal's header."""
    return max(journal.read_bytes().count(b"\n") - 1, 0) if journal.exists() else 0


def assert_complete(output: Path, count: int) -> None:
    """Assert that every line has exactly one answer, in input order, and that the journal is gone."""
    lines = read_jsonl(output)
    assert [line["custom_id"] for line in lines] == [f"line-{i}" for i in range(count)]
    assert all(line["error"] is None for line in lines)
    assert not list(output.parent.glob(output.name + ".*")), "a journal is left"


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_the_command_dies_half_way(vllm_fleet: Fleet, tmp_path: Path, blow: signal.Signals) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", mixed(LINES, max_tokens=60))
    output = tmp_path / "out.jsonl"
    command = ["run-batch", "-i", str(source), "-o", str(output)]
    command += ["--queue", vllm_fleet.queue.address, "--scheduler", vllm_fleet.scheduler.address]
    journal = Path(f"{output}.partial")

    first = start(*command)
    wait_for(lambda: answered(journal) >= 10 or first.poll() is not None, "ten answers")
    assert first.poll() is None, first.stdout.read() if first.stdout else ""
    first.send_signal(blow)
    first.wait(30)
    assert first.returncode == (130 if blow == signal.SIGINT else -9)
    assert not output.exists()

    again = penstock(*command)
    assert again.returncode == 0, again.stdout + again.stderr
    assert_complete(output, LINES)


@pytest.mark.long
def test_the_whole_stack_is_killed_with_the_command(engine_flags: list[str], tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", mixed(LINES, max_tokens=60))
    output = tmp_path / "out.jsonl"
    command = ["run-batch", "--up", "--data-dir", str(tmp_path / "data"), "-i", str(source), "-o", str(output)]
    command += engine_flags
    journal = Path(f"{output}.partial")

    first = start(*command)
    wait_for(lambda: answered(journal) >= 10 or first.poll() is not None, "ten answers", 120)
    assert first.poll() is None, first.stdout.read() if first.stdout else ""
    family = descendants(first.pid)
    assert len(family) >= 4, "queue, scheduler, worker and the engine's processes"
    first.kill()
    first.wait()
    wait_for(lambda: not any(alive(pid) for pid in family), "every service to die with the command")

    again = penstock(*command)
    assert again.returncode == 0, again.stdout + again.stderr
    assert_complete(output, LINES)
