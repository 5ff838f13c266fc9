"""`penstock run-batch`, as a user types it, against a queue in memory."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.batch.reader import InputFile
from penstock.batch.runner import batch_name
from penstock.batch.summary import EngineTotals, LedgerCounts
from penstock.cli import batch_fleet
from penstock.cli.batch_fleet import Late, Peers, totals_at_the_end
from penstock.cli.batch_paths import target_of
from penstock.cli.errors import CommandError
from penstock.scheduler.v1 import scheduler_pb2
from tests.support.batch_lines import completion
from tests.support.fake_queue import FakeQueue, serving
from tests.support.fake_scheduler import FakeScheduler, serving_scheduler
from tests.support.ports import free_port
from tests.support.shell import Shell

NO_SCHEDULER = ("--scheduler", "127.0.0.1:1")

LOSES_ITS_INPUT = """
import os
from penstock.batch.reader import InputFile
from penstock.cli.main import main

index = InputFile.__init__

def index_and_lose(self, path):
    index(self, path)
    for number in os.listdir("/proc/self/fd"):
        if os.path.realpath(f"/proc/self/fd/{number}") == str(path):
            os.dup2(os.open("/dev/null", os.O_WRONLY), int(number))

InputFile.__init__ = index_and_lose
main()
"""
"""The command, its input indexed and then no longer to be read."""

INTERRUPTED_WHILE_IT_WRITES = """
import os, signal, time
from penstock.cli import run_batch
from penstock.cli.main import main

write_output = run_batch.write_output

def interrupt_and_write(journal, source, target, stopped):
    os.kill(os.getpid(), signal.SIGINT)
    while not stopped():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)
    write_output(journal, source, target, {stopped})

run_batch.write_output = interrupt_and_write
main()
"""
"""The command, told twice to end while it writes; the writing then takes notice or, with `bool`, is as good as over."""


@pytest.fixture
async def shell() -> AsyncIterator[Shell]:
    queue = FakeQueue()
    async with serving(queue) as address:
        yield Shell(address, queue)


def lines_in(path: Path, count: int) -> Path:
    """Write `count` good lines."""
    path.write_text("".join(json.dumps(completion(f"c{i}", f"p {i}", model=None)) + "\n" for i in range(count)))
    return path


async def test_the_input_is_never_written_over(shell: Shell, tmp_path: Path) -> None:
    source = lines_in(tmp_path / "in", 2)
    (tmp_path / "symbolic").symlink_to(source)
    (tmp_path / "hard").hardlink_to(source)
    (tmp_path / "a.partial").hardlink_to(source)
    (tmp_path / "b.writing").symlink_to(source)
    content = source.read_bytes()
    for target in ("in", "symbolic", "hard", "a", "b"):
        ran = await shell.run("run-batch", "-i", str(source), "-o", str(tmp_path / target))
        assert ran.status == 2, target
        assert "is the output file" in ran.err or "is the journal" in ran.err
    ran = await shell.run("run-batch", "-i", str(source), "-o", str(tmp_path / "c"), "--summary-json", str(source))
    assert (ran.status, "summary" in ran.err) == (2, True)
    ran = await shell.run("run-batch", "-i", str(tmp_path / "a.partial"), "-o", str(tmp_path / "a"))
    assert (ran.status, "journal" in ran.err) == (2, True)
    assert source.read_bytes() == content
    assert shell.queue.requests == []


async def test_the_summary_is_never_written_over_the_answers(shell: Shell, tmp_path: Path) -> None:
    source, target = lines_in(tmp_path / "in", 2), tmp_path / "out"
    (tmp_path / "link").symlink_to("out")
    for summary, why in (
        ("out", "is the output file as well"),
        ("link", "is the output file as well"),
        ("../" + tmp_path.name + "/out", "is the output file as well"),
        ("out.partial", "is the journal of the output file as well"),
        ("out.writing", "is the output file while it is written as well"),
    ):
        path = tmp_path / summary
        ran = await shell.run("run-batch", "-i", str(source), "-o", str(target), "--summary-json", str(path))
        assert (ran.status, ran.err) == (2, f"penstock: the summary file {path} {why}; one would be lost\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "link"]
    assert shell.queue.requests == []


async def test_a_file_of_something_else_is_not_taken_for_the_journal(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "out.partial").write_bytes(b"half of a download")
    command = ["run-batch", "-i", str(lines_in(tmp_path / "in", 2)), "-o", str(tmp_path / "out"), *NO_SCHEDULER]
    for flags in ([], ["--fresh"]):
        ran = await shell.run(*command, *flags)
        assert (ran.status, ran.err.startswith(f"penstock: {tmp_path / 'out.partial'} is not a journal")) == (2, True)
    assert (tmp_path / "out.partial").read_bytes() == b"half of a download"
    assert shell.queue.requests == []


async def test_fresh_discards_the_journal_of_another_version_once_it_begins(shell: Shell, tmp_path: Path) -> None:
    later = b'{"key": "rb-1", "batch": "rb-1", "version": 99}\n'
    (tmp_path / "out.partial").write_bytes(later)
    command = ["run-batch", "-i", str(lines_in(tmp_path / "in", 2)), "-o", str(tmp_path / "out"), *NO_SCHEDULER]
    ran = await shell.run(*command)
    assert (ran.status, "--fresh discards it" in ran.err) == (2, True)
    nobody = await Shell("127.0.0.1:1", shell.queue).run(*command, "--fresh")
    assert nobody.status == 69
    assert (tmp_path / "out.partial").read_bytes() == later
    assert (await shell.run(*command, "--fresh")).status == 0
    assert len((tmp_path / "out").read_text().splitlines()) == 2
    assert not (tmp_path / "out.partial").exists()


async def test_an_output_that_is_a_link_is_written_where_it_leads(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "old").write_text("old\n")
    (tmp_path / "link").symlink_to(Path("there") / "old")
    (tmp_path / "ahead").symlink_to(Path("there") / "new")
    source = lines_in(tmp_path / "in", 2)
    for link, leads_to in (("link", "old"), ("ahead", "new")):
        ran = await shell.run("run-batch", "-i", str(source), "-o", str(tmp_path / link), *NO_SCHEDULER)
        assert ran.status == 0, ran.err
        assert (tmp_path / link).is_symlink()
        assert len((tmp_path / "there" / leads_to).read_text().splitlines()) == 2
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["new", "old"]


async def test_what_cannot_be_an_output_file_is_refused_by_name_and_kept(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")
    (tmp_path / "circle").symlink_to("circle")
    os.mkfifo(tmp_path / "fifo")
    os.mkfifo(tmp_path / "a.partial")
    os.mkfifo(tmp_path / "b.writing")
    source = lines_in(tmp_path / "in", 2)
    before = {path: path.lstat().st_mode for path in tmp_path.iterdir()}
    for target, named, why in (
        ("directory", "directory", "it is no regular file"),
        ("stdout", "stdout", "it is no regular file"),
        ("fifo", "fifo", "it is no regular file"),
        ("a", "a.partial", "it is no regular file"),
        ("b", "b.writing", "it is no regular file"),
        ("circle", "circle", "Too many levels of symbolic links"),
        ("in/out", "in/out", "Not a directory"),
    ):
        ran = await shell.run("run-batch", "-i", str(source), "-o", str(tmp_path / target), *NO_SCHEDULER)
        assert (ran.status, ran.err) == (73, f"penstock: cannot write {tmp_path / named}: {why}\n")
    for summary in ("directory", "missing/summary.json"):
        named = str(tmp_path / summary)
        ran = await shell.run("run-batch", "-i", str(source), "-o", str(tmp_path / "out"), "--summary-json", named)
        assert (ran.status, ran.err) == (73, f"penstock: cannot write {named}: no file can be there\n")
    long = "x" * 300
    for named in (str(tmp_path / long), str(tmp_path / long / "summary.json")):
        ran = await shell.run("run-batch", "-i", str(source), "-o", str(tmp_path / "out"), "--summary-json", named)
        assert (ran.status, ran.err) == (73, f"penstock: cannot write {named}: File name too long\n")
    assert {path: path.lstat().st_mode for path in tmp_path.iterdir()} == before
    assert shell.queue.requests == []


async def test_a_run_with_nothing_to_do_says_so_in_one_line(shell: Shell, tmp_path: Path) -> None:
    source, target = lines_in(tmp_path / "in", 4), tmp_path / "out"
    command = ("run-batch", "-i", str(source), "-o", str(target), *NO_SCHEDULER)
    await shell.run(*command)
    ran = await shell.run(*command)
    assert ran.status == 0
    assert ran.err.splitlines() == [
        "4 lines, 0 of them answered in the journal; the queue is asked for the others",
        "4 of 4 lines were answered earlier; --fresh runs them again",
        f"answers      {target}",
    ]


async def test_a_file_of_wrong_lines_has_no_rows_of_zeros(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("{broken\n")
    ran = await shell.run("run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), *NO_SCHEDULER)
    assert "1 of 1 lines are wrong; their answers say why" in ran.err
    assert "throughput" not in ran.err


async def test_a_scheduler_restart_marks_the_refunds(shell: Shell, tmp_path: Path) -> None:
    before = scheduler_pb2.StatusResponse(
        grants=10, tokenizer_refunds=10, workers=[scheduler_pb2.WorkerStatus(model="m")]
    )
    after = scheduler_pb2.StatusResponse(grants=2, tokenizer_refunds=2)
    async with serving_scheduler(FakeScheduler(before, before, after)) as address:
        source, target = lines_in(tmp_path / "in", 2), tmp_path / "out"
        ran = await shell.run("run-batch", "-i", str(source), "-o", str(target), "--scheduler", address)
    assert "2 at the tokenizer ACK (0 blocks), 0 at the completion ACK (0 blocks) since the scheduler" in ran.err


@pytest.mark.parametrize("wait_s", ["0", "0.1"])
async def test_a_queue_that_is_waited_for_is_named(shell: Shell, tmp_path: Path, wait_s: str) -> None:
    source, address = lines_in(tmp_path / "in", 2), f"127.0.0.1:{free_port()}"
    command = ["run-batch", "-i", str(source), "-o", str(tmp_path / "out"), "--queue", address, "--wait-s", wait_s]
    ran = await shell.run(*command, plain=True)
    assert ran.status == 69
    assert (f"no queue answers on {address} yet; waiting for at most 0.1 s" in ran.err) == (wait_s != "0")


@pytest.mark.parametrize("line", [json.dumps(completion("c", "p", model=None)), "{broken"])
async def test_a_journal_that_cannot_grow_ends_the_run_in_one_line(shell: Shell, tmp_path: Path, line: str) -> None:
    (tmp_path / "in").write_text(f"{line}\n" * 40)
    command = ["run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), *NO_SCHEDULER]
    ran = await shell.run(*command, largest_file_bytes=2000)
    assert ran.status == 73, ran.err
    assert ran.err.splitlines()[1:] == [f"penstock: cannot write {tmp_path / 'out.partial'}: File too large"]
    none = await shell.run(*command, "--fresh", largest_file_bytes=0)
    assert (none.status, "out.partial: File too large" in none.err) == (73, True)
    assert (await shell.run(*command)).status == 0
    assert len((tmp_path / "out").read_text().splitlines()) == 40


async def test_an_input_that_can_be_read_only_once_is_refused_at_once(shell: Shell, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    content = lines_in(tmp_path / "in", 2).read_bytes()
    for source, stdin in ((str(tmp_path / "fifo"), None), ("/dev/stdin", content)):
        ran = await shell.run("run-batch", "-i", source, "-o", str(tmp_path / "out"), stdin=stdin)
        assert ran.status == 66
        assert ran.err.startswith(f"penstock: cannot read {source}: ")
        assert ran.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fifo", "in"]


async def test_an_input_that_is_lost_ends_the_run_in_one_line(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "in").write_text(json.dumps(completion("c", "long " * 100_000, model=None)) + "\n")
    command = ["run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), *NO_SCHEDULER]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LOSES_ITS_INPUT, *command, "--queue", shell.address, stderr=asyncio.subprocess.PIPE
    )
    said = (await process.communicate())[1].decode()
    assert process.returncode == 66
    assert said.splitlines()[1:] == [f"penstock: cannot read {tmp_path / 'in'}: Bad file descriptor"]


async def test_a_run_whose_lines_nobody_can_read_answers_all_the_same(shell: Shell, tmp_path: Path) -> None:
    command = ["run-batch", "-i", str(lines_in(tmp_path / "in", 3)), "-o", str(tmp_path / "out"), *NO_SCHEDULER]
    with open("/dev/full", "w") as full:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock", *command, "--queue", shell.address, stderr=full
        )
        assert await process.wait() == 0
        assert len((tmp_path / "out").read_text().splitlines()) == 3
        wrong = await asyncio.create_subprocess_exec(sys.executable, "-m", "penstock", "get", stderr=full)
        assert await wrong.wait() == 2, "an error has its own status"


async def test_an_interrupted_run_says_how_to_go_on_and_how_to_give_up(shell: Shell, tmp_path: Path) -> None:
    shell.queue.paused = True
    (tmp_path / "out").touch(0o600)
    source = lines_in(tmp_path / "in", 3)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock", "run-batch", "-i", str(source), "-o", str(tmp_path / "out"),
        "--queue", shell.address, *NO_SCHEDULER, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with shell.queue.changed:
        await shell.queue.changed.wait_for(lambda: len(shell.queue.requests) == 3)
    os.kill(process.pid, signal.SIGINT)
    said = (await process.communicate())[1].decode()
    assert process.returncode == 130
    assert "0 of 3 lines are answered" in said
    assert "goes on running" in said
    assert "same command" in said
    assert f"penstock cancel --batch {shell.queue.requests[0].batch} --queue {shell.address}\n" in said
    assert stat.S_IMODE((tmp_path / "out.partial").stat().st_mode) == 0o600, "who may not read the output reads no part"


@pytest.mark.parametrize(
    ("stopped", "said", "files"),
    [
        ("bool", ["all 3 lines are answered, the answers are in {out}"], ["in", "out"]),
        (
            "stopped",
            ["all 3 lines are answered, {out} is not written", "  to write   run the same command again"],
            ["in", "out.partial"],
        ),
    ],
)
async def test_a_run_interrupted_while_it_writes_says_whether_the_output_is_there(
    shell: Shell, tmp_path: Path, stopped: str, said: list[str], files: list[str]
) -> None:
    out = tmp_path / "out"
    command = ["run-batch", "-i", str(lines_in(tmp_path / "in", 3)), "-o", str(out), *NO_SCHEDULER]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", INTERRUPTED_WHILE_IT_WRITES.format(stopped=stopped), *command,
        "--queue", shell.address, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    lines = (await process.communicate())[1].decode().splitlines()
    assert process.returncode == 130, lines
    assert lines[1:] == [line.format(out=out) for line in (f"penstock: interrupted; {said[0]}", *said[1:])]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert (await shell.run(*command)).status == 0
    assert len(out.read_text().splitlines()) == 3


async def test_a_run_says_once_that_it_waits_for_room(shell: Shell, tmp_path: Path) -> None:
    source, shell.queue.refuse_submits = lines_in(tmp_path / "in", 2), 6
    ran = await shell.run("run-batch", "-i", str(source), "-o", str(tmp_path / "out"), *NO_SCHEDULER)
    assert (ran.status, shell.queue.refuse_submits) == (0, 0)
    assert ran.err.count("the queue takes no more lines now (the disk is nearly full); waiting for room\n") == 1


async def test_an_output_whose_name_is_not_utf_8_is_written(shell: Shell, tmp_path: Path) -> None:
    source, out = lines_in(tmp_path / "in", 2), tmp_path / os.fsdecode(b"out-\xff")
    for flags in ([], ["--summary-json", str(tmp_path / os.fsdecode(b"sum-\xfe"))]):
        ran = await shell.run("run-batch", "-i", str(source), "-o", str(out), *NO_SCHEDULER, *flags)
        assert ran.status == 0, ran.err
        assert "answers      " in ran.err
    assert len(out.read_text().splitlines()) == 2


@pytest.mark.parametrize("option", ["--model", "--channel"])
async def test_a_name_that_no_request_can_carry_is_refused_by_its_option(
    shell: Shell, tmp_path: Path, option: str
) -> None:
    source, name = lines_in(tmp_path / "in", 2), os.fsdecode(b"n\xff")
    ran = await shell.run("run-batch", "-i", str(source), "-o", str(tmp_path / "out"), *NO_SCHEDULER, option, name)
    assert (ran.status, ran.err) == (2, f"penstock: {option}: must be UTF-8\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


@pytest.mark.parametrize(("channel", "status"), [("nowhere", 2), ("of another key", 77)])
async def test_a_run_that_the_queue_took_nothing_of_is_in_the_way_of_none(
    shell: Shell, tmp_path: Path, channel: str, status: int
) -> None:
    source, out = lines_in(tmp_path / "in", 2), tmp_path / "out"
    refused = await shell.run("run-batch", "-i", str(source), "-o", str(out), *NO_SCHEDULER, "--channel", channel)
    assert (refused.status, "channel" in refused.err) == (status, True)
    assert ("PENSTOCK_KEY" in refused.err) == (status == 77)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
    lines_in(source, 3)
    assert (await shell.run("run-batch", "-i", str(source), "-o", str(out), *NO_SCHEDULER)).status == 0
    assert len(out.read_text().splitlines()) == 3


async def test_a_run_that_was_begun_stays_one_when_it_is_refused(shell: Shell, tmp_path: Path) -> None:
    source, out = lines_in(tmp_path / "in", 3), tmp_path / "out"
    lines = InputFile(source)
    name = batch_name(out, lines, "")
    header = {"key": name, "batch": name, "store_id": "s", "input_sha256": lines.sha256, "version": 1}
    journal = tmp_path / "out.partial"
    journal.write_text(json.dumps(header) + "\n")
    ran = await shell.run("run-batch", "-i", str(source), "-o", str(out), *NO_SCHEDULER, "--channel", "nowhere")
    assert (ran.status, "channel" in ran.err) == (2, True)
    assert json.loads(journal.read_text()) == header


def test_a_file_that_the_shell_has_opened_is_no_output(tmp_path: Path) -> None:
    """`-o /dev/stdout >> all` would put another file in its place."""
    with open(tmp_path / "all", "w") as opened:
        path = Path(f"/proc/self/fd/{opened.fileno()}")
        (tmp_path / "link").symlink_to(path)
        (tmp_path / "link to it").symlink_to("link")
        (tmp_path / "descriptors").symlink_to("/dev/fd")
        behind = tmp_path / "descriptors" / str(opened.fileno())
        (tmp_path / "link behind").symlink_to(behind)
        for output in (path, tmp_path / "link", tmp_path / "link to it", behind, tmp_path / "link behind"):
            with pytest.raises(CommandError, match="it is no regular file"):
                target_of(output)


def test_a_link_leads_from_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`../dev/out` is a file of `dev` beside the link's directory, wherever the command is run."""
    for name in ("dev", "links"):
        (tmp_path / name).mkdir()
    (tmp_path / "links" / "out").symlink_to("../dev/out")
    monkeypatch.chdir("/usr")
    assert target_of(tmp_path / "links" / "out") == tmp_path / "dev" / "out"


async def test_why_a_run_may_wait_is_said_once_it_does() -> None:
    said: list[str] = []
    with Late(said.append, 0.0) as late:
        late.set("nobody tells")
        while not said:
            await asyncio.sleep(0)
    with Late(said.append, 3600) as late:
        late.set("and not of a short one")
    assert late._timer is not None
    assert late._timer.cancelled()
    assert said == ["nobody tells"]


async def test_the_totals_wait_for_the_last_completion_acks(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [EngineTotals(ledger=LedgerCounts(completion_refunds=count)) for count in (7, 8, 10, 11)]

    async def next_totals(_peers: Peers) -> EngineTotals:
        return told.pop(0)

    monkeypatch.setattr(batch_fleet, "fleet_totals", next_totals)
    after = await totals_at_the_end(Peers("queue", "scheduler", 0), EngineTotals(ledger=LedgerCounts()), 10)
    assert after is not None
    assert (after.ledger.completion_refunds, len(told)) == (10, 1)
