"""Ctrl-C, SIGTERM and a closed terminal end a command quietly with 130 also before its work has begun and after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from penstock.exits import EX_INTERRUPTED
from tests.unit.cli.test_run_batch import NO_SCHEDULER, lines_in

ROOT = Path(__file__).resolve().parents[3]

SENDS_ITSELF_A_SIGNAL = """
import atexit, os, signal, sys

number, event, what = os.environ["INTERRUPT"].split(" ")

def interrupt():
    global event
    event = None
    os.kill(os.getpid(), signal.Signals[number])

def notice(name, arguments):
    if name == event and (not what or str(arguments[0]) == what):
        interrupt()

class Last:
    def __del__(self, kill=os.kill, process=os.getpid(), number=signal.Signals[number]):
        kill(process, number)

if event == "end":
    atexit.register(interrupt)
elif event == "teardown":
    last = Last()
sys.addaudithook(notice)
"""
"""In place of a `sitecustomize`: sends the signal when an event of Python's comes whose first argument is this one."""

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def interrupted(
    directory: Path, number: signal.Signals, at: str, *command: str, ignored: bool = False
) -> subprocess.CompletedProcess[str]:
    """Return how the command ended that was sent this signal when the event came."""
    (directory / "sitecustomize.py").write_text(SENDS_ITSELF_A_SIGNAL)
    handler = signal.SIG_IGN if ignored else signal.SIG_DFL  # who runs the tests may have them ignored
    return subprocess.run(
        [sys.executable, "-m", "penstock", *command],
        env={
            **os.environ,
            "INTERRUPT": f"{number.name} {at}",
            "PYTHONPATH": f"{directory}:{ROOT}",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=partial(signal.signal, number, handler),
    )


def run_batch_in(directory: Path) -> list[str]:
    source = lines_in(directory / "in", 2)
    return ["run-batch", "-i", str(source), "-o", str(directory / "out"), "--queue", "127.0.0.1:1", *NO_SCHEDULER]


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    "at",
    [
        "import penstock.cli.main",
        "import grpc",
        "open {directory}/in",
        "open {directory}/out.partial",
        "socket.__new__ ",
    ],
)
def test_an_interrupt_before_the_work_is_quiet(tmp_path: Path, number: signal.Signals, at: str) -> None:
    done = interrupted(tmp_path, number, at.format(directory=tmp_path), *run_batch_in(tmp_path))
    said = "penstock: interrupted before any line was submitted\n" if at.startswith("socket") else ""
    assert (done.returncode, done.stdout, done.stderr) == (EX_INTERRUPTED, "", said)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "sitecustomize.py"]


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("at", ["end ", "teardown "])
def test_an_interrupt_after_the_work_takes_nothing_from_its_status(
    tmp_path: Path, number: signal.Signals, at: str
) -> None:
    done = interrupted(tmp_path, number, at, "version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
    failed = interrupted(tmp_path, number, at, *run_batch_in(tmp_path))
    assert (failed.returncode, len(failed.stderr.splitlines())) == (69, 1)


@pytest.mark.parametrize("number", SIGNALS)
def test_who_ignores_a_signal_goes_on_ignoring_it(tmp_path: Path, number: signal.Signals) -> None:
    for at in ("import grpc", f"open {tmp_path}/in"):
        done = interrupted(tmp_path, number, at, *run_batch_in(tmp_path), ignored=True)
        assert done.returncode == 69
