"""Follow streams: many single requests over one stream, so that a step of the engine is one frame however many read.

A gateway or a client that waits for a thousand answers holds one stream; with one each, every token of every request
would be a frame, a wake-up here and one there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import grpc

from penstock.queue.v1 import queue_pb2
from services.auth.caller import CALLER
from services.queue.committer import Committer, RefusedError
from services.queue.core.entry import NO_SEQ, parse_request_id, request_id_of
from services.queue.core.messages import WatchTokens
from services.queue.storage.read_faults import code_of
from services.queue.storage.reader import Reader
from services.queue.storage.store import StoreError
from services.queue.submits.validate import check_name
from services.queue.watch.frames import Results, delta_events, frames, result_events
from services.queue.watch.hub import Watcher, WatchHub
from services.queue.watch.standing import Standing
from services.queue.wire import StoredResult
from services.rpc.reading import reading
from services.rpc.strict import BadInputError, ReaderFailedError

T = TypeVar("T")
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

MAX_FOLLOWED = 100_000
"""Requests that one stream may follow: about 60 MiB of entries here, and far more connections than a gateway holds."""

FOLLOWED_AT_ONCE = 2048
"""Taken up before others have their turn."""

MAX_BEHIND_BYTES = 32 * 1024 * 1024
"""What is kept for one follower that does not read: a gateway's thousand streams may be a second behind together."""


def too_many(field: str) -> BadInputError:
    """Return what is said to one who follows too many, or names more than it can follow in this field of a frame."""
    return BadInputError(f"{field}: one stream may follow at most {MAX_FOLLOWED} requests")


async def in_portions(field: str, names: Sequence[T]) -> AsyncIterator[Sequence[T]]:
    """Yield what one frame names a few at a time; others have their turn in between. Raises BadInputError."""
    if len(names) > MAX_FOLLOWED:
        raise too_many(field)
    for first in range(0, len(names), FOLLOWED_AT_ONCE):
        if first:
            await asyncio.sleep(0)
        yield names[first : first + FOLLOWED_AT_ONCE]


Seen: TypeAlias = Callable[[Collection[int]], Awaitable[set[int]]]
"""Returns those of some requests that there are for the caller."""


class Following:
    """Serves Follow."""

    def __init__(self, committer: Committer, reader: Reader, hub: WatchHub, store_id: str) -> None:
        """Read results with `reader`, and wait for news from `hub`."""
        self._committer = committer
        self._results = Results(reader)
        self._reader = reader
        self._hub = hub
        self._store_id = store_id
        self._standing = Standing(committer, store_id)
        self._followers: set[_Follower] = set()

    def renew_interests(self) -> None:
        """Tell a rebuilt machine whose tokens are followed."""
        for follower in self._followers:
            follower.renew_interests()

    def end_all(self, reason: str) -> None:
        """End every stream; followers come back to the next queue."""
        for follower in self._followers:
            follower.fail(RefusedError(reason, disk_full=False))

    async def follow(self, requests: AsyncIterator[queue_pb2.FollowRequest], context: Context) -> AsyncIterator[bytes]:
        """Yield frames of events; raises BadInputError if too much is followed."""
        # A request that has not been loaded yet would look as if it were unknown.
        await self._committer.loaded.wait()
        yield b""  # the empty first answer
        with self._hub.watcher(MAX_BEHIND_BYTES) as watcher:
            follower = _Follower(self._committer, self._hub, watcher, self._store_id, self._seen)
            self._followers.add(follower)
            try:
                async with reading(follower.read(requests)):
                    async for frame in self._told(follower):
                        yield frame
            except (StoreError, RefusedError) as error:
                await context.abort(code_of(error), str(error))
            finally:
                self._followers.discard(follower)
                follower.close()

    async def _seen(self, seqs: Collection[int]) -> set[int]:
        """Return those of these requests that there are for the caller.

        One that sees one tenant only is asked before anything is followed: what others' requests say must not be on its
        way to it while that is found out.
        """
        sees = CALLER.get().sees
        if sees is None:
            return set(seqs)
        known = (await self._standing.states(seqs, sees)).keys()
        return known | set(await self._reader.in_order(sorted(set(seqs) - known), sees))

    async def _told(self, follower: _Follower) -> AsyncIterator[bytes]:
        """Yield what the follower is told, one wake-up after the other, until there is nothing left to follow."""
        while not follower.over:
            ended = await follower.news()
            at_hand = {seq: result for seq, result in ended.items() if result is not None}
            follower.end(at_hand)
            for frame in frames(delta_events(follower.watcher) + result_events(at_hand.values())):
                yield frame
            unread = ended.keys() - at_hand.keys()
            async for frame in self._results.ended(dict.fromkeys(unread), follower.end):
                for deltas in frames(delta_events(follower.watcher)):  # others' do not wait for all that is read
                    yield deltas
                yield frame
            unknown = follower.take_unknown() + await follower.end_gone(unread)
            if unknown:
                yield queue_pb2.FollowResponse(unknown=unknown).SerializeToString()


class _Follower:
    """One open Follow stream: what it follows, and what it is to be told."""

    def __init__(self, committer: Committer, hub: WatchHub, watcher: Watcher, store_id: str, seen: Seen) -> None:
        self.watcher = watcher
        self._seen = seen
        self._committer = committer
        self._hub = hub
        self._store_id = store_id
        self._standing = Standing(committer, store_id)
        self._open: dict[int, bool] = {}
        """Requests without a told result, and whether their tokens are wanted."""
        self._unknown: list[str] = []
        self._failure: Exception | None = None
        self._heard_all = False

    # ---- what the stream says ----

    async def read(self, requests: AsyncIterator[queue_pb2.FollowRequest]) -> None:
        """Take what is to be followed and left."""
        try:
            async for message in requests:
                await self._committer.room()
                async for names in in_portions("leave", message.leave):
                    self._leave(names)
                async for items in in_portions("follow", message.follow):
                    await self._begin(items)
        except (BadInputError, StoreError, RefusedError) as error:
            self.fail(error)
        except Exception:
            self.fail(ReaderFailedError())
            raise
        finally:
            self._heard_all = True
            self.watcher.notify()

    async def _begin(self, follow: Iterable[queue_pb2.FollowedRequest]) -> None:
        wanted: dict[int, queue_pb2.FollowedRequest] = {}
        for item in follow:
            check_name("follow.request_id", item.request_id)  # it is kept until it is told that it means nothing
            seq = parse_request_id(self._store_id, item.request_id)
            if seq == NO_SEQ:
                self._unknown.append(item.request_id)
            else:
                wanted[seq] = item
        seen = await self._seen(wanted)
        for seq in wanted.keys() - seen:
            self._unknown.append(wanted.pop(seq).request_id)
        self._leave_seqs(wanted)  # so that what is followed already begins anew
        if len(self._open) + len(wanted) + len(self._unknown) > MAX_FOLLOWED:
            raise too_many("follow")
        for seq, item in wanted.items():
            self._open[seq] = item.tokens
            self._hub.follow(self.watcher, seq, item.tokens)
        self._want_tokens(True, [seq for seq, item in wanted.items() if item.tokens])
        if self._unknown:
            self.watcher.notify()
        await self._end_ended(wanted)

    def _leave(self, names: Iterable[str]) -> None:
        seqs = set()
        for name in names:
            check_name("leave", name)  # to read one of megabytes takes a while
            seqs.add(parse_request_id(self._store_id, name))
        self._leave_seqs(seqs)

    def _leave_seqs(self, seqs: Iterable[int]) -> None:
        tokens = []
        for seq in seqs:
            wanted = self._open.pop(seq, None)
            if wanted is None:
                continue
            self._hub.leave(self.watcher, seq)
            self.watcher.ended.pop(seq, None)  # what does not read never comes to leave it out
            if wanted:
                tokens.append(seq)
                self.watcher.forget(request_id_of(self._store_id, seq))
        self._want_tokens(False, tokens)

    def _want_tokens(self, on: bool, seqs: list[int]) -> None:
        if seqs:
            self._committer.post(WatchTokens(on, self.watcher.number, tuple(sorted(seqs))))

    async def _end_ended(self, seqs: Collection[int]) -> None:
        """Have told what has ended already: the hub tells only what ends from now on."""
        ended = set(seqs) - await self._standing.live(seqs)
        for seq in ended:
            self.watcher.ended.setdefault(seq, None)
        if ended:
            self.watcher.notify()

    # ---- what it is told ----

    async def news(self) -> dict[int, StoredResult | None]:
        """Wait for news; return the followed requests that have ended, of which `end` follows.

        Raises what `fail` was given.
        """
        await self.watcher.wait()
        self.watcher.clear()
        if self._failure is not None:
            raise self._failure
        if self.watcher.started_over:
            self.watcher.started_over = False
            await self._end_ended(list(self._open))
        return {seq: result for seq, result in self.watcher.take_ended().items() if seq in self._open}

    def end(self, seqs: Iterable[int]) -> None:
        """Follow these no longer: they are about to be told of."""
        self._leave_seqs(seqs)

    async def end_gone(self, seqs: Collection[int]) -> list[str]:
        """Return the names of those of these that have ended, but have no result, and follow them no longer."""
        gone = await self._standing.gone(self._open.keys() & seqs, self.watcher)
        self.end(gone)
        return [request_id_of(self._store_id, seq) for seq in sorted(gone)]

    def take_unknown(self) -> list[str]:
        """Return the names that were followed and mean nothing."""
        unknown, self._unknown = self._unknown, []
        return unknown

    @property
    def over(self) -> bool:
        """Whether the follower will name no more requests and has been told of all."""
        return self._heard_all and self._failure is None and not self._open and not self._unknown

    def fail(self, error: Exception) -> None:
        """End the stream with `error`."""
        self._failure = self._failure or error
        self.watcher.notify()

    def renew_interests(self) -> None:
        """Say again whose tokens are wanted."""
        self._want_tokens(True, [seq for seq, tokens in self._open.items() if tokens])

    def close(self) -> None:
        """Follow nothing."""
        self._leave_seqs(list(self._open))
