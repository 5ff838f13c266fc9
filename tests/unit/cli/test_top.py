"""`penstock top` as a user runs it: in a terminal, and in a script."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock.scheduler.v1 import scheduler_pb2 as pb
from tests.support.fake_queue import FakeQueue, serving
from tests.support.fake_scheduler import FakeScheduler, serving_scheduler
from tests.support.ports import free_port
from tests.support.shell import Shell
from tests.support.waiting import wait_for_async

STATUS = pb.StatusResponse(
    policy="of-the-test", queue_connected=True,
    workers=[pb.WorkerStatus(worker_id="worker-1", model="m", capacity_blocks=9, free_blocks=5, connected=True)],
)  # fmt: skip


class Terminal:
    """A terminal of 80 × 24 with a command in it."""

    def __init__(self, process: asyncio.subprocess.Process, descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._seen = b""
        os.set_blocking(descriptor, False)

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process.send_signal(signal.SIGWINCH)

    def type(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def _read(self) -> str:
        """Return what is on the screen: all that was drawn since it was last begun at its upper left corner."""
        try:
            while chunk := os.read(self._descriptor, 65536):
                self._seen += chunk
        except OSError:
            pass
        return re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", self._seen.rpartition(b"\x1b[H")[2]).decode(errors="replace")

    async def shows(self, *texts: str, lines: int = 0) -> str:
        """Wait until the screen has all of `texts`, in so many lines if it is said, and return it."""

        async def shown() -> str:
            screen = self._read()
            whole = lines in (0, len(screen.splitlines()))
            return screen if whole and all(text in screen for text in texts) else ""

        return await wait_for_async(shown, f"a screen with {texts}; the last one was {self._read()!r}")


@asynccontextmanager
async def terminal(*arguments: str) -> AsyncIterator[Terminal]:
    """Run `penstock ARGUMENTS` in a terminal of its own."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES"):
        environment.pop(name, None)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock", *arguments,
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(ours)


async def test_a_frame_for_a_script() -> None:
    async with serving(FakeQueue()) as queue, serving_scheduler(FakeScheduler(STATUS)) as scheduler:
        flags = ("--scheduler", scheduler, "--interval-s", "0.1")
        ran = await Shell(queue, FakeQueue()).run("top", "--once", *flags)
        assert ran.status == 0
        for said in ("batch", "worker-1", "0.0 requests/s", "policy of-the-test"):
            assert said in ran.out
        assert "\x1b" not in ran.out
        # Not a terminal: one frame, and no end to wait for.
        assert (await Shell(queue, FakeQueue()).run("top", *flags)).status == 0
    alone = await Shell("127.0.0.1:1", FakeQueue()).run("top", "--once", "--scheduler", "127.0.0.1:1")
    assert (alone.status, alone.out) == (69, "")
    assert "the queue does not answer: nothing answers on 127.0.0.1:1" in alone.err


@pytest.mark.parametrize(
    "says", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}], ids=lambda says: next(iter(says))
)
async def test_a_frame_for_a_terminal_that_knows_no_bars(says: dict[str, str]) -> None:
    async with serving(FakeQueue()) as queue, serving_scheduler(FakeScheduler(STATUS)) as scheduler:
        flags = ("--once", "--queue", queue, "--scheduler", scheduler, "--interval-s", "0.1")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock", "top", *flags,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **says},
        )  # fmt: skip
        out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert b"worker-1" in out
    assert b"\\u" not in out, "a bar takes one column still"


async def test_it_goes_on_over_a_restart_and_ends_with_q() -> None:
    address = f"127.0.0.1:{free_port()}"
    async with serving_scheduler(FakeScheduler(STATUS)) as scheduler:
        flags = ("--queue", address, "--scheduler", scheduler, "--interval-s", "0.1")
        async with terminal("top", *flags) as screen:
            await screen.shows("the queue does not answer", "worker-1")
            queue = FakeQueue()
            for _ in range(2):
                async with serving(queue, address):
                    shown = await screen.shows("batch", "worker-1", "0.0 requests/s")
                    assert "does not answer" not in shown
                await screen.shows("the queue does not answer", "worker-1")
            screen.type("xq")
            assert await screen.process.wait() == 0


async def test_a_signal_ends_it() -> None:
    async with (
        serving(FakeQueue()) as queue,
        serving_scheduler(FakeScheduler(STATUS)) as scheduler,
        terminal("top", "--queue", queue, "--scheduler", scheduler) as screen,
    ):
        await screen.shows("worker-1")
        screen.process.send_signal(signal.SIGINT)
        assert await screen.process.wait() == 130


@pytest.mark.parametrize("command", [("top", "--interval-s", "3600"), ("status",)], ids=lambda words: words[0])
async def test_more_workers_than_lines_are_counted_whatever_the_size(command: tuple[str, ...]) -> None:
    workers = [pb.WorkerStatus(worker_id=f"worker-{n:03}", connected=n != 299) for n in range(300)]
    async with (
        serving(FakeQueue()) as queue,
        serving_scheduler(FakeScheduler(pb.StatusResponse(workers=workers))) as scheduler,
        terminal(*command, "--queue", queue, "--scheduler", scheduler) as screen,
    ):
        high = await screen.shows("dead letters", "worker-299", "more workers", "0.0")
        # At once: the next frame of `top` is an hour away.
        screen.resize(lines=10, columns=100)
        low = await screen.shows("dead letters", "worker-299", "batch", lines=10)
        assert len(high.splitlines()) == 24
        assert "more workers" in low
