"""Whose turn it is to read the input of a batch: lines take memory and all of the processor.

A turn is as long as a window of lines. Tenants have one after the other, and of a tenant's batches the one with the
smallest input: it waits for a window of a longer one, and not for its end. Those that are as long follow each other, so
that few are begun at a time; something is kept of each that is.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from itertools import count
from operator import itemgetter
from typing import NamedTuple, Self
from weakref import WeakValueDictionary

from services.gateway.batch.lines import WINDOW_BYTES, WINDOW_LINES, RawLine


class TooLateError(Exception):
    """A turn was not had while it was of use."""


class Reader(NamedTuple):
    """Who is to read."""

    tenant: str
    size_bytes: int
    """Of the input."""
    left_s: Callable[[], float | None]
    """Seconds until its turn is of no use any more; None if it always is."""


class Rank(NamedTuple):
    """A place among a tenant's readers: the smallest is first."""

    size_bytes: int
    number: int
    """In the order in which they came."""


class Line:
    """Those who wait for something that one has at a time."""

    def __init__(self) -> None:
        """Nobody has it."""
        self._is_had = False
        self._waiting: dict[str, list[tuple[Rank, asyncio.Future[None]]]] = {}
        """By tenant, the next one first."""

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    async def take(self, tenant: str, rank: Rank) -> None:
        """Wait until it is had."""
        if not self._is_had:
            self._is_had = True
            return
        mine = (rank, asyncio.get_running_loop().create_future())
        insort(self._waiting.setdefault(tenant, []), mine, key=itemgetter(0))
        try:
            await mine[1]
        except asyncio.CancelledError:
            if mine[1].cancelled():
                self._leave(tenant, mine)
            else:
                self.give()  # it was given in the same moment
            raise

    def give(self) -> None:
        """Let the next have it."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            waiting = self._waiting.pop(tenant)
            _, future = waiting.pop(0)
            if waiting:
                self._waiting[tenant] = waiting  # behind all others
            if not future.done():  # else who waited was stopped, and has not left yet
                future.set_result(None)
                return
        self._is_had = False

    def _leave(self, tenant: str, mine: tuple[Rank, asyncio.Future[None]]) -> None:
        waiting = self._waiting.get(tenant, [])
        if mine in waiting:
            waiting.remove(mine)
            if not waiting:
                del self._waiting[tenant]


class Turn:
    """To have while reading, as an async context."""

    def __init__(self, lines: Sequence[Line], reader: Reader, number: int) -> None:
        """Wait in each of these lines; the last is that of all readers."""
        self._lines = lines
        self._tenant, self._left_s = reader.tenant, reader.left_s
        self._rank = Rank(reader.size_bytes, number)
        self._had: list[Line] = []
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
                    await line.take(self._tenant, self._rank)
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
            self._had.pop().give()


class Turns:
    """The turns of all batches that one gateway drives."""

    def __init__(self) -> None:
        """Nobody reads."""
        self._reading = Line()
        self._submitting: WeakValueDictionary[str, Line] = WeakValueDictionary()
        """By tenant, of those that submit or wait for it, and of no others."""
        self._numbers = count()

    def to_read(self, reader: Reader) -> Turn:
        """Return a turn for reading and nothing else."""
        return Turn([self._reading], reader, next(self._numbers))

    def to_submit(self, reader: Reader) -> Turn:
        """Return a turn for submitting what is read; a tenant's batches one after the other.

        What has been read stays in memory while the tenant's quota has no room for it: that of one batch, not of many.
        """
        line = self._submitting.setdefault(reader.tenant, Line())
        return Turn([line, self._reading], reader, next(self._numbers))
