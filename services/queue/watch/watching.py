"""Watch streams: pages of durable results after a cursor, progress, and token deltas in between."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import grpc

from penstock.queue.v1 import queue_pb2
from services.auth.caller import CALLER
from services.queue.admin import ids_of
from services.queue.committer import Committer, RefusedError
from services.queue.core.entry import NO_SEQ, BatchKey, parse_request_id, request_id_of
from services.queue.core.lifecycle import State
from services.queue.core.messages import NO_BATCH, WatchTokens
from services.queue.storage.read_faults import code_of
from services.queue.storage.reader import Reader
from services.queue.storage.store import StoreError
from services.queue.submits.validate import check_name
from services.queue.watch.batch_log import BatchLog
from services.queue.watch.frames import Results, delta_events, events_in_turn, frames
from services.queue.watch.hub import Watcher, WatchHub
from services.queue.watch.pace import Pace
from services.queue.watch.standing import Standing
from services.queue.wire import StoredResult
from services.rpc.strict import BadInputError

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class _Found(NamedTuple):
    """What the first look at named requests finds."""

    ended: set[int]
    in_order: list[int]
    """Those of them that have a result, in order of completion."""


class Watching:
    """Serves Watch."""

    def __init__(self, committer: Committer, reader: Reader, hub: WatchHub, store_id: str) -> None:
        """Read results with `reader`, and wait for news from `hub`."""
        self._committer = committer
        self._reader = reader
        self._results = Results(reader)
        self._hub = hub
        self._store_id = store_id
        self._standing = Standing(committer, store_id)
        self._pace = Pace()
        self._interests: dict[int, WatchTokens] = {}
        self._waiting: set[Watcher] = set()
        self._stopping = ""

    def renew_interests(self) -> None:
        """Tell a rebuilt machine whose tokens are watched."""
        for interest in self._interests.values():
            self._committer.post(interest)

    def end_all(self, reason: str) -> None:
        """End every stream that has told what there is; watchers come back to the next queue."""
        self._stopping = reason
        for watcher in self._waiting:
            watcher.notify()

    async def _news_for(self, watcher: Watcher) -> None:
        """Wait until there is news for the watcher; raises RefusedError if the queue stops."""
        self._waiting.add(watcher)
        try:
            if not self._stopping:
                await watcher.wait()
        finally:
            self._waiting.discard(watcher)
        if self._stopping:
            raise RefusedError(self._stopping, disk_full=False)

    async def watch(self, request: queue_pb2.WatchRequest, context: Context) -> AsyncIterator[bytes]:
        """Yield frames of events; raises BadInputError if the request is wrong."""
        subject = request.WhichOneof("subject")
        if subject is None:
            # Not the batch without a name, which is watched by who says so: a field that its client misspelt.
            raise BadInputError("subject: exactly one of request_ids and batch must be set")
        # A batch of which nothing has been loaded yet would look as if it had ended.
        await self._committer.loaded.wait()
        try:
            if subject == "request_ids":
                ids = ids_of(request.request_ids)
                async for frame in self._watch_requests(ids, request.tokens, context):
                    yield frame
            else:
                check_name("batch", request.batch)
                async for frame in self._watch_batch(request):
                    yield frame
        except (StoreError, RefusedError) as error:
            await context.abort(code_of(error), str(error))

    async def _watch_batch(self, request: queue_pb2.WatchRequest) -> AsyncIterator[bytes]:
        batch = (CALLER.get().tenant, request.batch)
        told: tuple[int, int] | None = None
        with self._hub.batch(batch, request.tokens) as watcher, self._interest(request.tokens, watcher, None, batch):
            log = BatchLog(self._reader, watcher, batch, request.cursor)
            while True:
                watcher.clear()
                # Read before the log: what ends after this is seen by another round.
                progress = self._hub.progress(batch)
                results = await log.read()
                events = chain(delta_events(watcher), events_in_turn(results))
                if told is None or ((results or request.until_now) and told != progress):
                    events = chain(events, [_progress_event(progress)])
                    told = progress
                for frame in frames(events):
                    yield frame
                if not log.at_end:
                    continue
                if request.until_now or not (request.follow or any(progress)):
                    return
                await self._news_for(watcher)
                await self._pace.place()

    async def _watch_requests(self, ids: Sequence[str], tokens: bool, context: Context) -> AsyncIterator[bytes]:
        left = {parse_request_id(self._store_id, request_id) for request_id in ids}
        """Requests without a told result."""
        if NO_SEQ in left:
            await self._unknown(ids, context)
        with self._hub.requests(left, tokens) as watcher, self._interest(tokens, watcher, tuple(sorted(left))):
            found = await self._first_look(left, context)
            ended: Set[int] = found.ended
            telling = self._results.stored(found.in_order, left.difference_update)
            silent = True
            while True:
                async for frame in telling:
                    yield frame
                if gone := await self._standing.gone(left & ended, watcher):
                    await self._unknown(self._names(gone), context)
                if not left:
                    return
                if silent:
                    # Nothing else may be said for hours, and a watcher that has come back is to know that the queue is
                    # too.
                    silent = False
                    yield b""
                await self._news_for(watcher)
                watcher.clear()
                for frame in frames(delta_events(watcher)):
                    yield frame
                news = await self._news(watcher, left)
                ended = news.keys()
                telling = self._results.ended(news, left.difference_update)

    async def _first_look(self, seqs: Set[int], context: Context) -> _Found:
        """Return which of the requests have ended; ends the call if the caller has none of that name."""
        sees = CALLER.get().sees
        states = await self._standing.states(seqs, sees)
        ended = {seq for seq in seqs if states.get(seq, State.DEAD) is State.DEAD}
        in_order = await self._reader.in_order(sorted(ended), sees)
        # Of what was a dead letter a result that is not there tells nothing: it may have been requeued meanwhile.
        if unknown := ended - states.keys() - set(in_order):
            await self._unknown(self._names(unknown), context)
        return _Found(ended, in_order)

    async def _news(self, watcher: Watcher, left: Set[int]) -> dict[int, StoredResult | None]:
        """Return those of `left` that have ended since the last look, with their results or None."""
        news = {seq: result for seq, result in watcher.take_ended().items() if seq in left}
        if watcher.started_over:
            watcher.started_over = False
            news |= dict.fromkeys(left - await self._standing.live(left) - news.keys())
        return news

    def _names(self, seqs: Iterable[int]) -> list[str]:
        return [request_id_of(self._store_id, seq) for seq in sorted(seqs)]

    async def _unknown(self, ids: Sequence[str], context: Context) -> None:
        known = (name for name in ids if parse_request_id(self._store_id, name) == NO_SEQ)
        name = next(known, ids[0])
        await context.abort(grpc.StatusCode.NOT_FOUND, f"request_ids: {name!r} is unknown")

    @contextmanager
    def _interest(
        self, tokens: bool, watcher: Watcher, seqs: tuple[int, ...] | None, batch: BatchKey = NO_BATCH
    ) -> Iterator[None]:
        """Have workers send tokens, if they are wanted, while the stream is open."""
        if not tokens:
            yield
            return
        interest = self._interests[watcher.number] = WatchTokens(True, watcher.number, seqs, batch)
        self._committer.post(interest)
        try:
            yield
        finally:
            del self._interests[watcher.number]
            self._committer.post(interest._replace(on=False))


def _progress_event(progress: tuple[int, int]) -> bytes:
    waiting, running = progress
    event = queue_pb2.WatchEvent(progress=queue_pb2.WatchProgress(waiting=waiting, running=running))
    return event.SerializeToString()
