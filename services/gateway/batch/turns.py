"""Whose turn it is to read the input of a batch: lines take memory and all of the processor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary


class Turn:
    """To have while reading, as an async context; one has it at a time."""

    def __init__(self, one: asyncio.Semaphore) -> None:
        """Wait for `one`."""
        self._one = one
        self._had = False

    async def __aenter__(self) -> Turn:
        """Wait until it is had."""
        await self._take()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Give it to the next, unless whoever had it was stopped while it paused."""
        if self._had:
            self._give()

    async def pause(self, seconds: float) -> None:
        """Let others have it for at least so long."""
        self._give()
        await asyncio.sleep(seconds)
        await self._take()

    async def _take(self) -> None:
        await self._one.acquire()
        self._had = True

    def _give(self) -> None:
        self._had = False
        self._one.release()


class Turns:
    """The turns of all batches that one gateway drives."""

    def __init__(self) -> None:
        """Nobody reads."""
        self._one = asyncio.Semaphore(1)
        self._submitting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By tenant, of those that submit or wait for it, and of no others."""

    def to_read(self) -> Turn:
        """Return a turn for reading and nothing else."""
        return Turn(self._one)

    @asynccontextmanager
    async def to_submit(self, tenant: str) -> AsyncIterator[Turn]:
        """Have a turn for submitting what is read; a tenant's batches one after the other.

        What has been read stays in memory while the tenant's quota has no room for it: that of one batch, not of many.
        """
        lock = self._submitting.setdefault(tenant, asyncio.Lock())
        async with lock, Turn(self._one) as turn:
            yield turn
