"""Follow: many requests over one stream, each told once and to its end, whatever happens to queue and follower."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import grpc
import pytest

from penstock.queue.v1 import queue_pb2 as pb
from penstock.request.v1 import request_pb2
from services.queue.core.effects import Write
from services.queue.storage.store import StoreError
from services.queue.watch import following
from services.telemetry import Telemetry
from tests.support.fake_peers import until
from tests.support.serving import Peer, ids, refused, serving, text
from tests.support.waiting import wait_for_async


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    async with serving(Telemetry(None)) as peer:
        yield peer


class Stream:
    """A follower as it would see its stream."""

    def __init__(self, peer: Peer) -> None:
        self.call: Any = peer.stub.Follow()
        self.events: list[pb.WatchEvent] = []
        self.unknown: list[str] = []

    async def follow(self, *names: str, tokens: bool = False, leave: Sequence[str] = ()) -> None:
        follow = [pb.FollowedRequest(request_id=name, tokens=tokens) for name in names]
        await self.call.write(pb.FollowRequest(follow=follow, leave=leave))

    async def until(self, enough: Callable[[], bool]) -> None:
        while not enough():
            response = await self.call.read()
            assert response is not grpc.aio.EOF, "the stream ended"
            self.events += response.events
            self.unknown += response.unknown

    def ended(self) -> list[str]:
        return [event.result.result.request_id for event in self.events if event.HasField("result")]

    def told(self, name: str) -> list[int]:
        deltas = [event.tokens for event in self.events if event.HasField("tokens")]
        return [token for delta in deltas if delta.request_id == name for token in delta.token_ids]


async def cancel(peer: Peer, *names: str) -> None:
    await peer.stub.Cancel(pb.CancelRequest(request_ids=ids(*names)))


def delta(name: str, offset: int, *tokens: int) -> pb.WorkerToQueue:
    return pb.WorkerToQueue(
        tokens=request_pb2.TokenDelta(request_id=name, attempt=1, offset=offset, token_ids=tokens, text="x")
    )


async def test_the_first_answer_is_empty(peer: Peer) -> None:
    (name,) = await peer.submit(text())
    stream = Stream(peer)
    await stream.follow(name)
    assert await stream.call.read() == pb.FollowResponse()


async def test_what_has_ended_what_ends_and_what_is_unknown_are_told_once(peer: Peer) -> None:
    names = await peer.submit(text(), text(), text())
    await cancel(peer, names[0])
    stream = Stream(peer)
    await stream.follow(*names, "nobody", f"{names[0][:-1]}9")
    await stream.until(lambda: len(stream.ended()) == 1 and len(stream.unknown) == 2)
    assert stream.ended() == [names[0]]
    assert stream.unknown == ["nobody", f"{names[0][:-1]}9"]
    await cancel(peer, *names)
    await stream.call.done_writing()
    while (response := await stream.call.read()) is not grpc.aio.EOF:
        stream.events += response.events
    assert sorted(stream.ended()) == names


async def test_tokens_of_many_share_the_stream_and_only_where_they_are_wanted(peer: Peer) -> None:
    loud, quiet = await peer.submit(text(), text())
    work = await peer.work()
    assert not (await work.claim(loud)).watched
    assert not (await work.claim(quiet)).watched
    stream = Stream(peer)
    await stream.follow(loud, tokens=True)
    await stream.follow(quiet)
    watched = await work.next("watched")
    assert (watched.request_id, watched.watched) == (loud, True)
    await work.send(delta(loud, 0, 1, 2), delta(quiet, 0, 7), delta(loud, 2, 3))
    await stream.until(lambda: stream.told(loud) == [1, 2, 3])
    assert stream.told(quiet) == []
    await cancel(peer, loud)
    await work.next("cancel")
    await stream.follow(leave=[loud])
    assert not (await work.next("watched")).watched
    await work.send(delta(loud, 3, 4))
    stream.call.cancel()
    assert stream.told(loud) == [1, 2, 3]


async def test_a_request_that_is_followed_again_is_told_from_its_start(peer: Peer) -> None:
    (name,) = await peer.submit(text())
    work = await peer.work()
    await work.claim(name)
    stream = Stream(peer)
    await stream.follow(name, tokens=True)
    assert (await work.next("watched")).watched
    await work.send(delta(name, 0, 1, 2))
    await stream.until(lambda: stream.told(name) == [1, 2])
    await stream.follow(name, tokens=True)
    assert not (await work.next("watched")).watched
    assert (await work.next("watched")).watched
    await work.send(delta(name, 0, 1, 2, 3))
    await stream.until(lambda: stream.told(name) == [1, 2, 1, 2, 3])
    stream.call.cancel()
    assert not (await work.next("watched")).watched


async def test_nothing_is_kept_of_a_request_that_is_left_while_it_runs(peer: Peer) -> None:
    """Or a gateway's stream would cost the queue something for each client that hangs up."""
    (name,) = await peer.submit(text())
    work = await peer.work()
    await work.claim(name)
    stream = Stream(peer)
    await stream.follow(name, tokens=True)
    assert (await work.next("watched")).watched
    await work.send(delta(name, 0, 1, 2))
    await stream.until(lambda: stream.told(name) == [1, 2])
    (follower,) = peer.service._following._followers
    assert follower.watcher._positions
    await stream.follow(leave=[name])
    assert not (await work.next("watched")).watched
    assert not follower.watcher._positions


async def test_one_that_has_ended_and_is_left_is_not_kept_for_who_does_not_read(peer: Peer) -> None:
    (name,) = await peer.submit(text())
    stream = Stream(peer)
    await stream.follow(name)
    await stream.call.read()
    (follower,) = peer.service._following._followers
    (seq,) = await until(lambda: follower._open, "the request to be followed")  # a read may end before it is
    follower.watcher.ended[seq] = None  # as it is between two looks, which wait for the reader
    follower._leave_seqs([seq])
    assert not follower.watcher.ended


@pytest.mark.parametrize(
    ("frame", "field"),
    [
        (pb.FollowRequest(follow=[pb.FollowedRequest(request_id="x" * 513)]), "follow.request_id"),
        (pb.FollowRequest(leave=["x" * 513]), "leave"),
    ],
)
async def test_a_name_that_is_too_long_for_one_is_refused_not_kept(
    peer: Peer, frame: pb.FollowRequest, field: str
) -> None:
    stream = Stream(peer)
    await stream.call.write(frame)
    await stream.call.read()
    await refused(stream.call.read(), grpc.StatusCode.INVALID_ARGUMENT, f"{field}: 513 bytes")


async def test_no_more_are_left_than_can_be_followed_and_a_few_at_a_time(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "FOLLOWED_AT_ONCE", 2)
    names = await peer.submit(*[text() for _ in range(5)])
    stream = Stream(peer)
    await stream.follow(*names)
    await stream.follow(leave=names[:4])

    async def four_left() -> bool:
        return [len(follower._open) for follower in peer.service._following._followers] == [1]

    await wait_for_async(four_left, "four to be left")
    await stream.call.read()
    await stream.call.write(pb.FollowRequest(leave=[""] * (following.MAX_FOLLOWED + 1)))
    await refused(stream.call.read(), grpc.StatusCode.INVALID_ARGUMENT, f"leave: one stream may follow at most {10**5}")


async def test_a_result_on_disk_whose_write_failed_is_told(peer: Peer) -> None:
    (name,) = await peer.submit(text())
    stream = Stream(peer)
    await stream.follow(name, tokens=True)

    async def followed() -> int:
        return len(peer.service._hub._by_seq)

    await wait_for_async(followed, "it to be followed")
    store = peer.service._store
    write = store.write

    def write_and_fail(writes: Sequence[Write]) -> None:
        write(writes)
        raise StoreError("the sync failed")

    with patch.object(store, "write", write_and_fail):
        call = peer.stub.Cancel(pb.CancelRequest(request_ids=ids(name)))
        await refused(call, grpc.StatusCode.UNAVAILABLE, "the sync failed")
        await stream.until(lambda: stream.ended() == [name])


async def test_too_many_are_refused_and_nothing_of_the_stream_is_left(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "MAX_FOLLOWED", 3)
    names = await peer.submit(*[text() for _ in range(4)])
    stream = Stream(peer)
    await stream.follow(names[0])
    await stream.call.read()
    await stream.follow(*names)
    await refused(stream.call.read(), grpc.StatusCode.INVALID_ARGUMENT, "at most 3")

    async def nothing_left() -> bool:
        hub = peer.service._hub
        return not (len(hub) or hub._by_seq or hub._tokens_by_seq or peer.service._following._followers)

    await wait_for_async(nothing_left, "the stream to be forgotten")


async def test_followers_are_told_when_the_queue_stops(peer: Peer) -> None:
    (name,) = await peer.submit(text())
    stream = Stream(peer)
    await stream.follow(name)
    await stream.call.read()
    peer.service._following.end_all("the queue service is stopping")
    await refused(stream.call.read(), grpc.StatusCode.UNAVAILABLE, "stopping")


async def test_many_large_results_come_whole(peer: Peer) -> None:
    names = await peer.submit(*[text() for _ in range(60)])
    await cancel(peer, *names)
    stream = Stream(peer)
    await stream.follow(*names)
    await stream.until(partial(lambda s: len(s.ended()) == 60, stream))
    assert sorted(stream.ended()) == sorted(names)
