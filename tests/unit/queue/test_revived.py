"""A dead letter that is requeued before those who watch it by name have read its result: they go on watching."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias, cast
from unittest.mock import Mock

import pytest

from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2
from services.queue import wire
from services.queue.core.effects import Deliver, Ended
from services.queue.core.entry import Failure
from services.queue.core.messages import Cancel, Claim, Complete, RequeueDead, Tick, WorkerOpened
from services.queue.storage.reader import Reader
from services.queue.watch.following import Following
from services.queue.watch.hub import WatchHub
from services.queue.watch.watching import Watching
from tests.support.committing import Rig, committing
from tests.support.queueing import RULES, STORE_ID
from tests.support.waiting import wait_for_async

Stream: TypeAlias = AsyncIterator[bytes]


class Watched:
    """One request, and what its watchers are told of its ends."""

    def __init__(self, rig: Rig, name: str) -> None:
        self.rig, self.name, self.hub = rig, name, WatchHub()
        rig.committer.post(WorkerOpened(1, "w", "i", ()))
        self._reader = Reader(rig.store, STORE_ID)

    async def is_watched(self) -> bool:
        return bool(self.hub._by_seq)

    def watch(self) -> Stream:
        request = queue_pb2.WatchRequest(request_ids=queue_pb2.RequestIds(ids=[self.name]))
        watching = Watching(self.rig.committer, self._reader, self.hub, STORE_ID)
        return watching.watch(request, cast("Any", Mock()))

    def follow(self) -> Stream:
        async def requests() -> AsyncIterator[queue_pb2.FollowRequest]:
            yield queue_pb2.FollowRequest(follow=[queue_pb2.FollowedRequest(request_id=self.name)])

        following = Following(self.rig.committer, self._reader, self.hub, STORE_ID)
        return following.follow(requests(), cast("Any", Mock()))

    async def tell(self) -> None:
        """Tell the hub of what has ended, as the outlet does, and let its watchers look at it."""
        for effect in [effect for effect in self.rig.ear.effects if isinstance(effect, Ended)]:
            self.rig.ear.effects.remove(effect)
            self.hub.ended(effect.seq, effect.meta.batch_key, effect.request_id, wire.told_result(effect))
        for _ in range(5):
            await self.rig.settled(Tick())

    async def die(self) -> None:
        for _ in range(RULES.max_attempts):
            await self.rig.settled(Claim(1, self.name))
            lease = [effect for effect in self.rig.ear.effects if isinstance(effect, Deliver)][-1].lease
            await self.rig.settled(Complete(1, lease, None, Failure("e", "bad"), None))


@pytest.mark.parametrize("how", [Watched.watch, Watched.follow])
async def test_who_watches_a_dead_letter_that_is_revived_goes_on(how: Callable[[Watched], Stream]) -> None:
    async with committing() as rig:
        watched = Watched(rig, (await rig.submit()).acks[0][0])
        stream = how(watched)

        async def told() -> bytes:
            return b"".join([frame async for frame in stream])

        telling = asyncio.create_task(told())
        await wait_for_async(watched.is_watched, "the watch")
        await watched.die()
        await rig.committer.ask(lambda ticket: RequeueDead(ticket, (watched.name,)))
        await watched.tell()
        await rig.committer.ask(lambda ticket: Cancel(ticket, (watched.name,)))
        await watched.tell()
        response = queue_pb2.FollowResponse.FromString(await telling)
    assert [event.result.result.outcome for event in response.events] == [request_pb2.OUTCOME_CANCELLED]
    assert not response.unknown
