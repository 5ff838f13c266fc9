"""Messages gathered into frames."""

from __future__ import annotations

from dataclasses import dataclass

from services.rpc.limits import MAX_FRAME_MESSAGES, TARGET_FRAME_BYTES
from services.rpc.outbox import Outbox


@dataclass
class Message:
    """A message of a given size."""

    number: int
    size_bytes: int = 1

    def ByteSize(self) -> int:
        return self.size_bytes


async def frames_of(outbox: Outbox[Message]) -> list[list[int]]:
    """Return the numbers in every frame of a closed outbox."""
    return [[message.number for message in frame] async for frame in outbox.frames()]


async def test_one_frame_takes_everything_that_is_ready() -> None:
    outbox: Outbox[Message] = Outbox()
    outbox.put_all(Message(n) for n in range(5))
    outbox.close()
    assert await frames_of(outbox) == [[0, 1, 2, 3, 4]]


async def test_frames_are_bounded_in_count() -> None:
    outbox: Outbox[Message] = Outbox()
    outbox.put_all(Message(n) for n in range(MAX_FRAME_MESSAGES + 1))
    outbox.close()
    assert [len(frame) for frame in await frames_of(outbox)] == [MAX_FRAME_MESSAGES, 1]


async def test_frames_are_bounded_in_bytes() -> None:
    outbox: Outbox[Message] = Outbox()
    outbox.put_all(Message(n, TARGET_FRAME_BYTES) for n in range(3))
    outbox.close()
    assert await frames_of(outbox) == [[0], [1], [2]]


async def test_what_is_put_after_the_close_is_dropped() -> None:
    outbox: Outbox[Message] = Outbox()
    outbox.close()
    outbox.put(Message(1))
    assert await frames_of(outbox) == []
    assert len(outbox) == 0
