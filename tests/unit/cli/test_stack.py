"""What `up` starts, and what it keeps running."""

from __future__ import annotations

import asyncio
import errno
import gc
import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from penstock.cli import up
from penstock.cli.errors import CommandError
from penstock.cli.stack import TINY_FLAGS, StackPlan, engine_flags, missing_flags, running_stack, way_out
from penstock.cli.supervisor import Supervisor
from tests.support.waiting import wait_for_async

SERVICE = """
import signal, sys, time
from pathlib import Path
lives = Path(sys.argv[3])
with lives.open("a") as every_life:
    # Added, never written anew: a test may read while the next life begins.
    every_life.write("x")
if sys.argv[4] == "broken":
    print("the reason", file=sys.stderr)
    sys.exit(78)
if sys.argv[4] == "taken":
    print("in use", file=sys.stderr)
    sys.exit(69)
if sys.argv[4] == "stubborn":
    signal.signal(signal.SIGTERM, lambda number, frame: lives.write_text("asked to end"))
print("ready: fake on " + sys.argv[2].replace(":0", ":4711"), flush=True)
if sys.argv[4] == "talks":
    print("x" * 1_000_000, flush=True)
    with lives.open("a") as every_life:
        every_life.write("talked")
    sys.exit(70)
if sys.argv[4] == "crashes" and len(lives.read_text()) < 3:
    sys.exit(70)
while True:
    time.sleep(3600)
"""


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make `penstock_fake_service` a module that can be started, and pauses short."""
    (tmp_path / "penstock_fake_service.py").write_text(SERVICE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("penstock.cli.supervisor.FIRST_PAUSE_S", 0.01)
    return tmp_path


async def eventually(fact: Callable[[], bool]) -> None:
    """Return once `fact` holds."""

    async def holds() -> bool:
        return fact()

    await wait_for_async(holds, "what the test is about")


def lives(directory: Path) -> str:
    return (directory / "lives").read_text()


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


async def test_a_failed_start_quotes_its_own_lines_only(service: Path) -> None:
    (service / "logs").mkdir()
    (service / "logs" / "fake.log").write_text("trouble of yesterday\n")
    supervisor = Supervisor(service / "logs", print)
    with pytest.raises(CommandError, match="the reason") as failed:
        await supervisor.ready(supervisor.add("fake", "penstock_fake_service", "127.0.0.1:0", flags(service, "broken")))
    assert "yesterday" not in str(failed.value)
    await supervisor.stop()


async def test_a_service_whose_log_cannot_be_written_fails_with_the_reason(service: Path) -> None:
    (service / "logs" / "fake.log").mkdir(parents=True)
    supervisor = Supervisor(service / "logs", print)
    with pytest.raises(CommandError) as failed:
        await supervisor.ready(supervisor.add("fake", "penstock_fake_service", "127.0.0.1:0", flags(service, "fine")))
    assert str(failed.value) == f"fake could not be started: {service / 'logs' / 'fake.log'}: Is a directory"
    assert failed.value.status == 70
    await supervisor.stop()


async def test_a_log_directory_that_cannot_be_made_is_named(service: Path) -> None:
    (service / "data").write_text("a file")
    supervisor = Supervisor(service / "data" / "logs", print)
    with pytest.raises(CommandError) as failed:
        supervisor.add("fake", "penstock_fake_service", "127.0.0.1:0", flags(service, "fine"))
    assert str(failed.value) == f"cannot write {service / 'data' / 'logs'}: Not a directory"
    assert failed.value.status == 73
    await supervisor.stop()


def failing_starts(monkeypatch: pytest.MonkeyPatch, *failures: Exception) -> None:
    """Make the starts after the first fail with these errors, one each; later ones succeed."""
    start, waiting = asyncio.create_subprocess_exec, [None, *failures]

    async def started(*command: str, **options: Any) -> asyncio.subprocess.Process:
        if waiting and (failure := waiting.pop(0)) is not None:
            raise failure
        return await start(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)


async def test_a_restart_that_fails_is_tried_again(service: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_starts(
        monkeypatch,
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        subprocess.SubprocessError("Exception occurred in preexec_fn."),
    )
    said: list[str] = []
    supervisor = Supervisor(service / "logs", said.append)
    supervisor.add("fake", "penstock_fake_service", "127.0.0.1:0", flags(service, "crashes"))
    await eventually(lambda: (service / "lives").exists() and lives(service) == "xxx")
    assert [text.partition(";")[0] for text in said] == [
        "fake ended with status 70",
        "fake could not be started: Cannot allocate memory",
        "fake could not be started: Exception occurred in preexec_fn.",
        "fake ended with status 70",
    ]
    await supervisor.stop()


async def test_a_service_that_cannot_be_started_again_has_failed(
    service: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.supervisor.MOST_PAUSE_S", 0.01)
    failing_starts(monkeypatch, *[OSError(errno.EAGAIN, "Resource temporarily unavailable")] * 9)
    said: list[str] = []
    supervisor = Supervisor(service / "logs", said.append)
    supervisor.add("fake", "penstock_fake_service", "127.0.0.1:0", flags(service, "crashes"))
    with pytest.raises(CommandError) as failed:
        await supervisor.failed()
    assert str(failed.value) == "fake could not be started: Resource temporarily unavailable"
    assert len(said) == 1 + 4, "five failed starts are the limit"
    await supervisor.stop()


async def test_whatever_ends_the_supervision_of_a_service_is_its_failure(service: Path) -> None:
    def say(text: str) -> None:
        raise ValueError("I/O operation on closed file.")

    supervisor = Supervisor(service / "logs", say)
    supervisor.add("fake", "penstock_fake_service", "127.0.0.1:0", flags(service, "crashes"))
    with pytest.raises(CommandError) as failed:
        await supervisor.failed()
    assert str(failed.value) == "fake is no longer supervised: ValueError: I/O operation on closed file."
    await supervisor.stop()


async def test_a_failure_that_nobody_asked_for_is_not_told_after_the_end(service: Path) -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    supervisor = Supervisor(service / "logs", print)
    supervisor.add("fake", "penstock_fake_service", "127.0.0.1:0", flags(service, "broken"))
    await eventually(supervisor._failure.done)
    await supervisor.stop()
    await supervisor.stop()
    del supervisor
    gc.collect()
    assert told == []


async def test_a_service_is_restarted_though_nobody_can_read_it(service: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unread(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Unread())
    supervisor = Supervisor(service / "logs", up.say)
    supervisor.add("fake", "penstock_fake_service", "127.0.0.1:0", flags(service, "crashes"))
    restarted = asyncio.create_task(eventually(lambda: (service / "lives").exists() and lives(service) == "xxx"))
    failed = asyncio.create_task(supervisor.failed())
    await asyncio.wait({restarted, failed}, return_when=asyncio.FIRST_COMPLETED)
    assert not failed.done(), failed.exception()
    await supervisor.stop()
    await asyncio.gather(restarted, failed, return_exceptions=True)


@pytest.mark.parametrize("gone", ["a reader that left", "a full disk"])
def test_what_nobody_can_read_leaves_the_exit_status_alone(gone: str) -> None:
    if gone == "a full disk":
        end = os.open("/dev/full", os.O_WRONLY)
    else:
        read, end = os.pipe()
        os.close(read)
    program = "from penstock.cli.up import say; say('one'); say('two')"
    done = subprocess.run([sys.executable, "-c", program], stdout=end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(end)
    assert (done.returncode, done.stderr) == (0, "")


async def test_a_very_long_line_of_a_service_is_passed_over(service: Path) -> None:
    said: list[str] = []
    supervisor = Supervisor(service / "logs", said.append)
    started = supervisor.add("fake", "penstock_fake_service", "127.0.0.1:0", flags(service, "talks"))
    assert await supervisor.ready(started) == "127.0.0.1:4711"
    await eventually(lambda: bool(said))
    assert lives(service).startswith("xtalked")
    assert "ended with status 70" in said[0]
    await supervisor.stop()


def test_the_way_out_is_one_that_who_asks_has(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = StackPlan(Path(".run"), 1, "", (), 0)
    assert way_out(batch) == (
        "if other services are up on this machine, `penstock run-batch` without --up has those answer;"
        " or give these ones their own --data-dir (now .run)"
    )
    assert "without --up" not in way_out(replace(batch, can_do_without=False))
    recipe = next(
        line for line in (Path(__file__).parents[3] / "Makefile").read_text().splitlines() if "run-batch --up" in line
    )
    name, value = next(word.split("=", 1) for word in recipe.split() if word.startswith("DATA_DIR_OPTION"))
    monkeypatch.setenv(name, value)
    assert way_out(batch).endswith("give these ones their own RUN_DIR= (now .run)")


async def test_what_is_taken_comes_with_the_way_out(service: Path) -> None:
    hint = way_out(StackPlan(service, 1, "", (), 7410))
    assert "--data-dir" in hint
    assert "--base-port" in hint
    assert "--base-port" not in way_out(StackPlan(service, 1, "", (), 0))
    supervisor = Supervisor(service / "logs", print, hint)
    with pytest.raises(CommandError) as failed:
        await supervisor.ready(supervisor.add("fake", "penstock_fake_service", "127.0.0.1:0", flags(service, "taken")))
    assert failed.value.status == 69
    assert str(failed.value).endswith(hint)
    await supervisor.stop()


async def test_a_cancelled_stop_kills_what_does_not_end(service: Path) -> None:
    said: list[str] = []
    supervisor = Supervisor(service / "logs", said.append)
    started = supervisor.add("fake", "penstock_fake_service", "127.0.0.1:0", flags(service, "stubborn"))
    await supervisor.ready(started)
    stopping = asyncio.create_task(supervisor.stop())
    await eventually(lambda: (service / "lives").read_text() == "asked to end")
    stopping.cancel()
    await stopping
    assert started.process is not None
    assert started.process.returncode == -9
    assert said == ["killed what still ran"]


async def test_an_interrupted_stack_says_how_long_it_may_take(tmp_path: Path) -> None:
    said: list[str] = []

    async def serve() -> None:
        plan = StackPlan(tmp_path, 1, "none", (), 0)
        async with running_stack(plan, said.append):
            raise AssertionError("the worker has no model")

    serving = asyncio.create_task(serve())
    await eventually(lambda: any("starting 1 worker" in text for text in said))
    serving.cancel()
    await asyncio.wait([serving])
    assert serving.cancelled()
    assert "stopping: finishing what runs, at most 75 s; Ctrl-C again ends it now" in said


@pytest.mark.parametrize("again", [False, True])
async def test_only_the_second_interruption_cuts_an_orderly_stop_short(
    again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops, ends, killed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Slow(Supervisor):
        def add(self, *arguments: Any) -> Any:
            """Start nothing."""

        async def ready(self, service: Any) -> str:
            return "127.0.0.1:1"

        async def stop(self) -> None:
            stops.set()
            try:
                await ends.wait()
            except asyncio.CancelledError:
                killed.set()

    async def use() -> None:
        async with running_stack(plan(tmp_path, "m"), said.append):
            pass

    said: list[str] = []
    monkeypatch.setattr("penstock.cli.stack.Supervisor", Slow)
    using = asyncio.create_task(use())
    await stops.wait()
    using.cancel()
    await eventually(lambda: killed.is_set() or any(text.startswith("stopping: finishing") for text in said))
    assert not killed.is_set()
    if again:
        using.cancel()
    else:
        ends.set()
    await using
    assert killed.is_set() == again


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


Tell: TypeAlias = Callable[[str], None]


@pytest.fixture
def tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tell:
    """Return what makes the worker's table of the configuration file."""

    def tell(table: str) -> None:
        (tmp_path / "penstock.toml").write_text(f"[worker]\n{table}\n")
        monkeypatch.setenv("PENSTOCK_CONFIG", str(tmp_path / "penstock.toml"))

    return tell


@pytest.mark.parametrize("told", ['engine = "simulated"', 'model = "org/name"'])
def test_an_engine_or_a_model_of_the_configuration_file_counts(tmp_path: Path, tell: Tell, told: str) -> None:
    tell(told)
    assert engine_flags(plan(tmp_path, ""), print) == []


WORKER_TABLE = 'served_model_name = ["mine"]\nengine_arguments = { max-model-len = 512, enforce_eager = false }'


def test_what_the_configuration_file_names_is_not_the_tiny_models(
    tmp_path: Path, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    tell(WORKER_TABLE)
    found = engine_flags(plan(tmp_path, "", "--no-enable-prefix-caching"), said.append)
    assert not {"--served-model-name", "--max-model-len", "--enforce-eager"} & set(found)
    assert {"--dtype", "--block-size", "--engine-threads"} < set(found)
    assert "tiny-model" in said[0]
    assert "'tiny'" not in said[0]
    monkeypatch.delenv("PENSTOCK_CONFIG")
    assert "--enforce-eager" not in engine_flags(plan(tmp_path, "", "--no-enforce-eager"), said.append)


@pytest.mark.parametrize("end", ["", "_FILE"])
def test_what_the_environment_names_is_not_the_tiny_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tell: Tell, end: str
) -> None:
    tell(WORKER_TABLE)
    for name, value in {"ENGINE_THREADS": "3", "ENGINE_ARGUMENTS": '{"block_size": 16}'}.items():
        (tmp_path / name).write_text(f"{value}\n")
        monkeypatch.setenv(f"PENSTOCK_WORKER_{name}{end}", str(tmp_path / name) if end else value)
    found = engine_flags(plan(tmp_path, ""), print)
    assert not {"--engine-threads", "--block-size", "--served-model-name"} & set(found)
    assert "--max-model-len" in found, "the variable stands in the place of the whole table"
    monkeypatch.setenv(f"PENSTOCK_WORKER_MODEL{end}", str(tmp_path / "ENGINE_THREADS"))
    assert engine_flags(plan(tmp_path, ""), print) == []


def test_without_a_model_the_tiny_one_is_made_once(tmp_path: Path) -> None:
    said: list[str] = []
    found = engine_flags(plan(tmp_path, ""), said.append)
    assert found[:2] == ["--model", str(tmp_path / "tiny-model")]
    assert "tiny random model" in said[0]
    made = (tmp_path / "tiny-model" / "config.json").stat().st_mtime_ns
    engine_flags(plan(tmp_path, ""), said.append)
    assert (tmp_path / "tiny-model" / "config.json").stat().st_mtime_ns == made
