"""What `make images` asks Docker for (deploy/docker/build.sh)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "deploy" / "docker" / "build.sh"

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
