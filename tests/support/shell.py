"""Runs the command as a user types it."""

from __future__ import annotations

import asyncio
import sys

from tests.support.fake_queue import FakeQueue

LIMITED = "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, ({0}, {0})); from penstock.cli.main import main; main()"
"""Runs the command with a limit to the size of every file that it writes, in bytes."""


class Ran:
    """How a command ended."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err


class Shell:
    """Runs the command against one queue."""

    def __init__(self, address: str, queue: FakeQueue) -> None:
        self.address = address
        self.queue = queue

    async def run(
        self, *arguments: str, plain: bool = False, stdin: bytes | None = None, largest_file_bytes: int | None = None
    ) -> Ran:
        """Run `penstock ARGUMENTS --queue ADDRESS`, with `stdin` in a pipe and a limit to what the disk takes."""
        flags = [] if plain else ["--queue", self.address]
        program = ["-m", "penstock"] if largest_file_bytes is None else ["-c", LIMITED.format(largest_file_bytes)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *program, *arguments, *flags,
            stdin=None if stdin is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate(stdin)
        assert b"Traceback" not in err, err.decode()
        return Ran(process.returncode or 0, out.decode(), err.decode())
