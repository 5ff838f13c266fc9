"""Many requests followed over one stream: each reader gets all of its own, once, whatever the others do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import penstock
from penstock import following
from penstock.queue.v1 import queue_pb2 as pb
from penstock.request.v1 import request_pb2
from tests.support.fake_queue import FakeQueue, cancelled, serving
from tests.support.waiting import wait_for_async


@pytest.fixture
async def queue() -> FakeQueue:
    queue = FakeQueue()
    queue.paused = True
    return queue


@pytest.fixture
async def client(queue: FakeQueue) -> AsyncIterator[penstock.Client]:
    async with serving(queue) as address, penstock.Client(address, retry_for_s=20) as client:
        yield client


def delta(name: str, offset: int, text: str, attempt: int = 1) -> request_pb2.TokenDelta:
    ids = range(offset, offset + len(text))
    return request_pb2.TokenDelta(request_id=name, attempt=attempt, offset=offset, token_ids=ids, text=text)


async def texts(client: penstock.Client, name: str) -> str:
    return "".join([token.text async for token in client.tokens(name)])


async def until_followed(queue: FakeQueue, *names: str) -> None:
    async def followed() -> bool:
        return bool(queue.follows) and set(names) <= set(queue.follows[-1])

    await wait_for_async(followed, f"{names} to be followed")


async def test_hundreds_wait_on_one_stream(client: penstock.Client, queue: FakeQueue) -> None:
    names = [await client.submit(prompt=f"p {i}") for i in range(300)]
    waiting = [asyncio.create_task(client.result(name)) for name in names]
    await until_followed(queue, *names)
    await queue.finish_all()
    assert [result.request_id for result in await asyncio.gather(*waiting)] == names
    assert len(queue.follows) == 1


async def test_more_than_one_stream_may_follow_wait_on_several(
    client: penstock.Client, queue: FakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "MAX_FOLLOWED", 2)
    names = [await client.submit(prompt=f"p {i}") for i in range(5)]
    waiting = [asyncio.create_task(client.result(name)) for name in names]

    async def followed() -> bool:
        return sorted(queue.followed) == names

    await wait_for_async(followed, "all to be followed")
    assert [len(named) for named in queue.follows] == [2, 2, 1]
    await queue.finish_all()
    assert [result.request_id for result in await asyncio.gather(*waiting)] == names
    assert (await client.result(names[0])).request_id == names[0]
    assert len(queue.follows) == 3, "streams with room are used again"


async def test_a_broken_stream_is_opened_again_with_what_is_open_and_no_token_comes_twice(
    client: penstock.Client, queue: FakeQueue
) -> None:
    first, second = await client.submit(prompt="a"), await client.submit(prompt="b")
    queue.answer = cancelled
    queue.tokens = [delta(first, 0, "ab"), delta(first, 2, "cd"), delta(second, 0, "xy")]
    queue.break_follow_after_tokens = 1
    reading = [asyncio.create_task(texts(client, name)) for name in (first, second)]

    async def reopened() -> bool:
        return len(queue.follows) == 2 and sorted(queue.follows[1]) == [first, second]

    await wait_for_async(reopened, "both to be followed again")
    await queue.finish_all()
    assert await asyncio.gather(*reading) == ["abcd", "xy"]


async def test_a_stream_that_broke_leaves_no_writer_behind(client: penstock.Client, queue: FakeQueue) -> None:
    name = await client.submit(prompt="a")
    queue.tokens = [delta(name, 0, "ab")]
    queue.break_follow_after_tokens = 1
    reading = asyncio.create_task(texts(client, name))

    async def one_writer() -> bool:
        coroutines = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
        return len(queue.follows) == 2 and sum("_consume_request_iterator" in name for name in coroutines) == 1

    await wait_for_async(one_writer, "the writer of the first stream to end")
    await queue.finish_all()
    await reading


async def test_two_readers_of_one_request_get_all_of_it(client: penstock.Client, queue: FakeQueue) -> None:
    name = await client.submit(prompt="p")
    queue.answer = cancelled
    queue.tokens = [delta(name, 0, "abc")]
    early = asyncio.create_task(texts(client, name))
    await until_followed(queue, name)
    late = asyncio.create_task(texts(client, name))

    async def twice() -> bool:
        return queue.follows[-1].count(name) == 2

    await wait_for_async(twice, "it to be followed from its start again")
    await queue.finish_all()
    assert list(await asyncio.gather(early, late)) == ["abc", "abc"]


async def test_readers_of_one_request_share_its_result(client: penstock.Client, queue: FakeQueue) -> None:
    """A copy of a large one for each of hundreds would hold up all else, and fill the memory."""
    names = [await client.submit(prompt=prompt) for prompt in "pqr"]
    readers = [client.wire_events_of(names, tokens=False) for _ in range(3)]
    begun = [asyncio.ensure_future(anext(reader)) for reader in readers]
    last = asyncio.create_task(client.result(names[-1]))
    for name in names:
        await until_followed(queue, name)
    await queue.finish(queue.requests[0])
    await asyncio.gather(*begun)
    await queue.finish_all()
    await last  # so that behind the second result, which nobody has taken, there is one more
    told = [await anext(reader) for reader in readers]
    results = {event.result.result.request_id: event.ByteSize() for event in told[0]}
    assert list(results) == names[1:]
    assert [one.sizes_bytes for one in told] == [results] * 3
    assert all(mine is first for one in told for mine, first in zip(one, told[0], strict=True))


async def test_readers_of_one_request_share_its_deltas_and_each_has_what_it_has_not_seen(
    client: penstock.Client, queue: FakeQueue
) -> None:
    name = await client.submit(prompt="p")
    queue.answer = cancelled
    queue.tokens = [delta(name, 0, "ab")]
    early = client.wire_events(name, tokens=True)
    assert [event.tokens.text for event in await anext(early)] == ["ab"]
    queue.tokens = [delta(name, 0, "abc"), delta(name, 3, "d")]

    async def read(told: AsyncIterator[following.Told]) -> list[pb.WatchEvent]:
        return [event async for events in told for event in events if event.HasField("tokens")]

    late = [client.wire_events(name, tokens=True) for _ in range(2)]
    reading = [asyncio.create_task(read(one)) for one in (early, *late)]

    async def twice() -> bool:
        return queue.follows[-1].count(name) >= 2

    await wait_for_async(twice, "it to be followed from its start again")
    await queue.finish_all()
    first, *others = await asyncio.gather(*reading)
    assert [event.tokens.text for event in first] == ["c", "d"]
    assert [event.tokens.text for event in others[0]] == ["abc", "d"]
    assert all(mine is other for mine, other in zip(*others, strict=True))
    assert first[1] is others[0][1]


async def test_an_unknown_request_is_told_to_its_reader_only(client: penstock.Client, queue: FakeQueue) -> None:
    name = await client.submit(prompt="p")
    known = asyncio.create_task(client.result(name))
    with pytest.raises(penstock.NotFound, match="nobody"):
        await client.result("nobody")
    await queue.finish_all()
    assert (await known).request_id == name


@pytest.mark.parametrize("name", [5, None, b"r-0", "\ud800", "x" * 513], ids=repr)
async def test_what_is_no_name_is_told_to_its_reader_only(
    client: penstock.Client, queue: FakeQueue, name: object
) -> None:
    good = await client.submit(prompt="p")
    known = asyncio.create_task(client.result(good))
    await until_followed(queue, good)
    async with asyncio.timeout(30):
        with pytest.raises(penstock.InvalidRequest) as refused:
            await client.result(name)  # type: ignore[arg-type]
    assert refused.value.param == "request_id"
    assert "request_id: " in str(refused.value)
    await queue.finish_all()
    assert ((await known).request_id, len(queue.follows)) == (good, 1)


async def test_a_frame_that_cannot_be_sent_breaks_the_stream_off_and_no_more(
    client: penstock.Client, queue: FakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC cancels the call then, and raises in its reader what is raised in a task that somebody cancels."""
    failures = [TypeError("no bytes")]
    take = following._Outgoing.take

    def failing(outgoing: following._Outgoing) -> tuple[list[str], list[str]]:
        if failures:
            raise failures.pop()
        return take(outgoing)

    monkeypatch.setattr(following._Outgoing, "take", failing)
    name = await client.submit(prompt="p")
    queue.paused = False
    await queue.finish_all()
    assert (await client.result(name)).request_id == name
    assert not failures


async def test_a_reader_that_goes_away_leaves_and_one_that_did_not_begin_is_not_named(
    client: penstock.Client, queue: FakeQueue
) -> None:
    name = await client.submit(prompt="p")
    reader = asyncio.create_task(client.result(name))
    await until_followed(queue, name)
    reader.cancel()

    async def left() -> bool:
        return queue.left == [name]

    await wait_for_async(left, "the leaving")


async def test_an_idle_stream_is_closed_and_the_next_request_opens_another(
    client: penstock.Client, queue: FakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "IDLE_S", 0.01)
    queue.paused = False
    assert (await client.generate(prompt="a")).text == "A"

    async def idle() -> bool:
        (stream,) = client._follower._streams
        return stream._task is not None and stream._task.done()

    await wait_for_async(idle, "the stream to be closed")
    assert (await client.generate(prompt="b")).text == "B"
    assert len(queue.follows) == 2


async def test_who_still_waits_when_the_client_closes_is_told(queue: FakeQueue) -> None:
    async with serving(queue) as address:
        client = penstock.Client(address)
        name = await client.submit(prompt="p")
        waiting = asyncio.create_task(client.result(name))
        await until_followed(queue, name)
        await client.close()
        with pytest.raises(penstock.Unavailable, match="closed"):
            await waiting


async def test_who_has_only_just_begun_to_wait_when_the_client_closes_is_told(queue: FakeQueue) -> None:
    async with serving(queue) as address:
        client = penstock.Client(address)
        name = await client.submit(prompt="p")
        waiting = asyncio.create_task(client.result(name))
        await asyncio.sleep(0)  # it has begun, and the stream's task has not
        await client.close()
        with pytest.raises(penstock.Unavailable, match="closed"):
            async with asyncio.timeout(30):
                await waiting


async def test_a_queue_that_stays_away_is_told_to_all() -> None:
    async with penstock.Client("127.0.0.1:1", retry_for_s=0.1) as client:
        answers = await asyncio.gather(client.result("a"), client.result("b"), return_exceptions=True)
        for answer in answers:
            assert isinstance(answer, penstock.Unavailable)
        assert answers[0] is not answers[1], "one that both raise would have the frames of both"


async def test_several_of_one_reader_come_over_the_stream_of_all(client: penstock.Client, queue: FakeQueue) -> None:
    names = [await client.submit(prompt=f"p {i}") for i in range(3)]
    queue.answer = cancelled
    queue.tokens = [delta(name, 0, "ab") for name in names]
    told: list[tuple[str, str]] = []

    async def read() -> None:
        async for events in client.wire_events_of(names, tokens=True):
            told.extend(
                (event.tokens.request_id, event.tokens.text)
                if event.WhichOneof("event") == "tokens"
                else (event.result.result.request_id, "ended")
                for event in events
            )

    reading = asyncio.create_task(read())
    await until_followed(queue, *names)
    alone = asyncio.create_task(client.result(names[1]))
    await queue.finish_all()
    await asyncio.gather(reading, alone)
    assert sorted(told) == sorted((name, what) for name in names for what in ("ab", "ended"))
    assert (len(queue.follows), queue.watches) == (1, [])


async def test_what_comes_while_a_reader_is_busy_is_read(client: penstock.Client, queue: FakeQueue) -> None:
    names = [await client.submit(prompt=f"p {i}") for i in range(2)]
    told = client.wire_events_of(names, tokens=False)
    first = asyncio.ensure_future(anext(told))
    await until_followed(queue, *names)
    await queue.finish(queue.requests[0])
    assert [event.result.result.request_id for event in await first] == names[:1]
    await queue.finish(queue.requests[1])
    await client.result(names[1])  # so that it has come for the other reader too
    assert [event.result.result.request_id for event in await anext(told)] == names[1:]
    assert await anext(told, None) is None


async def test_of_several_a_reader_too_far_behind_has_the_results_sent_again(
    client: penstock.Client, queue: FakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [await client.submit(prompt=f"p {i}") for i in range(50)]
    told = client.wire_events_of(names, tokens=False)
    first = asyncio.ensure_future(anext(told))
    await until_followed(queue, *names)
    monkeypatch.setattr(following, "MAX_INBOX_BYTES", 0)  # anything that waits is too much
    await queue.finish_all()

    async def all_came() -> bool:
        (stream,) = client._follower._streams
        return not stream._inboxes

    await wait_for_async(all_came, "all results")
    ids = [event.result.result.request_id async for events in told_after(first, told) for event in events]
    assert sorted(ids) == sorted(names)
    assert len(queue.followed) > len(names)


async def told_after(
    first: asyncio.Future[following.Told], told: AsyncIterator[following.Told]
) -> AsyncIterator[list[pb.WatchEvent]]:
    yield await first
    async for events in told:
        yield events


def test_who_is_followed_anew_is_not_left_in_a_later_frame() -> None:
    names = [f"r-{number}" for number in range(following.MAX_NAMES + 1)]
    outgoing = following._Outgoing([])
    outgoing.leave = dict.fromkeys(names)
    outgoing.begin(names[-1])
    assert outgoing.take() == ([names[-1]], names[:-1])
    assert outgoing.take() == ([], [])
