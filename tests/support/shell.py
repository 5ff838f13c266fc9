"""Runs the command as a user types it."""

from __future__ import annotations

import asyncio
import sys

from tests.support.fake_queue import FakeQueue


class Ran:
    """How a command ended."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err


class Shell:
    """Runs the command against one queue."""

    def __init__(self, address: str, queue: FakeQueue) -> None:
        self.address = address
        self.queue = queue

    async def run(self, *arguments: str, plain: bool = False) -> Ran:
        """Run `penstock ARGUMENTS --queue ADDRESS`."""
        flags = [] if plain else ["--queue", self.address]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock", *arguments, *flags,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
        assert b"Traceback" not in err
        return Ran(process.returncode or 0, out.decode(), err.decode())
