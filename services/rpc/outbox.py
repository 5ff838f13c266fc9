"""Messages on their way out, gathered into frames: one wake-up sends everything that is ready."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from google.protobuf.message import Message

from penstock.limits import MAX_FRAME_MESSAGES, TARGET_FRAME_BYTES
from services.rpc.encoding import varint
from services.rpc.limits import MAX_UNSENT_MESSAGES

ITEM_TAG: Final = b"\x0a"
"""Of field 1, length-delimited: every frame of every stream is `repeated M messages = 1` (or `events`)."""


class Outbox:
    """Unsent messages of one stream, encoded. One writer, one reader, one event loop.

    `frames()` yields encoded frames of messages in the order they were put, each frame
    bounded in count and bytes, and ends once the outbox is closed and empty.
    """

    def __init__(self) -> None:
        """Make an empty outbox."""
        self._messages: deque[bytes | Callable[[], bytes]] = deque()
        self._bytes = 0
        self._ready = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._closed = False
        self.frames_taken = 0
        """A reader that goes on takes one as soon as the one before is on its way."""

    def __len__(self) -> int:
        """Return the number of unsent messages."""
        return len(self._messages)

    @property
    def size_bytes(self) -> int:
        """Bytes of the unsent messages; those that are still to be made count nothing."""
        return self._bytes

    @property
    def closed(self) -> bool:
        """Whether nothing more will be accepted."""
        return self._closed

    def put(self, message: Message | bytes) -> None:
        """Queue one message, encoded or not; it is dropped if the outbox is closed (its stream is gone)."""
        if not self._closed:
            if not self._messages:
                self._ready.set()
            content = message if isinstance(message, bytes) else message.SerializeToString()
            self._bytes += len(content)
            self._messages.append(content)

    def put_later(self, make: Callable[[], bytes]) -> None:
        """Queue a message that is made, encoded, only when its turn has come; an empty one is left out."""
        if not self._closed:
            if not self._messages:
                self._ready.set()
            self._messages.append(make)

    async def room(self) -> None:
        """Wait while too much is unsent: whoever does not read what it is told is not read either."""
        while len(self._messages) >= MAX_UNSENT_MESSAGES and not self._closed:
            self._room.clear()
            await self._room.wait()

    def close(self) -> None:
        """Accept nothing more; `frames()` ends after what is queued."""
        self._closed = True
        self._ready.set()
        self._room.set()

    def discard(self) -> None:
        """Close, and drop what is queued."""
        self._messages.clear()
        self._bytes = 0
        self.close()

    def frames(self) -> Frames:
        """Return an iterator over encoded frames, which become ready with the messages."""
        return Frames(self)

    async def next_frame(self) -> bytes:
        """Wait for messages and return a frame of them, an empty one once the outbox is closed and empty."""
        while True:
            await self._ready.wait()
            while self._messages:
                if frame := self._take():
                    return frame
            if self._closed:
                return b""
            self._ready.clear()

    def _take(self) -> bytes:
        parts: list[bytes] = []
        size_bytes = count = 0
        self.frames_taken += 1
        while self._messages and count < MAX_FRAME_MESSAGES and size_bytes < TARGET_FRAME_BYTES:
            message = self._messages.popleft()
            count += 1
            if isinstance(message, bytes):
                self._bytes -= len(message)
            else:
                message = message()
                if not message:
                    continue
            size = len(message)
            size_bytes += size
            parts += (ITEM_TAG, varint(size), message)
        self._room.set()
        return b"".join(parts)


class Frames:
    """The frames of an outbox, one after the other. A class because mypyc compiles no async generators."""

    def __init__(self, outbox: Outbox) -> None:
        """Take the frames of `outbox`."""
        self._outbox = outbox

    def __aiter__(self) -> Frames:
        """Return itself."""
        return self

    async def __anext__(self) -> bytes:
        """Return the next frame; raises StopAsyncIteration once the outbox is closed and empty."""
        frame = await self._outbox.next_frame()
        if not frame:
            raise StopAsyncIteration
        return frame
