"""A message told in parts reaches its watcher whole, and as a message, however its deltas are merged and repeated."""

from __future__ import annotations

from penstock.request.v1 import request_pb2 as pb
from services.queue.core.messages import NO_BATCH
from services.queue.watch.hub import WatchHub

REASONING = pb.ToolPart(text="Hm.", reasoning=True)
CONTENT = pb.ToolPart(text="Seven.")


def delta(offset: int, *texts: str, parts: list[pb.ToolPart]) -> pb.TokenDelta:
    ids = [offset + number for number in range(len(texts))]
    return pb.TokenDelta(
        request_id="r-1", attempt=1, offset=offset, token_ids=ids, text="".join(texts), parts=parts, as_message=True
    )


def test_merged_deltas_are_one_of_a_message() -> None:
    hub = WatchHub()
    with hub.requests([1], True) as watcher:
        hub.publish(1, NO_BATCH, delta(0, "<think>", parts=[]))
        hub.publish(1, NO_BATCH, delta(1, "Hm.", parts=[REASONING]))
        hub.publish(1, NO_BATCH, delta(2, "</think>", "Seven.", parts=[CONTENT]))
        (told,) = watcher.take_deltas()
    assert told == delta(0, "<think>", "Hm.", "</think>", "Seven.", parts=[REASONING, CONTENT])


def test_what_is_said_again_from_the_start_is_still_of_a_message() -> None:
    """Its parts come again too, and say where they belong."""
    hub = WatchHub()
    with hub.requests([1], True) as watcher:
        hub.publish(1, NO_BATCH, delta(0, "Hm.", parts=[REASONING]))
        watcher.take_deltas()
        hub.publish(1, NO_BATCH, delta(0, "Hm.", "</think>", "Seven.", parts=[REASONING, CONTENT]))
        (told,) = watcher.take_deltas()
    assert (told.offset, told.text, told.as_message) == (1, "</think>Seven.", True)
    assert list(told.parts) == [REASONING, CONTENT]
