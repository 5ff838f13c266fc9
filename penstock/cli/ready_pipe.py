"""The pipe on which a service says that it is ready."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from types import TracebackType

READY = re.compile(rb"ready: \S+ on (\S+)")

READ_BYTES = 65_536
"""Read at once: what a pipe holds (pipe(7))."""

LINE_BYTES = 4096
"""Kept of a line that is not whole yet: far more than a ready line has."""


class ReadyPipe:
    """Watches what a service prints; use it as a context, inside the event loop, for one life of the service.

    asyncio's own pipe of a process would not do: it says that the process has ended only once nobody has the pipe any
    more, and what the process has forked inherits that, and may outlive it.
    """

    def __init__(self, say_ready: Callable[[str], None]) -> None:
        """Call `say_ready` with the HOST:PORT of each ready line. Raises OSError."""
        self._say_ready = say_ready
        self._begun = b""
        self._loop = asyncio.get_running_loop()
        self._ours, theirs = os.pipe()
        os.set_blocking(self._ours, False)
        self.theirs = open(theirs, "wb", buffering=0)  # noqa: SIM115 - the context closes it
        """The service's end; close it here when the service has it."""

    def __enter__(self) -> ReadyPipe:
        """Begin to watch."""
        self._loop.add_reader(self._ours, self.read)
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        """Close both ends, whoever else has the service's."""
        self._loop.remove_reader(self._ours)
        os.close(self._ours)
        self.theirs.close()

    def read(self) -> None:
        """Take what has been printed; after the service's end that is all that it has printed."""
        try:
            printed = os.read(self._ours, READ_BYTES)
        except BlockingIOError:
            return
        if not printed:  # and nothing will be: nobody has the other end
            self._loop.remove_reader(self._ours)
        *lines, begun = (self._begun + printed).split(b"\n")
        self._begun = begun[:LINE_BYTES]
        for line in lines:
            if found := READY.match(line):
                self._say_ready(found.group(1).decode())
