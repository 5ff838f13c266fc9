"""Runs the command as a user types it."""

from __future__ import annotations

from tests.support.fake_queue import FakeQueue
from tests.support.forked import run_forked


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
        status, out, err = await run_forked([*arguments, *flags], stdin, largest_file_bytes)
        assert b"Traceback" not in err, err.decode()
        return Ran(status, out.decode(), err.decode())
