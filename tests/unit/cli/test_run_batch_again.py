"""`penstock run-batch` run again for the lines that failed, where it has lines wait, and which run it goes on with."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from penstock.batch.reader import InputFile
from penstock.request.v1 import request_pb2
from tests.support.fake_queue import FakeQueue, completed, serving
from tests.support.shell import Shell
from tests.unit.cli.test_run_batch import NO_SCHEDULER, lines_in


@pytest.fixture
async def shell() -> AsyncIterator[Shell]:
    queue = FakeQueue()
    async with serving(queue) as address:
        yield Shell(address, queue)


async def killed_retry(shell: Shell, command: Sequence[str], requests: int) -> None:
    """Run the command with `--retry-failed`, and kill it once the queue, which answers none, has so many requests."""
    await killed(shell, [*command, "--retry-failed"], requests)


async def killed(shell: Shell, command: Sequence[str], requests: int) -> None:
    """Run the command, and kill it once the queue, which answers none, has so many requests."""
    shell.queue.paused = True
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock", *command, "--queue", shell.address, stderr=asyncio.subprocess.DEVNULL
    )
    async with shell.queue.changed:
        await shell.queue.changed.wait_for(lambda: len(shell.queue.requests) == requests)
    run.kill()
    await run.wait()


async def test_what_was_answered_earlier_with_an_error_is_counted_and_run_again_when_asked(
    shell: Shell, tmp_path: Path
) -> None:
    def half(request: request_pb2.Request) -> request_pb2.Result:
        result = completed(request)
        if request.text == "p 0":
            result.outcome = request_pb2.OUTCOME_EXPIRED
        return result

    shell.queue.answer = half
    command = ["run-batch", "-i", str(lines_in(tmp_path / "in", 2)), "-o", str(tmp_path / "out"), *NO_SCHEDULER]
    assert (await shell.run(*command)).status == 0
    again = await shell.run(*command)
    said = "2 of 2 lines were answered earlier, 1 of them with an error; --retry-failed runs those again, --fresh all"
    assert said in again.err.splitlines()
    shell.queue.answer = completed
    retried = await shell.run(*command, "--retry-failed")
    assert "1 of 2 lines were answered earlier; --fresh runs them again" in retried.err.splitlines()
    assert [json.loads(line)["error"] for line in (tmp_path / "out").read_text().splitlines()] == [None, None]
    both = await shell.run(*command, "--retry-failed", "--fresh")
    assert (both.status, len(shell.queue.requests)) == (2, 3)


async def test_the_plain_command_says_that_answers_of_an_interrupted_retry_will_come(
    shell: Shell, tmp_path: Path
) -> None:
    shell.queue.answer = lambda _request: request_pb2.Result(outcome=request_pb2.OUTCOME_EXPIRED)
    command = ["run-batch", "-i", str(lines_in(tmp_path / "in", 1)), "-o", str(tmp_path / "out"), *NO_SCHEDULER]
    assert (await shell.run(*command)).status == 0
    await killed_retry(shell, command, 2)
    plain = await shell.run(*command)
    batch = shell.queue.requests[0].batch
    assert (plain.status, plain.err.splitlines()[1:4]) == (0, [
        "1 requests of lines with an error have not ended; the output has the errors",
        "  to have their answers later   run the same command again",
        f"  to drop them                  penstock cancel --batch {batch} --queue {shell.address}",
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("told", "named", "used"), [("", (), "batch"), ("gold", (), "gold"), ("gold", ("--channel", "bulk"), "bulk")]
)
async def test_lines_wait_where_the_queue_says_unless_a_channel_is_named(
    shell: Shell, tmp_path: Path, told: str, named: tuple[str, ...], used: str
) -> None:
    source = lines_in(tmp_path / "in", 2)
    shell.queue.batch_channel = told
    ran = await shell.run("run-batch", "-i", str(source), "-o", str(tmp_path / "out"), *NO_SCHEDULER, *named)
    assert ran.status == 0, ran.err
    assert {request.channel for request in shell.queue.requests} == {used}


@pytest.mark.parametrize("way", ["link", "dots", "relative"])
async def test_an_output_is_the_same_by_whichever_path_it_is_named(shell: Shell, tmp_path: Path, way: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    out = tmp_path / "real" / "out"
    ways = {"link": tmp_path / "link" / "out", "dots": tmp_path / "real" / ".." / "link" / "out"}
    other = ways.get(way) or Path(os.path.relpath(out))
    source = str(lines_in(tmp_path / "in", 2))
    assert (await shell.run("run-batch", "-i", source, "-o", str(out), *NO_SCHEDULER)).status == 0
    again = await shell.run("run-batch", "-i", source, "-o", str(other), *NO_SCHEDULER)
    assert "2 of 2 lines were answered earlier; --fresh runs them again" in again.err.splitlines()
    assert len(shell.queue.requests) == 2


async def test_a_run_that_has_the_name_of_the_path_as_it_was_spelt_goes_on_under_it(
    shell: Shell, tmp_path: Path
) -> None:
    """As former versions named it, whose journal may be there."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    source, out = lines_in(tmp_path / "in", 2), tmp_path / "link" / "out"
    lines = InputFile(source)
    text = "\0".join([str(out), lines.sha256, "", ""])
    former = "rb-" + hashlib.sha256(text.encode()).hexdigest()[:16]
    header = {"key": former, "batch": former, "store_id": "s", "input_sha256": lines.sha256, "version": 1}
    journal = tmp_path / "real" / "out.partial"
    journal.write_text(json.dumps(header) + "\n")
    command = ["run-batch", "-i", str(source), *NO_SCHEDULER, "-o"]
    elsewhere = await shell.run(*command, str(tmp_path / "real" / "out"))
    assert (elsewhere.status, "is of another run of this input file" in elsewhere.err) == (2, True)
    resumed = await shell.run(*command, str(out))
    assert resumed.status == 0, resumed.err
    assert {request.batch for request in shell.queue.requests} == {former}
    journal.write_text(json.dumps(header) + "\n")
    assert (await shell.run(*command, str(out), "--fresh")).status == 0
    assert former not in {request.batch for request in shell.queue.requests[2:]}


async def test_a_fresh_run_that_was_interrupted_goes_on_without_the_option(shell: Shell, tmp_path: Path) -> None:
    shell.queue.paused = True
    source, out = lines_in(tmp_path / "in", 3), tmp_path / "out"
    command = ["run-batch", "-i", str(source), "-o", str(out), *NO_SCHEDULER]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock", *command, "--fresh", "--queue", shell.address, stderr=asyncio.subprocess.PIPE
    )
    async with shell.queue.changed:
        await shell.queue.changed.wait_for(lambda: len(shell.queue.requests) == 3)
    os.kill(process.pid, signal.SIGINT)
    said = (await process.communicate())[1].decode()
    assert "  to go on   run the same command without --fresh\n" in said
    shell.queue.paused = False
    await shell.queue.finish_all()
    assert (await shell.run(*command)).status == 0
    assert len(shell.queue.requests) == 3, "no line is another request"
    assert len(out.read_text().splitlines()) == 3


@pytest.mark.parametrize("flags", [(), ("--fresh",)])
async def test_a_fresh_run_that_fails_says_how_to_keep_its_answers(
    shell: Shell, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    source = lines_in(tmp_path / "in", 100)
    command = ["run-batch", "-i", str(source), "-o", str(tmp_path / "out"), *NO_SCHEDULER]
    failed = await shell.run(*command, *flags, largest_file_bytes=4096)
    assert failed.status == 73, failed.err
    assert ("\n  to go on   run the same command without --fresh\n" in failed.err) == bool(flags)
    assert (await shell.run(*command)).status == 0
    assert len(shell.queue.requests) == 100


async def test_a_fresh_run_that_left_nothing_is_not_to_be_gone_on_with(shell: Shell, tmp_path: Path) -> None:
    source = lines_in(tmp_path / "in", 2)
    command = ["run-batch", "-i", str(source), "-o", str(tmp_path / "out"), *NO_SCHEDULER, "--fresh"]
    refused = await shell.run(*command, "--channel", "nowhere")
    assert (refused.status, "to go on" in refused.err) == (2, False)


@pytest.mark.parametrize("flags", [(), ("--fresh",)])
async def test_a_fresh_run_names_the_batch_that_it_leaves_in_the_queue_while_that_runs(
    shell: Shell, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    shell.queue.paused = True
    command = ["run-batch", "-i", str(lines_in(tmp_path / "in", 3)), "-o", str(tmp_path / "out"), *NO_SCHEDULER]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock", *command, *flags, "--queue", shell.address, stderr=asyncio.subprocess.DEVNULL
    )
    async with shell.queue.changed:
        await shell.queue.changed.wait_for(lambda: len(shell.queue.requests) == 3)
    process.kill()
    await process.wait()
    shell.queue.paused = False
    left = shell.queue.requests[0].batch
    fresh = await shell.run(*command, "--fresh")
    assert (fresh.status, len(shell.queue.requests), shell.queue.cancelled_batches) == (0, 6, [])
    assert fresh.err.splitlines()[:2] == [
        f"--fresh leaves the batch {left} in the queue, of which 3 requests still wait or run",
        f"  to drop    penstock cancel --batch {left} --queue {shell.address}",
    ]
    await shell.queue.finish_all()
    assert "leaves" not in (await shell.run(*command, "--fresh")).err
