"""What `make` sets up is set up again after a first time that broke off half-way."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

PYTHON = """#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then
    for directory; do :; done
    mkdir -p "$directory/bin" && cp "$HERE/inside" "$directory/bin/python"
    test -e "$HERE/whole" && touch "$directory/bin/pip"
fi
"""
"""Makes an environment, and fails behind that until there is a file `whole`: Debian's without python3-venv."""

INSIDE = """#!/bin/sh
echo "$*" >>"$HERE/asked"
case "$*" in "-m pip "* | "-c import pip") test -e "${0%/*}/pip" ;; esac
"""
"""The Python in it, without pip if that is how it was made."""


@pytest.mark.parametrize("command", [["sh", "tools/install_cpu.sh"], ["make", "dist", "PYTHON=./python"]], ids=str)
def test_an_environment_that_was_left_half_made_is_made_whole(tmp_path: Path, command: list[str]) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]}")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("tools", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name, text in (("python", PYTHON), ("inside", INSIDE)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "HERE": str(tmp_path), "PYTHON": "./python", "VENV": "environment"}

    def run() -> tuple[bool, str]:
        (tmp_path / "asked").write_text("")
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False, timeout=60)
        return done.returncode == 0, (tmp_path / "asked").read_text()

    assert not run()[0]
    (tmp_path / "whole").touch()
    worked, asked = run()
    assert worked
    assert re.search("^-m pip .* ?install ", asked, re.MULTILINE)
    assert run()[0]
