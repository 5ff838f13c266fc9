"""Which Python `make setup` takes (tools/find_python.sh)."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "find_python.sh"


def fake_python(path: Path, optimised: bool = False, complete: bool = False) -> Path:
    """Make a program that answers the script's two questions: with `-c` whether it is optimised, with `-` the other."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\ncase "$1" in -c) exit {1 - optimised} ;; -) exit {1 - complete} ;; esac\n')
    path.chmod(0o755)
    return path


def found(first_in_path: Path, system: Path) -> str:
    environment = {"PATH": f"{first_in_path.parent}:/usr/bin:/bin", "SYSTEM_PYTHON": str(system)}
    done = subprocess.run(["sh", str(SCRIPT)], env=environment, capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("optimised", "complete", "system_is_taken"),
    [(False, True, True), (True, True, False), (False, False, False), (True, False, False)],
)
def test_the_systems_is_taken_where_it_is_faster_and_complete(
    tmp_path: Path, optimised: bool, complete: bool, system_is_taken: bool
) -> None:
    first = fake_python(tmp_path / "first" / "python3", optimised=optimised)
    system = fake_python(tmp_path / "system" / "python3", complete=complete)
    assert found(first, system) == (str(system) if system_is_taken else "python3")


def test_where_there_is_no_system_python_the_first_in_the_path_is_taken(tmp_path: Path) -> None:
    first = fake_python(tmp_path / "first" / "python3")
    assert found(first, tmp_path / "none") == "python3"


def test_a_real_python_is_asked_for_its_version_its_headers_and_venv(tmp_path: Path) -> None:
    first = fake_python(tmp_path / "first" / "python3")
    has_headers = (Path(sysconfig.get_path("include")) / "Python.h").exists()
    has_all = has_headers and sys.version_info[:2] <= (3, 13) and find_spec("ensurepip") is not None
    assert found(first, Path(sys.executable)) == (sys.executable if has_all else "python3")
