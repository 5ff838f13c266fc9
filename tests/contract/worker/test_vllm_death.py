"""What becomes of the runs of real vLLM when its front-end fails."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(240)]


def test_what_ends_vllms_output_loop_refuses_nobody(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.vllm_loop_death", str(tmp_path / "tiny")]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *runs, engine = ast.literal_eval(done.stdout.splitlines()[-1])
    assert runs == ["dead", "dead"], "an attempt that failed, and not a request that is refused"
    assert "front-end" in engine, "its core lives"
