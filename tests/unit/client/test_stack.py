"""What `up` starts, and what it keeps running."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.cli.errors import CommandError
from penstock.cli.stack import TINY_FLAGS, StackPlan, engine_flags, missing_flags
from penstock.cli.supervisor import Supervisor

SERVICE = """
import sys, time
from pathlib import Path
lives = Path(sys.argv[3])
lives.write_text(lives.read_text() + "x" if lives.exists() else "x")
if sys.argv[4] == "broken":
    print("the reason", file=sys.stderr)
    sys.exit(78)
print("ready: fake on " + sys.argv[2].replace(":0", ":4711"), flush=True)
if sys.argv[4] == "crashes" and len(lives.read_text()) < 3:
    sys.exit(70)
time.sleep(3600)
"""


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make `penstock_fake_service` a module that can be started, and pauses short."""
    (tmp_path / "penstock_fake_service.py").write_text(SERVICE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("penstock.cli.supervisor.FIRST_PAUSE_S", 0.01)
    return tmp_path


def flags(directory: Path, how: str) -> list[str]:
    return [str(directory / "lives"), how]


async def test_a_service_that_is_ready_tells_its_port(service: Path) -> None:
    supervisor = Supervisor(service / "logs", print)
    started = supervisor.add("fake", "penstock_fake_service", "127.0.0.1:0", flags(service, "fine"))
    assert await supervisor.ready(started) == "127.0.0.1:4711"
    await supervisor.stop()
    assert started.process is not None
    assert started.process.returncode == -15


async def test_a_crashed_service_comes_back_on_its_port(service: Path) -> None:
    said: list[str] = []
    back = asyncio.Event()

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            back.set()

    supervisor = Supervisor(service / "logs", say)
    started = supervisor.add("fake", "penstock_fake_service", "127.0.0.1:0", flags(service, "crashes"))
    await back.wait()
    assert "ended with status 70" in said[0]
    assert ":4711" in started.command[4]
    await supervisor.stop()


async def test_a_service_that_cannot_start_says_why(service: Path) -> None:
    supervisor = Supervisor(service / "logs", print)
    started = supervisor.add("fake", "penstock_fake_service", "127.0.0.1:0", flags(service, "broken"))
    with pytest.raises(CommandError, match="the reason") as failed:
        await supervisor.ready(started)
    assert failed.value.status == 78
    assert "the reason" in (service / "logs" / "fake.log").read_text()
    await supervisor.stop()


def test_flags_the_user_gave_win_in_either_spelling() -> None:
    found = missing_flags(["--max_model_len=64", "--dtype", "bfloat16"], TINY_FLAGS)
    assert "--max-model-len" not in found
    assert found.count("--dtype") == 1
    assert "--enforce-eager" in found


def plan(directory: Path, model: str, *flags: str) -> StackPlan:
    return StackPlan(directory, 1, model, flags, 0)


def test_a_model_is_served_as_it_is(tmp_path: Path) -> None:
    assert engine_flags(plan(tmp_path, "org/name", "--dtype", "auto"), print) == [
        "--model", "org/name", "--dtype", "auto",
    ]  # fmt: skip


def test_the_simulated_engine_needs_no_model(tmp_path: Path) -> None:
    assert engine_flags(plan(tmp_path, "", "--engine", "simulated"), print) == ["--engine", "simulated"]
    assert engine_flags(plan(tmp_path, "", "--engine=simulated"), print) == ["--engine=simulated"]


def test_without_a_model_the_tiny_one_is_made_once(tmp_path: Path) -> None:
    said: list[str] = []
    found = engine_flags(plan(tmp_path, ""), said.append)
    assert found[:2] == ["--model", str(tmp_path / "tiny-model")]
    assert "tiny random model" in said[0]
    made = (tmp_path / "tiny-model" / "config.json").stat().st_mtime_ns
    engine_flags(plan(tmp_path, ""), said.append)
    assert (tmp_path / "tiny-model" / "config.json").stat().st_mtime_ns == made
