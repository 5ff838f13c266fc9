"""Whose turn it is to read the input of a batch: lines take memory and all of the processor.

A turn is as long as a window of lines. Tenants have one after the other, and of a tenant's batches the one with the
smallest input: it waits for a window of a longer one, and not for its end. Those that are as long follow each other, so
that few are begun at a time; something is kept of each that is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from itertools import count
from typing import NamedTuple, Self
from weakref import WeakValueDictionary

from services.gateway.batch.lines import WINDOW_BYTES, WINDOW_LINES, RawLine
from services.rpc.waiters import Rank, SharedWindow


class TooLateError(Exception):
    """A turn was not had while it was of use."""


class Reader(NamedTuple):
    """Who is to read."""

    tenant: str
    size_bytes: int
    """Of the input."""
    left_s: Callable[[], float | None]
    """Seconds until its turn is of no use any more; None if it always is."""


class Turn:
    """To have while reading, as an async context."""

    def __init__(self, lines: Sequence[SharedWindow], reader: Reader, number: int) -> None:
        """Wait in each of these lines, of which the last is that of all readers, as the so manieth that came."""
        self._lines = lines
        self._tenant, self._left_s = reader.tenant, reader.left_s
        self._rank: Rank = (reader.size_bytes, number)
        self._had: list[SharedWindow] = []
        self._read_lines = self._read_bytes = 0

    async def __aenter__(self) -> Self:
        """Wait until it is had. Raises TooLateError."""
        await self._take()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Give it to the next, unless whoever had it was stopped while it waited."""
        self._give(0)

    async def read(self, size_bytes: int) -> None:
        """Note a line that was read, or a piece without one; after a window of them let others have it.

        Raises TooLateError.
        """
        self._read_lines += 1
        self._read_bytes += size_bytes
        if self._read_lines >= WINDOW_LINES or self._read_bytes >= WINDOW_BYTES:
            await self.pass_on()

    async def lines(self, read: AsyncGenerator[RawLine, None], offset: int = 0) -> AsyncGenerator[RawLine, None]:
        """Yield the lines of a file that is `read` from `offset`; others have the turn after each window of it.

        Raises TooLateError, and what reading raises.
        """
        async with aclosing(read):
            async for raw in read:
                if not raw.is_mark:
                    yield raw
                await self.read(raw.read_to - offset)
                offset = raw.read_to

    async def pass_on(self) -> None:
        """Let those have it who come first. Raises TooLateError."""
        self._read_lines = self._read_bytes = 0
        if any(line.is_wanted for line in self._lines):
            self._give(0)
            await self._take()

    async def pause(self, seconds: float) -> None:
        """Let others read for at least so long, but none that wait in the same lines besides. Raises TooLateError."""
        self._give(len(self._lines) - 1)
        await asyncio.sleep(seconds)
        await self._take()

    async def _take(self) -> None:
        try:
            async with asyncio.timeout(self._left_s()):
                for line in self._lines[len(self._had) :]:
                    await line.enter(self._tenant, 1, self._rank)
                    self._had.append(line)
        except TimeoutError:
            self._give(0)
            raise TooLateError from None
        except asyncio.CancelledError:
            self._give(0)
            raise

    def _give(self, kept: int) -> None:
        """Give all but the first so many."""
        while len(self._had) > kept:
            self._had.pop().leave(1)


class Turns:
    """The turns of all batches that one gateway drives."""

    def __init__(self) -> None:
        """Nobody reads."""
        self._reading = SharedWindow(1)
        self._submitting: WeakValueDictionary[str, SharedWindow] = WeakValueDictionary()
        """By tenant, of those that submit or wait for it, and of no others."""
        self._numbers = count()

    def to_read(self, reader: Reader) -> Turn:
        """Return a turn for reading and nothing else."""
        return Turn([self._reading], reader, next(self._numbers))

    def to_submit(self, reader: Reader) -> Turn:
        """Return a turn for submitting what is read; a tenant's batches one after the other.

        What has been read stays in memory while the tenant's quota has no room for it: that of one batch, not of many.
        """
        line = self._submitting.setdefault(reader.tenant, SharedWindow(1))
        return Turn([line, self._reading], reader, next(self._numbers))
