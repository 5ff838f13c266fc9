"""What cannot be measured is refused in a line that names the option, before anything is started."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.admission import sim
from benchmarks.options import POLICIES
from services.scheduler.core.admission import policies

MAINS = {
    "batch_files": "bench_batch_files", "first_byte": "bench_first_byte", "keys": "bench_keys",
    "isolation": "bench_isolation", "gateway": "bench_gateway", "fit": "fit_engine",
    "lifecycle": "bench_lifecycle", "main": "bench_main", "overload": "bench_overload", "ratio": "bench_ratio",
    "recovery": "bench_recovery", "makespan": "admission.makespan", "real": "admission.real", "sim": "admission.sim",
    "waits": "admission.isolation",
}  # fmt: skip

MAKEFILE = (Path(__file__).parents[3] / "Makefile").read_text()


@pytest.mark.parametrize(
    "line",
    [
        "batch_files --lines 0",
        "batch_files --line-bytes 120",
        "first_byte --rounds 0",
        "first_byte --streams 0",
        "fit --rounds 0",
        "fit --samples .",
        "fit --samples /dev/null/steps.csv",
        "gateway --alone -1",
        "gateway --requests 3",
        "gateway --rounds 0",
        "gateway --sustained 0",
        "isolation --seconds 0",
        "keys --requests 100",
        "keys --rounds 0",
        "lifecycle --only penstock,rediss",
        "lifecycle --parts comapre",
        "lifecycle --rounds 0",
        "lifecycle --lone 0",
        "lifecycle --policy predictve",
        "lifecycle --workers 1,x",
        "main --policy predictve",
        "main --workers 0",
        "overload --alone-s 0.2",
        "overload --capacity 0",
        "ratio --policy predictve",
        "ratio --rounds -1",
        "recovery --parts queues",
        "recovery --waiting 100,",
        "makespan --policy predictve",
        "makespan --seeds x",
        "real --policies push,predictve",
        "real --policies predictive,push",
        "real --out /dev/null/bench",
        "real --rounds 0",
        "sim --engine-watermark nan",
        "sim --engine-watermark 2",
        "sim --out /dev/null/bench",
        "sim --policies old-pull,predictive",
        "sim --policies push,predictve",
        "sim --prompt-noise -0.1",
        "sim --requests 0",
        "sim --seeds x",
        "sim --pool-windows 0",
        "sim --pool-windows 0.5",
        "sim --pool-windows nan",
        "waits --per-second 0.5",
        "waits --ratio -1",
        "waits --seconds 2",
        "waits --share 0",
        "waits --share 1.5",
    ],
)
def test_a_value_that_cannot_be_is_refused(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, option, value = line.split()
    module = importlib.import_module(f"benchmarks.{MAINS[name]}")
    monkeypatch.setattr(sys, "argv", [name, option, value])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    assert option in capsys.readouterr().err


def test_a_directory_for_outcomes_is_there_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "a" / "b"
    monkeypatch.setattr(sys, "argv", ["sim", "--requests", "5", "--out", str(out)])
    monkeypatch.setattr(sim, "compare", lambda *_arguments: out.is_dir() or pytest.fail("it is not there"))
    monkeypatch.setattr(sim, "print_table", lambda *_arguments: [])
    sim.main()
    assert list(out.iterdir()) == []


def test_outcomes_of_the_simulation_are_written_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["sim", "--workload", "bimodal", "--requests", "5"])
    sim.main()
    written = {path.name for path in (tmp_path / "build/bench-sim").iterdir()}
    assert written == {"bimodal-push-0.json", "bimodal-predictive-0.json", "bimodal.png"}


@pytest.mark.parametrize("target", re.findall(r"^(bench-[a-z-]+):", MAKEFILE, re.MULTILINE))
def test_a_target_takes_the_options_of_its_benchmark(target: str) -> None:
    recipe = MAKEFILE[MAKEFILE.index(f"\n{target}:") :].split("\n\n")[0]
    assert "ARGS" in recipe.partition("\n\t")[2]


@pytest.mark.parametrize("name", MAINS)
def test_help_is_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{MAINS[name]}").main()
    assert ended.value.code == 0


def test_the_policies_are_those_of_the_scheduler() -> None:
    assert tuple(policies.POLICIES) == POLICIES


@pytest.mark.parametrize("name", ["bench_main", "bench_ratio"])
def test_a_client_that_is_started_has_the_io_of_a_user(name: str) -> None:
    """Importing `services` puts gRPC's older I/O into the environment, which `penstock run-batch` would inherit."""
    look = f"import sys, benchmarks.{name}; sys.exit('services' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], check=False).returncode == 0


@pytest.mark.parametrize("name", ["plain_vllm", "admission.pushed"])
def test_to_import_a_side_of_plain_vllm_sets_nothing(name: str) -> None:
    look = f"import os, sys; before = dict(os.environ); import benchmarks.{name}; sys.exit(dict(os.environ) != before)"
    assert subprocess.run([sys.executable, "-c", look], check=False).returncode == 0
