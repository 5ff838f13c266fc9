"""A dead letter that is requeued before those who watch it by name have read its result: they go on watching."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias, TypeVar, cast
from unittest.mock import Mock

import pytest

from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2
from services.queue import wire
from services.queue.core import records
from services.queue.core.effects import Deliver, Ended
from services.queue.core.entry import Failure, parse_request_id
from services.queue.core.messages import Cancel, Claim, Complete, RequeueDead, Tick, WorkerOpened
from services.queue.storage.reader import Reader
from services.queue.watch.following import Following
from services.queue.watch.frames import FEW_RESULTS
from services.queue.watch.hub import WatchHub
from services.queue.watch.watching import Watching
from tests.support.committing import Rig, committing
from tests.support.queueing import RULES, STORE_ID
from tests.support.waiting import wait_for_async

T = TypeVar("T")
Stream: TypeAlias = AsyncIterator[bytes]


async def nothing() -> None:
    pass


class HookedReader(Reader):
    """Does something before and after one of its reads."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig.store, STORE_ID)
        self.reads, self.hooked = 0, 0
        self.before: Callable[[], Awaitable[None]] = nothing
        self.after: Callable[[], Awaitable[None]] = nothing

    async def _off_loop(self, work: Callable[[], T]) -> T:
        self.reads += 1
        if self.reads != self.hooked:
            return await super()._off_loop(work)
        await self.before()
        found = await super()._off_loop(work)
        await self.after()
        return found


class Watched:
    """Requests, and what their watchers are told of their ends."""

    def __init__(self, rig: Rig, *names: str) -> None:
        self.rig, self.names, self.hub = rig, names, WatchHub()
        rig.committer.post(WorkerOpened(1, "w", "i", ()))
        self.reader = HookedReader(rig)

    async def is_watched(self) -> bool:
        return bool(self.hub._by_seq)

    def watch(self) -> Stream:
        request = queue_pb2.WatchRequest(request_ids=queue_pb2.RequestIds(ids=self.names))
        watching = Watching(self.rig.committer, self.reader, self.hub, STORE_ID)
        return watching.watch(request, cast("Any", Mock()))

    def follow(self) -> Stream:
        async def requests() -> AsyncIterator[queue_pb2.FollowRequest]:
            yield queue_pb2.FollowRequest(follow=[queue_pb2.FollowedRequest(request_id=name) for name in self.names])

        following = Following(self.rig.committer, self.reader, self.hub, STORE_ID)
        return following.follow(requests(), cast("Any", Mock()))

    async def tell(self) -> None:
        """Tell the hub of what has ended, as the outlet does, and let its watchers look at it."""
        for effect in [effect for effect in self.rig.ear.effects if isinstance(effect, Ended)]:
            self.rig.ear.effects.remove(effect)
            self.hub.ended(effect.seq, effect.meta.batch_key, effect.request_id, wire.told_result(effect))
        for _ in range(5):
            await self.rig.settled(Tick())

    async def die(self, name: str) -> None:
        for _ in range(RULES.max_attempts):
            await self.rig.settled(Claim(1, name))
            lease = [effect for effect in self.rig.ear.effects if isinstance(effect, Deliver)][-1].lease
            await self.rig.settled(Complete(1, lease, None, Failure("e", "bad"), None))

    async def requeue(self) -> None:
        """Have an operator requeue the first of them."""
        await self.rig.committer.ask(lambda ticket: RequeueDead(ticket, self.names[:1]))

    async def cancel(self) -> None:
        """End the first of them anew."""
        await self.rig.committer.ask(lambda ticket: Cancel(ticket, self.names[:1]))
        await self.tell()


async def all_told(stream: Stream) -> queue_pb2.FollowResponse:
    return queue_pb2.FollowResponse.FromString(b"".join([frame async for frame in stream]))


@pytest.mark.parametrize("how", [Watched.watch, Watched.follow])
async def test_who_watches_a_dead_letter_that_is_revived_goes_on(how: Callable[[Watched], Stream]) -> None:
    async with committing() as rig:
        watched = Watched(rig, (await rig.submit()).acks[0][0])
        telling = asyncio.create_task(all_told(how(watched)))
        await wait_for_async(watched.is_watched, "the watch")
        await watched.die(watched.names[0])
        await watched.requeue()
        await watched.tell()
        await watched.cancel()
        response = await telling
    assert [event.result.result.outcome for event in response.events] == [request_pb2.OUTCOME_CANCELLED]
    assert not response.unknown


@pytest.mark.parametrize("how", [Watched.watch, Watched.follow])
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("read", [1, 3])
async def test_so_does_who_begins_to_while_it_is_revived(
    how: Callable[[Watched], Stream], read: int, at_once: bool
) -> None:
    """Before results are put in order, and before they are read; it ends anew before anybody asks, or later."""
    async with committing() as rig:
        names = [name for name, _ in (await rig.submit(FEW_RESULTS + 1)).acks]
        watched = Watched(rig, *names)
        for name in names:
            await watched.die(name)
        await watched.tell()
        reader = watched.reader
        reader.hooked, reader.before = read, watched.requeue
        if at_once:
            reader.after = watched.cancel
        telling = asyncio.create_task(all_told(how(watched)))

        async def revived() -> bool:
            return reader.reads >= read and not await in_store(watched)

        if not at_once:
            await wait_for_async(revived, "the requeue")
            for _ in range(5):
                await watched.tell()
            await watched.cancel()
        response = await telling
    outcomes = Counter(event.result.result.outcome for event in response.events)
    assert outcomes == {request_pb2.OUTCOME_DEAD: FEW_RESULTS, request_pb2.OUTCOME_CANCELLED: 1}
    assert not response.unknown


async def in_store(watched: Watched) -> bool:
    """Whether the first request has a result."""
    seq = parse_request_id(STORE_ID, watched.names[0])
    return watched.rig.store.get(records.RESULTS, records.seq_key(seq)) is not None
