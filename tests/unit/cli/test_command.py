"""Ctrl-C ends the command quietly with 130 from its first line on, also while it is still being imported."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest

from penstock.exits import EX_INTERRUPTED

ROOT = Path(__file__).resolve().parents[3]

START = """
import os, runpy, signal, sys

class AtImport:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[-1]:
            sys.argv.pop()
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, AtImport())
runpy.run_module("penstock", run_name="__main__", alter_sys=True)
"""
"""Runs the command, with a Ctrl-C as the module named last is imported."""

ALONE = """
import sys
before = set(sys.modules)
sys.path.insert(0, sys.argv[1])
import penstock.command
print(*sorted(set(sys.modules) - before))
"""


def started(imported: str) -> list[str]:
    return [sys.executable, "-c", START, "version", imported]


@pytest.mark.parametrize("imported", ["penstock.cli", "grpc._cython", "typer", "penstock.cli.up", "penstock.cli.top"])
def test_ctrl_c_during_the_imports_is_quiet(imported: str) -> None:
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # who runs the tests may have it ignored
    done = subprocess.run(started(imported), cwd=ROOT, capture_output=True, text=True, check=False, preexec_fn=heed)
    assert (done.returncode, done.stdout, done.stderr) == (EX_INTERRUPTED, "", "")


def test_who_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    ignore = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    done = subprocess.run(started("typer"), cwd=ROOT, capture_output=True, text=True, check=False, preexec_fn=ignore)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_nothing_is_imported_before_the_first_line() -> None:
    command = [sys.executable, "-I", "-c", ALONE, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) - {"__future__"} == {"penstock", "penstock.command", "penstock.exits"}
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"penstock": "penstock.command:main"}


@pytest.mark.parametrize(("closed", "said"), [(">&-", b""), ("2>&-", b"penstock"), ("<&-", b"penstock")])
def test_a_closed_stream_ends_nothing(closed: str, said: bytes) -> None:
    command = ["bash", "-c", f'exec "$0" -m penstock --help {closed}', sys.executable]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert said in done.stdout
