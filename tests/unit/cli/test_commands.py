"""The commands, as a user types them, against a queue in memory."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli import requests
from penstock.cli.errors import CommandError
from penstock.cli.main import app, main
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2
from penstock.scheduler.v1 import scheduler_pb2 as pb
from tests.support.batch_lines import completion
from tests.support.fake_queue import Answerer, FakeQueue, serving
from tests.support.fake_scheduler import FakeScheduler, serving_scheduler
from tests.support.ports import free_port
from tests.support.shell import Shell
from tests.support.waiting import wait_for_async

SIGNALLED = """
import asyncio, os, signal, sys
from penstock.cli.interrupt import run_interruptible

async def cancelled_by(number):
    os.kill(os.getpid(), number)
    try:
        for _ in range(10):
            await asyncio.sleep(0)
    except asyncio.CancelledError:
        return True
    return False

async def work():
    return [await cancelled_by(number) for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM)]

signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "nohup" else signal.SIG_DFL)
print(*run_interruptible(work()))
"""
"""Prints whether each of three signals cancelled a command's work: SIGHUP, SIGHUP again, SIGTERM."""


@pytest.fixture
async def shell() -> AsyncIterator[Shell]:
    queue = FakeQueue()
    async with serving(queue) as address:
        yield Shell(address, queue)


async def test_submit_get_and_watch(shell: Shell) -> None:
    submitted = await shell.run("submit", "the gate", "--max-tokens", "5", "--temperature", "0", "--key", "k")
    assert (submitted.status, submitted.out) == (0, "r-0\n")
    waited = await shell.run("submit", "hello there", "--wait")
    assert (waited.status, waited.out) == (0, "HELLO THERE\n")
    again = await shell.run("submit", "the gate", "--key", "k")
    assert again.out == "r-0\n"
    got = await shell.run("get", "--key", "k", "--json")
    assert json.loads(got.out)["result"]["outcome"] == "completed"
    watched = await shell.run("watch", "r-0", "r-1")
    assert (watched.status, watched.out.count("completed")) == (0, 2)


def ending(text: str | None, attempts: int = 1) -> Answerer:
    """Return what ends every request with `text` after so many attempts, or without one if it is None."""

    def answer(request: request_pb2.Request) -> request_pb2.Result:
        if text is None:
            return request_pb2.Result(outcome=request_pb2.OUTCOME_CANCELLED, attempts=attempts)
        return request_pb2.Result(
            outcome=request_pb2.OUTCOME_COMPLETED, attempts=attempts, choices=[request_pb2.Choice(text=text)]
        )

    return answer


async def test_a_stream_prints_text_as_it_comes(shell: Shell) -> None:
    shell.queue.answer = ending("a b")
    shell.queue.tokens = [
        request_pb2.TokenDelta(request_id="r-0", attempt=1, offset=0, token_ids=[1], text="a "),
        request_pb2.TokenDelta(request_id="r-0", attempt=1, offset=1, token_ids=[2], text="b"),
    ]
    assert (await shell.run("submit", "x", "--stream", "--chat", "--system", "s")).out == "a b\n"
    messages = json.loads(shell.queue.requests[0].chat.messages_json)
    assert [message["role"] for message in messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("streamed", "answer", "status", "out"),
    [
        ([], ending("a b"), 0, "a b\n"),
        ([(1, "a ")], ending("a b"), 0, "a b\n"),
        ([(1, "a ")], ending("a b", attempts=2), 0, "a b\n"),
        ([(1, "a c")], ending("a b", attempts=2), 0, "a c\n[attempt 2 begins again]\na b\n"),
        ([(1, "a c")], ending("", attempts=2), 0, "a c\n[attempt 2 begins again]\n\n"),
        ([(1, "a c"), (2, "a")], ending("a b", attempts=2), 0, "a c\n[attempt 2 begins again]\na b\n"),
        ([(1, "a c")], ending(None), 1, "a c\n"),
    ],
)
async def test_a_stream_ends_with_the_whole_text(
    shell: Shell, streamed: list[tuple[int, str]], answer: Answerer, status: int, out: str
) -> None:
    shell.queue.answer = answer
    shell.queue.tokens = [
        request_pb2.TokenDelta(request_id="r-0", attempt=attempt, token_ids=[1], text=text)
        for attempt, text in streamed
    ]
    ran = await shell.run("submit", "x", "--stream")
    assert (ran.status, ran.out) == (status, out)


async def asked(queue: FakeQueue, address: str, stream: bool) -> asyncio.Task[None]:
    """Return a submit that waits for its answer, once the queue has been asked for that."""
    queue.paused = True
    submit = asyncio.create_task(
        requests._submit(address, "127.0.0.1:1", {"prompt": "the gate"}, wait=not stream, stream=stream, as_json=False)
    )

    async def waits() -> bool:
        return bool(queue.follows or queue.watches)

    await wait_for_async(waits, "the submit to wait")
    return submit


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_waited_for_while_the_queue_is_away(
    stream: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(requests, "QUICK_RETRY_S", 0.0)  # whoever has no more patience gives up at once
    queue, address = FakeQueue(), f"127.0.0.1:{free_port()}"
    async with serving(queue, address):
        submit = await asked(queue, address, stream)
    await queue.finish_all()
    async with serving(queue, address):
        await submit
    assert capsys.readouterr().out == "THE GATE\n"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_wait_that_is_broken_off_names_the_request(stream: bool, capsys: pytest.CaptureFixture[str]) -> None:
    queue = FakeQueue()
    async with serving(queue) as address:
        submit = await asked(queue, address, stream)
        submit.cancel()
        await asyncio.wait({submit})
    assert submit.cancelled()
    assert capsys.readouterr().err.startswith("r-0 has no answer yet;")


async def test_get_has_the_same_status_with_and_without_json(shell: Shell) -> None:
    shell.queue.answer = ending(None)
    await shell.run("submit", "x")
    for flags in ((), ("--json",)):
        got = await shell.run("get", "r-0", *flags)
        assert (got.status, got.err) == (1, "penstock: r-0 cancelled\n")


async def test_user_errors_are_one_line_and_a_status(shell: Shell) -> None:
    for arguments, status, text in (
        (("get", "nobody"), 1, "nobody"),
        (("submit", "x", "--channel", "nowhere"), 2, "channel"),
        (("submit", "1,x", "--token-ids"), 2, "--token-ids"),
        (("submit", "x", "--system", "s"), 2, "--system: is for --chat"),
        (("submit", "1,2", "--token-ids", "--chat"), 2, "--token-ids"),
        (("get", "r-0", "--key", "k"), 2, "give either a request id or --key"),
        (("get",), 2, "give either a request id or --key"),
        (("status", "--once", "--scheduler", "foo:bar"), 2, "scheduler: 'foo:bar' is not HOST:PORT"),
        (("submit", "x", "-n", "2", "--stream"), 2, "--stream"),
        (("watch",), 2, "--batch"),
        (("watch", "--batch", ""), 2, "--batch: is empty"),
        (("cancel", "nobody"), 1, "nobody"),
        (("cancel", "--batch", ""), 2, "--batch: is empty"),
        (("cancel", "--batch", "b"), 1, "nothing is known of the batch 'b'"),
        (("watch", "--batch", "b"), 1, "nothing is known of the batch 'b'"),
        (("dead", "requeue"), 2, "--all"),
    ):
        ran = await shell.run(*arguments)
        assert ran.status == status, (arguments, ran.err)
        assert text in ran.err
        assert ran.err.count("\n") == 1


async def test_unknown_options_are_refused(shell: Shell) -> None:
    for command in ("submit", "get", "status", "run-batch"):
        arguments = ("-i", "x", "-o", "y") if command == "run-batch" else ()
        ran = await shell.run(command, *arguments, "--no-such-flag")
        assert ran.status == 2
        assert "--no-such-flag" in ran.err


async def test_an_address_that_nothing_could_be_at_is_refused() -> None:
    for address, text in (
        ("127.0.0.1:99999", "queue: port 99999 is out of range: 1 to 65535"),
        ("localhost", "queue: 'localhost' is not HOST:PORT"),
        ("", "queue: is empty; must be HOST:PORT"),
    ):
        ran = await Shell(address, FakeQueue()).run("get", "x")
        assert (ran.status, ran.err) == (2, f"penstock: {text}\n")


async def test_nothing_listens() -> None:
    ran = await Shell("127.0.0.1:1", FakeQueue()).run("get", "x")
    assert ran.status == 69
    assert "127.0.0.1:1" in ran.err
    assert "penstock up" in ran.err


async def test_who_was_answered_is_not_told_to_start_what_runs(shell: Shell) -> None:
    shell.queue.refuse_submits = 10**6
    ran = await shell.run("submit", "hello")
    assert (ran.status, ran.err) == (69, "penstock: the disk is nearly full\n")


async def test_an_error_of_several_lines_is_one_and_gives_the_terminal_no_instructions(shell: Shell) -> None:
    error = "boom:\n  in a step\x1b[2J"
    shell.queue.dead = [queue_pb2.DeadLetter(request_id="d-1", channel="batch", attempts=3, last_error=error)]
    (line,) = (await shell.run("dead", "list")).out.splitlines()
    assert line.endswith("attempts 3  boom: in a step\ufffd[2J")
    letter = json.loads((await shell.run("dead", "list", "--json")).out)
    assert letter["last_error"] == error


async def test_dead_letters(shell: Shell) -> None:
    shell.queue.dead = [
        queue_pb2.DeadLetter(request_id=f"d-{i}", channel="batch", attempts=3, last_error="oom") for i in range(3)
    ]
    listed = await shell.run("dead", "list")
    assert [line.split()[0] for line in listed.out.splitlines()] == ["d-0", "d-1", "d-2"]
    assert (await shell.run("dead", "requeue", "--all")).out == "3 requeued\n"


async def test_status_without_a_scheduler_shows_the_queue_and_fails(shell: Shell) -> None:
    ran = await shell.run("status", "--json", "--scheduler", "127.0.0.1:1")
    shown = json.loads(ran.out)
    assert shown["scheduler"] is None
    assert shown["queue"]["channels"][0]["ready"] == 3
    table = await shell.run("status", "--once", "--scheduler", "127.0.0.1:1")
    assert (ran.status, table.status) == (69, 69)
    assert "the scheduler does not answer" in table.err
    assert "batch" in table.out
    ended = shown["queue"]["channels"][0]["ended_by_outcome"]
    assert ended == {"completed": 7, "rejected": 0, "cancelled": 2, "expired": 0, "dead": 0}


async def test_status_without_a_queue_shows_the_fleet_and_fails(shell: Shell) -> None:
    scheduler = FakeScheduler()
    async with serving_scheduler(scheduler) as address:
        nobody = Shell("127.0.0.1:1", shell.queue)
        for how in ("--once", "--json"):
            ran = await nobody.run("status", how, "--scheduler", address)
            assert ran.status == 69
            assert "fifo-of-the-test" in ran.out
            assert "127.0.0.1:1" in ran.err


async def test_status_names_models_that_nobody_serves(shell: Shell) -> None:
    unserved = [pb.UnservedModel(model="nope", waiting=4), pb.UnservedModel(model="", waiting=1)]
    async with serving_scheduler(FakeScheduler(pb.StatusResponse(unserved_models=unserved))) as address:
        ran = await shell.run("status", "--once", "--scheduler", address)
    assert "4 requests wait for the model 'nope', which no connected worker serves" in ran.out
    assert "1 requests wait for a worker" in ran.out


async def test_status_names_models_that_only_drained_workers_serve(shell: Shell) -> None:
    workers = [pb.WorkerStatus(worker_id="w", model="tiny", connected=True, draining=True)]
    async with serving_scheduler(FakeScheduler(pb.StatusResponse(workers=workers))) as address:
        ran = await shell.run("status", "--once", "--scheduler", address)
    assert "all workers of the model 'tiny' are drained or ending: none takes requests for it" in ran.out


async def test_a_deadline_is_after_now(shell: Shell) -> None:
    refused = await shell.run("submit", "x", "--deadline-s", "0")
    assert (refused.status, "--deadline-s" in refused.err) == (2, True)
    assert (await shell.run("submit", "x", "--deadline-s", "60")).status == 0
    assert shell.queue.requests[0].deadline_unix_ns


async def test_run_batch_writes_answers_and_a_summary(shell: Shell, tmp_path: Path) -> None:
    source, target, summary = tmp_path / "in", tmp_path / "out", tmp_path / "summary"
    lines = [json.dumps(completion(f"c{i}", f"p {i}", model=None)) for i in range(5)]
    source.write_text("\n".join([*lines, "{broken"]))
    command = ["run-batch", "-i", str(source), "-o", str(target), "--scheduler", "127.0.0.1:1", "--model", "m"]
    ran = await shell.run(*command, "--summary-json", str(summary))
    assert ran.status == 0, ran.err
    assert "5 answered" in ran.err
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == ["c0", "c1", "c2", "c3", "c4", None]
    assert json.loads(summary.read_text())["bad_lines"] == 1
    assert {request.model for request in shell.queue.requests} == {"m"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "summary"]

    again = await shell.run(*command)
    assert again.status == 0
    assert len(shell.queue.requests) == 5, "nothing ran twice"
    fresh = await shell.run(*command, "--fresh")
    assert fresh.status == 0
    assert len(shell.queue.requests) == 10


async def test_run_batch_says_what_it_cannot_read_or_write(shell: Shell, tmp_path: Path) -> None:
    missing = await shell.run("run-batch", "-i", str(tmp_path / "none"), "-o", str(tmp_path / "out"))
    assert (missing.status, "none" in missing.err) == (66, True)
    (tmp_path / "in").write_text("")
    nowhere = await shell.run("run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "no" / "out"))
    assert (nowhere.status, "no directory" in nowhere.err) == (73, True)
    nobody = await Shell("127.0.0.1:1", FakeQueue()).run(
        "run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")
    )
    assert nobody.status == 69
    assert "penstock up" in nobody.err
    assert [path.name for path in tmp_path.iterdir()] == ["in"], "nothing is left behind"


@pytest.mark.parametrize(("started_with", "cancelled"), [("", "True False True"), ("nohup", "False False True")])
def test_a_terminal_that_goes_away_interrupts_once(started_with: str, cancelled: str) -> None:
    done = subprocess.run([sys.executable, "-c", SIGNALLED, started_with], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{cancelled}\n", "")


@pytest.mark.parametrize(
    "command", [["version"], ["submit", "a"], ["submit", "a", "--wait"], ["submit", "a", "--wait", "--json"]]
)
async def test_an_output_that_cannot_be_written_is_one_line_and_a_status(shell: Shell, command: list[str]) -> None:
    flags = ["--queue", shell.address] if command != ["version"] else []
    for end, status, said in (
        (os.open("/dev/full", os.O_WRONLY), 73, "penstock: cannot write the output: No space left on device\n"),
        (nobody_reads(), 1, ""),
    ):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock", *command, *flags, stdout=end, stderr=asyncio.subprocess.PIPE
        )
        os.close(end)
        assert ((await process.communicate())[1].decode(), process.returncode) == (said, status)


def nobody_reads() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


async def test_version(shell: Shell) -> None:
    assert (await shell.run("version", plain=True)).status == 0
    asked = await shell.run("--version", plain=True)
    assert (asked.status, asked.out) == (0, (await shell.run("version", plain=True)).out)


async def test_drain_waits_until_nothing_runs_on_the_worker() -> None:
    def fleet(reservations: int, draining: bool = True) -> pb.StatusResponse:
        view = pb.WorkerStatus(worker_id="w1", reservations=reservations, draining=draining, connected=True)
        return pb.StatusResponse(workers=[view])

    for statuses, status, end in (
        ([fleet(2), fleet(1), fleet(0)], 0, "w1 is drained\n"),
        ([fleet(2), fleet(2, draining=False)], 1, ""),
    ):
        async with serving_scheduler(FakeScheduler(*statuses)) as address:
            ran = await Shell(address, FakeQueue()).run("drain", "w1", "--scheduler", address, plain=True)
        assert (ran.status, ran.out) == (status, f"w1 takes no new grants; 2 requests run on it\n{end}"), ran.err
    async with serving_scheduler(FakeScheduler()) as address:
        flags = ("--scheduler", address)
        undone = await Shell(address, FakeQueue()).run("drain", "w1", "--undo", *flags, plain=True)
        assert (undone.status, undone.out) == (0, "w1 takes grants again\n")
        away = await Shell(address, FakeQueue()).run("drain", "away", "--undo", *flags, plain=True)
        assert (away.status, "'away' is not connected" in away.err) == (70, True)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("watch", "--batch", "b", "--cursor", "99999999999999999999999"), "cursor"),
        (("keys", "create", "a", "--file", "keys.toml", "--days", "1e9"), "days"),
        (("keys", "create", "a", "--file", "keys.toml", "--days", "inf"), "days"),
        (("certs", "certs", "--days", "1e9"), "days"),
    ],
)
def test_a_number_out_of_all_bounds_is_refused_by_its_name(
    arguments: tuple[str, ...], option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(app, arguments)
    assert (ran.exit_code, option in ran.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [("restore", "--data-dir", "/tmp/x", "--", "-b"), ("restore", "/tmp/x", "--data-dir", "-b")]
)
def test_a_tool_is_given_no_flags_for_paths(arguments: tuple[str, ...]) -> None:
    with pytest.raises(CommandError, match=r"^unexpected argument '-b'$"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


async def test_backup_of_a_running_queue(shell: Shell) -> None:
    made = await shell.run("backup", "b1")
    assert made.out == "/backups/b1: backup of store fake; 3 requests waiting, 0 running, 0 dead letters, 7 results\n"
    taken = await shell.run("backup", "taken")
    assert (taken.status, taken.err) == (2, "penstock: name: there is a backup taken already\n")


COMMANDS_WITH_CONFIG = [["up"], ["run-batch", "-i", "in", "-o", "out"]]


@pytest.mark.parametrize("command", COMMANDS_WITH_CONFIG, ids=lambda command: command[0])
@pytest.mark.parametrize("content", [None, "[nonsense]\n"], ids=["missing", "bad"])
def test_an_option_wins_before_the_file_of_the_environment_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    command: list[str], content: str | None,
) -> None:  # fmt: skip
    good, named = tmp_path / "good.toml", tmp_path / "named.toml"
    good.write_text('[client]\nqueue = "q:1"\n')
    if content is not None:
        named.write_text(content)
    monkeypatch.setenv("PENSTOCK_CONFIG", str(named))

    def end(*arguments: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["penstock", *command, *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().err

    # This argument is refused once all files are read.
    assert end("--config", str(good), "word") == (2, "penstock: unexpected argument 'word'\n")
    misspelt = end("--config", str(good), "--enforce-eager", "--workrs=2")
    assert misspelt == (2, "penstock: unknown flag --workrs=2; did you mean --workers?\n")
    status, said = end("word")
    assert (status, said.startswith(f"penstock: {named}:"), said.count("\n")) == (78, True, 1)


@pytest.mark.parametrize(
    ("arguments", "status"), [(["version"], 0), (["--help"], 0), (["get", "--help"], 78), (["dead", "list"], 78)]
)
def test_a_missing_file_of_the_environment_refuses_only_who_asks_it(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], status: int
) -> None:
    monkeypatch.setenv("PENSTOCK_CONFIG", "/nonexistent.toml")
    monkeypatch.setattr(sys, "argv", ["penstock", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == status
