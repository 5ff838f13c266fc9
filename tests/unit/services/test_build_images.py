"""What `make images` asks Docker for (deploy/docker/build.sh), and what it wants of a compiler (check_compiler.sh)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "deploy" / "docker"
SCRIPT = SCRIPTS / "build.sh"

DOCKER = """#!/bin/sh
case $1 in build) for word; do echo "$word"; done >>"$ASKED" ;; *) echo 1000000 ;; esac
"""

COMPILER = "python:3.11-bookworm"


@pytest.mark.parametrize(
    ("image", "given", "base"),
    [
        ("queue", {}, None),
        ("queue", {"BASE": "own", "BUILD_BASE": "own-build"}, "own"),
        ("worker-cpu", {"BUILD_BASE": "own-build"}, None),
        ("worker-cuda", {}, COMPILER),
        ("worker-cuda", {"BUILD_BASE": "own-build"}, "own-build"),
        ("worker-cuda", {"BASE": "own", "BUILD_BASE": "own-build"}, "own"),
    ],
)
def test_the_image_with_triton_runs_on_what_has_a_compiler(
    tmp_path: Path, image: str, given: dict[str, str], base: str | None
) -> None:
    docker, asked = tmp_path / "docker", tmp_path / "asked"
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ASKED": str(asked), **given}
    subprocess.run(["sh", str(SCRIPT), image], env=environment, check=True, capture_output=True, timeout=60)
    words = asked.read_text().splitlines()
    assert words[words.index("--target") + 1] == image
    assert [word for word in words if word.startswith("BASE=")] == ([f"BASE={base}"] if base else [])


WITHOUT_HEADERS = "#!/bin/sh\nexit 1\n"
COMPILES = """#!/bin/sh
for word; do case $word in *.c) grep -q Python.h "$word" || exit 2 ;; esac; done
"""


@pytest.mark.parametrize(
    ("compilers", "wanted", "said"),
    [
        ({}, [], "BASE has no C compiler (gcc or clang)"),
        ({"gcc": WITHOUT_HEADERS}, [], "BASE cannot compile for Python"),
        ({"gcc": COMPILES}, [], ""),
        ({"clang": COMPILES}, [], ""),
        ({"clang": COMPILES}, ["some-gcc"], "BASE has no C compiler (some-gcc)"),
        ({"some-gcc": COMPILES}, ["some-gcc"], ""),
    ],
)
def test_a_compiler_counts_that_compiles_for_python(
    tmp_path: Path, compilers: dict[str, str], wanted: list[str], said: str
) -> None:
    for program in ("sh", "mktemp", "rm", "grep"):
        found = shutil.which(program)
        assert found is not None
        (tmp_path / program).symlink_to(found)
    (tmp_path / "python3").symlink_to(sys.executable)
    for name, text in compilers.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    command = ["sh", str(SCRIPTS / "check_compiler.sh"), "BASE", *wanted]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == bool(said)
    assert said in done.stderr
