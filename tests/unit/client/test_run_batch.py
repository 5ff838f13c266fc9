"""`penstock run-batch`, as a user types it, against a queue in memory."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.batch_lines import completion
from tests.support.fake_queue import FakeQueue, serving
from tests.support.shell import Shell

NO_SCHEDULER = ("--scheduler", "127.0.0.1:1")


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


async def test_an_interrupted_run_says_how_to_go_on_and_how_to_give_up(shell: Shell, tmp_path: Path) -> None:
    shell.queue.paused = True
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
