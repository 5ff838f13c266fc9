"""Messages on their way out, gathered into frames: one wake-up sends everything that is ready."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Generic, Protocol, TypeVar

from services.rpc.limits import MAX_FRAME_MESSAGES, TARGET_FRAME_BYTES


class Sized(Protocol):
    """A message that knows its encoded size."""

    def ByteSize(self) -> int:  # noqa: N802 (protobuf's name)
        """Return the encoded size in bytes."""


M = TypeVar("M", bound=Sized)


class Outbox(Generic[M]):
    """Unsent messages of one stream. One writer, one reader, one event loop.

    `frames()` yields lists of messages in the order they were put, each list
    bounded in count and bytes, and ends once the outbox is closed and empty.
    """

    def __init__(self) -> None:
        """Make an empty outbox."""
        self._messages: deque[M] = deque()
        self._ready = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        """Return the number of unsent messages."""
        return len(self._messages)

    @property
    def closed(self) -> bool:
        """Whether nothing more will be accepted."""
        return self._closed

    def put(self, message: M) -> None:
        """Queue one message; it is dropped if the outbox is closed (its stream is gone)."""
        if not self._closed:
            self._messages.append(message)
            self._ready.set()

    def put_all(self, messages: Iterable[M]) -> None:
        """Queue messages in order; they are dropped if the outbox is closed."""
        for message in messages:
            self.put(message)

    def close(self) -> None:
        """Accept nothing more; `frames()` ends after what is queued."""
        self._closed = True
        self._ready.set()

    async def frames(self) -> AsyncIterator[list[M]]:
        """Yield bounded lists of messages as they become ready."""
        while True:
            await self._ready.wait()
            while self._messages:
                yield self._take()
            if self._closed:
                return
            self._ready.clear()

    def _take(self) -> list[M]:
        frame: list[M] = []
        size_bytes = 0
        while self._messages and len(frame) < MAX_FRAME_MESSAGES and size_bytes < TARGET_FRAME_BYTES:
            message = self._messages.popleft()
            size_bytes += message.ByteSize()
            frame.append(message)
        return frame
