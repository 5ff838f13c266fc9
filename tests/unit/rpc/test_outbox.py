"""Messages gathered into frames."""

from __future__ import annotations

from functools import partial

from penstock.limits import MAX_FRAME_MESSAGES, TARGET_FRAME_BYTES
from penstock.queue.v1 import queue_pb2
from services.rpc.outbox import Outbox


def message(name: str) -> queue_pb2.WorkerToQueue:
    return queue_pb2.WorkerToQueue(claim=queue_pb2.Claim(request_id=name))


async def frames_of(outbox: Outbox) -> list[list[str]]:
    """Close the outbox; return the names in every frame it still had."""
    outbox.close()
    decoded = [queue_pb2.WorkRequest.FromString(frame) async for frame in outbox.frames()]
    return [[message.claim.request_id for message in frame.messages] for frame in decoded]


async def test_one_frame_takes_everything_that_is_ready_encoded_or_not() -> None:
    outbox = Outbox()
    for each in (message("a"), message("b").SerializeToString(), message("c")):
        outbox.put(each)
    assert await frames_of(outbox) == [["a", "b", "c"]]


async def test_frames_are_bounded_in_count() -> None:
    outbox = Outbox()
    for number in range(MAX_FRAME_MESSAGES + 1):
        outbox.put(message(str(number)))
    assert [len(frame) for frame in await frames_of(outbox)] == [MAX_FRAME_MESSAGES, 1]


async def test_frames_are_bounded_in_bytes() -> None:
    outbox = Outbox()
    names = [str(number) * TARGET_FRAME_BYTES for number in range(3)]
    for name in names:
        outbox.put(message(name))
    assert await frames_of(outbox) == [[name] for name in names]


async def test_what_is_put_after_the_close_is_dropped() -> None:
    outbox = Outbox()
    outbox.close()
    outbox.put(message("a"))
    assert await frames_of(outbox) == []
    assert len(outbox) == 0


async def test_a_message_is_made_when_its_turn_comes_and_left_out_if_it_is_empty() -> None:
    outbox, made = Outbox(), []

    def later(name: str) -> bytes:
        made.append(name)
        return message(name).SerializeToString() if name else b""

    large = "x" * TARGET_FRAME_BYTES
    outbox.put(message(large))
    for name in ("a", "", "b"):
        outbox.put_later(partial(later, name))
    frames = outbox.frames()
    await anext(frames)
    assert made == [], "the first frame is full without them"
    assert outbox.size_bytes == 0
    assert await frames_of(outbox) == [["a", "b"]]


async def test_nothing_but_empty_messages_is_no_frame() -> None:
    outbox = Outbox()
    outbox.put_later(bytes)
    assert await frames_of(outbox) == []
