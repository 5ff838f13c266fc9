"""What a reader has not taken yet is bounded, in memory and in how much of it is taken at once."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from penstock import following
from penstock.queue.v1 import queue_pb2 as pb
from penstock.request.v1 import request_pb2
from tests.support.resident import resident_bytes
from tests.unit.client.test_following import delta


async def test_a_reader_too_far_behind_gets_no_more_deltas_and_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MAX_INBOX_BYTES", 1000)
    inbox = following.Inbox(["r"], True)
    put = partial(inbox.put, size_bytes=600)
    put(pb.WatchEvent(tokens=delta("r", 0, "ab")))
    put(pb.WatchEvent(tokens=delta("r", 2, "cd")))
    assert [event.tokens.text for event in await inbox.take()] == ["ab"]
    put(pb.WatchEvent(tokens=delta("r", 4, "ef")))
    put(pb.WatchEvent(result=pb.WatchResult(cursor=1)))
    assert [event.WhichOneof("event") for event in await inbox.take()] == ["result"]


async def test_who_fell_behind_takes_in_parts_between_which_others_have_their_turn() -> None:
    inbox = following.Inbox(["r"], True)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    count = following.MAX_INBOX_BYTES // 1024
    for number in range(count):
        inbox.put(pb.WatchEvent(tokens=delta("r", number, "a")), 1024)
    task = asyncio.create_task(others())
    parts: list[list[int]] = []
    before: list[int] = []
    while not parts or parts[-1][-1] < count:
        parts.append([event.tokens.offset for event in await inbox.take()])
        before.append(turns)
        inbox.put(pb.WatchEvent(tokens=delta("r", count, "a")), 1024)  # there is room for it again
    task.cancel()
    assert [offset for part in parts for offset in part] == list(range(count + 1))
    assert max(map(len, parts)) * 1024 <= 2 * following.TAKEN_BYTES
    assert len(set(before)) == len(parts)


async def test_of_several_no_more_results_are_held_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MAX_INBOX_BYTES", 1000)
    inbox = following.Inbox(["a", "b", "c", "d"], False)
    for name in "abcd":
        result = request_pb2.Result(request_id=name)
        inbox.put(pb.WatchEvent(result=pb.WatchResult(result=result)), size_bytes=600)
    assert [event.result.result.request_id for event, *_ in inbox._events] == ["a", "b"]
    await inbox.take()
    assert inbox.take_put_off() == ["c"], "two are more than would be taken"
    assert inbox.take_put_off() == ["d"]
    assert inbox.take_put_off() == []


async def test_what_was_put_off_is_not_asked_for_while_it_would_be_put_off_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(following, "MAX_INBOX_BYTES", 1000)
    monkeypatch.setattr(following, "TAKEN_BYTES", 500)
    inbox = following.Inbox(["a", "b", "c", "d"], False, large_bytes=10_000)
    for name, size in (("a", 600), ("b", 3000), ("c", 600)):
        inbox.put(ended_with(name, 10), size)
    assert [event.result.result.request_id for event in await inbox.take()] == ["a"]
    assert inbox.take_put_off() == [], "b is still held"
    assert [event.result.result.request_id for event in await inbox.take()] == ["b"]
    assert inbox.take_put_off() == ["c"]


async def test_large_results_of_some_do_not_silence_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MAX_INBOX_BYTES", 1000)
    inbox = following.Inbox(["a", "b"], True)
    inbox.put(pb.WatchEvent(result=pb.WatchResult(result=request_pb2.Result(request_id="a"))), size_bytes=5000)
    inbox.put(pb.WatchEvent(tokens=delta("b", 0, "x")), 600)
    inbox.put(pb.WatchEvent(tokens=delta("b", 1, "y")), 600)
    assert [event.WhichOneof("event") for event in await inbox.take()] == ["result", "tokens"]


def test_what_waits_does_not_hold_on_to_the_frames_it_came_in() -> None:
    others = pb.WatchEvent(tokens=delta("other", 0, "x" * 2**20))
    inbox = following.Inbox(["r"], True)
    before_bytes = resident_bytes()
    for number in range(50):
        frame = pb.FollowResponse(events=[others, pb.WatchEvent(tokens=delta("r", number, "a"))])
        inbox.put(pb.FollowResponse.FromString(frame.SerializeToString()).events[1], 512)
    assert len(inbox._events) == 50
    assert resident_bytes() - before_bytes < 100 * 2**20, "those of fifty frames are twice as much"


async def test_of_a_large_result_that_nobody_waits_for_only_the_outline_is_held() -> None:
    inbox = following.Inbox(["a", "b", "c"], True, large_bytes=1000)
    for name, size in (("a", 999), ("b", 1000)):
        inbox.put(ended_with(name, size), size)
    told = await inbox.take()
    first, second = (event.result.result for event in told)
    assert (len(first.choices), len(second.choices)) == (1, 0)
    assert (second.request_id, second.outcome, second.model) == ("b", request_pb2.OUTCOME_COMPLETED, "tiny")
    assert told.sizes_bytes == {"a": 999, "b": 1000}
    waiting = asyncio.ensure_future(inbox.take())
    await asyncio.sleep(0)
    inbox.put(ended_with("c", 5000), 5000)
    (event,) = await waiting
    assert len(event.result.result.choices) == 1, "who waits takes it at once"
    assert inbox.over


async def test_behind_more_than_is_taken_at_once_only_the_outline_is_held() -> None:
    """How long it is until the rest is taken is up to a client that takes its time."""
    inbox = following.Inbox(["a", "b"], True, large_bytes=1000)
    waiting = asyncio.ensure_future(inbox.take())
    await asyncio.sleep(0)
    for number in range(2):
        inbox.put(pb.WatchEvent(tokens=delta("b", number, "x")), following.TAKEN_BYTES)
    inbox.put(ended_with("a", 5000), 5000)
    inbox.put(ended_with("b", 10), 10)
    for part in (await waiting, await inbox.take()):
        assert [event.tokens.text for event in part] == ["x"]
    results = [event.result.result for event in await inbox.take()]
    assert [(result.request_id, len(result.choices)) for result in results] == [("a", 0), ("b", 1)]
    assert inbox.over


async def test_what_failed_is_told_in_outline_with_its_reason() -> None:
    inbox = following.Inbox(["a"], False, large_bytes=10)
    event = ended_with("a", 5000)
    event.result.result.error.code = "broken"
    inbox.put(event, 5000)
    (told,) = await inbox.take()
    assert (told.result.result.error.code, told.result.cursor) == ("broken", 7)


def ended_with(name: str, size: int) -> pb.WatchEvent:
    choices = [request_pb2.Choice(text="x" * size)]
    outcome = request_pb2.OUTCOME_COMPLETED
    result = request_pb2.Result(request_id=name, outcome=outcome, model="tiny", choices=choices)
    return pb.WatchEvent(result=pb.WatchResult(result=result, cursor=7))
