"""A short run of the chaos harness: simulated engine, eight kills, nothing lost and nothing twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fleet import ROOT


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(120)
def test_a_short_run_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.chaos", "--short", "--directory", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    report = json.loads(ran.stdout.splitlines()[-1])
    assert sum(report["kills"].values()) >= 7
    assert (report["lost"], report["duplicated"], report["credit_violations"]) == (0, 0, 0)
