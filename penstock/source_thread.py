"""Reads a blocking iterable in a thread of its own, for a reader on an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from contextvars import copy_context
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

AHEAD = 16
"""Most items that wait to be taken, and most that are taken together. Enough that a change of threads costs little for
each, few beside what a reader has under way itself."""

_END = object()
"""Comes after the last item."""


class SourceThread(Generic[T]):
    """The items of a blocking iterable on an event loop, which stays free whatever the iterable does.

    The iterable may wait as long as it likes and may call what runs on the loop.
    """

    def __init__(self, source: Iterable[T], loop: asyncio.AbstractEventLoop) -> None:
        """Begin to read `source` for a reader on `loop`, in the context of the caller."""
        self._source = source
        self._loop = loop
        self._ready: deque[object] = deque()
        self._news = asyncio.Event()
        self._told = False
        # A queue of places, not a semaphore: an iterator that was left is ended by the garbage collector, which may do
        # so in a thread that is just giving places back, and a semaphore's lock would have it wait for itself.
        self._room: SimpleQueue[None] = SimpleQueue()
        self._give_back(AHEAD)
        self._left = False
        self._failure: BaseException | None = None
        # A daemon: a source that never gives anything again must not keep the process from ending.
        threading.Thread(target=copy_context().run, args=(self._read,), name="penstock-source", daemon=True).start()

    async def items(self) -> AsyncGenerator[T, None]:
        """Yield the items, on the loop, until the source ends or fails."""
        while True:
            while not self._ready:
                self._news.clear()
                await self._news.wait()
            taken = [self._ready.popleft() for _ in range(len(self._ready))]
            self._give_back(len(taken))
            for item in taken:
                if item is _END:
                    return
                yield item  # type: ignore[misc]

    def raise_failure(self) -> None:
        """Raise what the source raised, if it did; call after the last of `items`."""
        if self._failure is not None:
            raise self._failure

    def leave(self) -> None:
        """Take no more. The thread ends as soon as the source gives something or ends, which is not waited for."""
        self._left = True
        self._give_back(1)

    def _give_back(self, places: int) -> None:
        for _ in range(places):
            self._room.put(None)

    def _read(self) -> None:
        try:
            for item in self._source:
                self._room.get()
                if self._left:
                    return
                self._hand_over(item)
        except BaseException as error:  # whatever it is, it is raised where the source comes from
            self._failure = error
        finally:
            self._hand_over(_END)

    def _hand_over(self, item: object) -> None:
        """Lay an item ready, and wake the reader unless it is about to be woken: a wake-up costs more than an item."""
        self._ready.append(item)
        if not self._told:
            self._told = True
            with suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        self._told = False  # before the reader looks: what it does not see then tells again
        self._news.set()
