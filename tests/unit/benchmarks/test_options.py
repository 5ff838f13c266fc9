"""What cannot be measured is refused in a line that names the option, before anything is started."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from benchmarks.options import POLICIES
from services.scheduler.core import policies

MAINS = {
    "batch_files": "bench_batch_files", "first_byte": "bench_first_byte", "keys": "bench_keys",
    "isolation": "bench_isolation",
    "lifecycle": "bench_lifecycle", "main": "bench_main", "overload": "bench_overload", "ratio": "bench_ratio",
    "recovery": "bench_recovery", "makespan": "admission.makespan", "real": "admission.real", "sim": "admission.sim",
}  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "batch_files --lines 0",
        "batch_files --line-bytes 120",
        "first_byte --rounds 0",
        "first_byte --streams 0",
        "isolation --seconds 0",
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
        "real --rounds 0",
        "sim --policies push,predictve",
        "sim --requests 0",
        "sim --seeds x",
        "sim --pool-windows 0",
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
