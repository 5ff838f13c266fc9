"""Follows many requests over one stream of a client, one or several for each reader; very many over several.

A stream is opened with the first request that is followed, and opened again after it broke, with all that have not
ended; it is closed once nothing has been followed for IDLE_S. What one reader does not take is bounded and holds up
nobody else.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from penstock.connection import CLOSED, Connection, Patience, cancelled_by_somebody
from penstock.credentials import acting_for
from penstock.errors import NotFound, Unavailable, anew
from penstock.loaded import grpc
from penstock.queue.v1 import queue_pb2 as pb
from penstock.request.v1 import request_pb2
from penstock.watching import TokenPositions

if TYPE_CHECKING:
    from penstock.queue.v1.queue_pb2_grpc import QueueServiceAsyncStub

IDLE_S = 10.0
"""An idle stream is kept so long: opening one costs as much as a short request, and a client may ask again soon."""

MAX_INBOX_BYTES = 4 * 1024 * 1024
"""Of deltas that one reader has not taken, and of results. A person or a log that reads at any speed is never that far
behind; one that is gets the rest of the tokens with the results, and of many results some at a time."""

DELTA_BYTES = 512
"""What a waiting delta takes besides its text and tokens."""

TAKEN_BYTES = 64 * 1024
"""Of those taken at once, and one more: to tell deltas with log probabilities takes five milliseconds then, in which
nobody else has the event loop."""

MAX_NAMES = 10_000
"""Requests named in one frame: a frame stays well below gRPC's limit."""

MAX_FOLLOWED = 50_000
"""Requests of one stream: half of what a queue takes, which may not have heard yet of those that were left."""


class Told(list[pb.WatchEvent]):
    """What has come for one reader, as much as is taken at once. Nobody changes an event: its readers share it."""

    def __init__(self, events: Iterable[pb.WatchEvent] = (), sizes_bytes: dict[str, int] | None = None) -> None:
        """Have these events, with results of these sizes."""
        super().__init__(events)
        self.sizes_bytes = {} if sizes_bytes is None else sizes_bytes
        """What the results among them take encoded, by request: to find it out takes as long as to encode them."""


class _Untaken(NamedTuple):
    """An event that its reader has not taken."""

    event: pb.WatchEvent
    held_bytes: int
    size_bytes: int
    """As it came."""


class Inbox:
    """What one reader has not taken yet of the requests that it reads."""

    def __init__(self, request_ids: Iterable[str], tokens: bool, large_bytes: int = 0) -> None:
        """Nothing has come yet. Results of `large_bytes` or more are not held until their reader asks for news."""
        self._large_bytes = large_bytes or math.inf
        self._waited_for = False
        """Whether the reader is waiting for what comes."""
        self.open = dict.fromkeys(request_ids)
        """Requests whose result has not come."""
        self.tokens = tokens
        self._events: deque[_Untaken] = deque()
        self._seen = TokenPositions()
        self._delta_bytes = self._result_bytes = 0
        self._cut_off: set[str] = set()
        """Requests of which a delta was left out, and so is all that follows it."""
        self._put_off: deque[tuple[str, int]] = deque()
        """Requests whose result came while its reader was too far behind, and the result's size."""
        self._failure: Exception | None = None
        self._news = asyncio.Event()

    def put(self, event: pb.WatchEvent, size_bytes: int, shared: bool = False) -> None:
        """Take an event, unless its reader is too far behind; one that is `shared` is in no frame any more.

        A delta is left out then, with what would join with a gap after it, and a result is put off if others are to
        come.
        """
        held_bytes = size_bytes
        if event.WhichOneof("event") == "tokens":
            if shared and self._seen.has_part_of(event.tokens):
                event = _own(event)  # as what has been seen is cut off
            if not self._has_come(event.tokens, size_bytes):
                return
        else:
            if size_bytes >= self._large_bytes and not self._takes_next:
                event, shared = _outline(event), True
                held_bytes = event.ByteSize()
            if not self._has_ended(event.result.result.request_id, size_bytes, held_bytes):
                return
        if self._events and not shared:
            # It may wait for long, and as it came off the wire it would hold on to its frame, with everybody's events.
            event = _own(event)
        self._events.append(_Untaken(event, held_bytes, size_bytes))
        self._news.set()

    @property
    def _takes_next(self) -> bool:
        """Whether the reader is about to take all there is, and what comes next."""
        return self._waited_for and self._delta_bytes + self._result_bytes < TAKEN_BYTES

    def _has_come(self, delta: request_pb2.TokenDelta, size_bytes: int) -> bool:
        """Note a delta; return False if it is left out."""
        if not self.tokens or (self._cut_off and delta.request_id in self._cut_off):
            return False
        if self._delta_bytes + size_bytes > MAX_INBOX_BYTES:
            self._cut_off.add(delta.request_id)
            return False
        if not self._seen.advance(delta):
            return False
        self._delta_bytes += size_bytes
        return True

    def _has_ended(self, request_id: str, size_bytes: int, held_bytes: int) -> bool:
        """Note the end of a request, of whose result `held_bytes` are kept; return False if it is put off."""
        if self._result_bytes > MAX_INBOX_BYTES and len(self.open) > 1:
            self._put_off.append((request_id, size_bytes))
            return False
        self._result_bytes += held_bytes
        self.open.pop(request_id, None)
        self._cut_off.discard(request_id)
        self._seen.forget(request_id)
        return True

    @property
    def over(self) -> bool:
        """Whether everything has come and was taken."""
        return not self.open and not self._events

    def take_put_off(self) -> list[str]:
        """Return some of the requests whose results were put off: they are to be followed again.

        They are as many as will be taken when they come, or everybody's stream would carry them for nothing.
        """
        taken: list[str] = []
        room_bytes = MAX_INBOX_BYTES - self._result_bytes
        while self._put_off and (self._put_off[0][1] <= room_bytes or (not taken and room_bytes >= 0)):
            request_id, size_bytes = self._put_off.popleft()
            taken.append(request_id)
            room_bytes -= size_bytes
        return taken

    def fail(self, error: Exception) -> None:
        """Have the reader raise `error` after what has come."""
        self._failure = error
        self._news.set()

    async def take(self) -> Told:
        """Wait for news; return what has come, of much a part. Raises what `fail` was given."""
        if self._events:
            await asyncio.sleep(0)  # others wait for as long as it takes to tell a part
        while not self._events:
            if self._failure is not None:
                raise anew(self._failure)
            self._news.clear()
            self._waited_for = True
            try:
                await self._news.wait()
            finally:
                self._waited_for = False
        return self._part()

    def _part(self) -> Told:
        told = Told()
        taken_bytes = 0
        while self._events and taken_bytes < TAKEN_BYTES:
            event, held_bytes, size_bytes = self._events.popleft()
            told.append(event)
            taken_bytes += held_bytes
            if event.WhichOneof("event") == "tokens":
                self._delta_bytes -= held_bytes
            else:
                self._result_bytes -= held_bytes
                told.sizes_bytes[event.result.result.request_id] = size_bytes
        return told


class _Outgoing:
    """What one stream is still to be told."""

    def __init__(self, followed: Iterable[str]) -> None:
        self.follow = dict.fromkeys(followed)
        self.leave: dict[str, None] = {}
        self.over = False
        self.changed = asyncio.Event()
        self.changed.set()

    def begin(self, name: str) -> None:
        """Have a request followed, from its first token on."""
        self.follow[name] = None
        # To be left in a later frame would end this; in the same one it would be of no use.
        self.leave.pop(name, None)
        self.changed.set()

    def end(self, name: str) -> None:
        """Have a request followed no more."""
        self.follow.pop(name, None)
        self.leave[name] = None
        self.changed.set()

    def finish(self) -> None:
        """Have the writer end: gRPC leaves that of a broken stream waiting for what is to be told next."""
        self.over = True
        self.changed.set()

    def take(self) -> tuple[list[str], list[str]]:
        """Return names to follow and to leave, as many as fit a frame."""
        return _first(self.follow), _first(self.leave)


def _first(names: dict[str, None]) -> list[str]:
    """Take the first of `names` out, as many as fit a frame."""
    first = list(islice(names, MAX_NAMES))
    for name in first:
        del names[name]
    return first


class Follower:
    """All that one client follows."""

    def __init__(self, stub: QueueServiceAsyncStub, connection: Connection) -> None:
        """Nothing is opened yet."""
        self._stub = stub
        self._connection = connection
        self._streams: list[_Stream] = []

    async def events(
        self, request_ids: Sequence[str], tokens: bool, large_bytes: int = 0
    ) -> AsyncGenerator[Told, None]:
        """Yield (with `tokens`) token deltas and at last the result of each request, as many as are there at once.

        A result of `large_bytes` or more, if that is given, which comes while the reader does something else is told in
        outline: how the request ended, and by which model; it is to be read again. Its size is told as it is.
        They must be names: one that cannot be sent would end the stream, which is everybody's. Raises NotFound, or
        Unavailable if the queue stays away or the client is closed.
        """
        self._connection.check_open()
        inbox = Inbox(request_ids, tokens, large_bytes)
        streams: dict[str, _Stream] = {}
        try:
            for name in list(inbox.open):
                streams[name] = self._begin(name, inbox)
            while not inbox.over:
                yield await inbox.take()
                for name in inbox.take_put_off():
                    streams[name] = self._begin(name, inbox)
        finally:
            for name, stream in streams.items():
                stream.end(name, inbox)

    async def close(self) -> None:
        """End the streams; whoever still follows gets Unavailable."""
        await asyncio.gather(*(stream.close() for stream in self._streams))

    def _begin(self, request_id: str, inbox: Inbox) -> _Stream:
        """Have a request followed for a reader; return the stream over which it is."""
        stream = self._with_room()
        stream.begin(request_id, inbox)
        return stream

    def _with_room(self) -> _Stream:
        for stream in self._streams:
            if stream.has_room:
                return stream
        self._streams.append(_Stream(self._stub, self._connection))
        return self._streams[-1]


class _Stream:
    """What is followed over one stream."""

    def __init__(self, stub: QueueServiceAsyncStub, connection: Connection) -> None:
        self._stub = stub
        self._connection = connection
        self._inboxes: dict[str, list[Inbox]] = {}
        self._outgoing: _Outgoing | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def has_room(self) -> bool:
        """Whether one request more may be followed."""
        return len(self._inboxes) < MAX_FOLLOWED

    async def close(self) -> None:
        """End the stream; whoever still follows gets Unavailable."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._end_all(Unavailable(CLOSED))  # a task that is cancelled before its first step runs nothing

    # ---- what is followed ----

    def begin(self, request_id: str, inbox: Inbox) -> None:
        """Have an inbox filled with a request's events, over a stream that is opened if there is none."""
        self._inboxes.setdefault(request_id, []).append(inbox)
        if self._outgoing is not None:
            # Also if it is followed already: the new reader needs the tokens from the first on.
            self._outgoing.begin(request_id)
        if self._task is None or self._task.done():
            # The stream is everybody's who reads here, so it is opened with the process's own key.
            with acting_for():
                self._task = asyncio.create_task(self._run(), name="follow")

    def end(self, request_id: str, inbox: Inbox) -> None:
        """Fill an inbox with a request's events no more."""
        others = self._inboxes.get(request_id, [])
        if inbox not in others:
            return  # its result has come
        others.remove(inbox)
        if others:
            return
        del self._inboxes[request_id]
        if self._outgoing is not None:
            self._outgoing.end(request_id)

    async def _frames(self, outgoing: _Outgoing) -> AsyncIterator[pb.FollowRequest]:
        """Yield what is to be followed and left; end once nothing has been followed for IDLE_S."""
        while True:
            try:
                async with asyncio.timeout(None if self._inboxes else IDLE_S):
                    await outgoing.changed.wait()
            except TimeoutError:
                return
            if outgoing.over:
                return
            outgoing.changed.clear()
            while outgoing.follow or outgoing.leave:
                names, leave = outgoing.take()
                follow = [pb.FollowedRequest(request_id=name, tokens=self._wants_tokens(name)) for name in names]
                yield pb.FollowRequest(follow=follow, leave=leave)

    def _wants_tokens(self, request_id: str) -> bool:
        return any(inbox.tokens for inbox in self._inboxes.get(request_id, ()))

    # ---- what comes ----

    async def _run(self) -> None:
        """Keep a stream open while anything is followed, and IDLE_S longer."""
        failure: Exception = Unavailable(CLOSED)
        patience = self._connection.patience()
        try:
            while self._inboxes:
                try:
                    with self._connection.until_closed():
                        await self._one_stream(patience)
                except grpc.aio.AioRpcError as error:
                    await self._connection.wait_or_raise(patience, error)
                except asyncio.CancelledError:
                    if cancelled_by_somebody():
                        raise
                    # gRPC cancels a call whose next frame it cannot send.
                    await patience.wait_or_raise(Unavailable(f"{self._connection.address}: the stream broke off"))
        except Exception as error:  # whatever it is, the readers have to know
            failure = error
        finally:
            self._end_all(failure)

    def _end_all(self, failure: Exception) -> None:
        """Have everybody who still follows raise `failure`."""
        self._outgoing = None
        for inboxes in self._inboxes.values():
            for inbox in inboxes:
                inbox.fail(failure)
        self._inboxes.clear()

    async def _one_stream(self, patience: Patience) -> None:
        """Hand out what comes, until the queue ends the stream."""
        self._outgoing = outgoing = _Outgoing(self._inboxes)
        call = self._stub.Follow(self._frames(outgoing))
        try:
            async for response in call:
                patience.succeeded()
                for event in response.events:
                    self._hand_out(event)
                for request_id in response.unknown:
                    for inbox in self._inboxes.pop(request_id, ()):
                        inbox.fail(NotFound(f"request_ids: {request_id!r} is unknown"))
                if not self._inboxes:
                    outgoing.changed.set()  # the time until it counts as idle begins
        finally:
            outgoing.finish()
            call.cancel()

    def _hand_out(self, event: pb.WatchEvent) -> None:
        """Give an event to all who read it: the same to each, as a large one takes long to copy."""
        size_bytes = event.ByteSize()
        if event.WhichOneof("event") == "result":
            inboxes = self._inboxes.pop(event.result.result.request_id, [])
        else:
            inboxes = self._inboxes.get(event.tokens.request_id, [])
            size_bytes += DELTA_BYTES
        if shared := len(inboxes) > 1:
            event = _own(event)
        for inbox in inboxes:
            inbox.put(event, size_bytes, shared)


def _own(event: pb.WatchEvent) -> pb.WatchEvent:
    """Return an event that shares nothing with `event`."""
    own = pb.WatchEvent()
    own.CopyFrom(event)
    return own


def _outline(event: pb.WatchEvent) -> pb.WatchEvent:
    """Return a result's event without what may be large in it."""
    result, outline = event.result.result, pb.WatchEvent()
    outline.result.cursor = event.result.cursor
    short = outline.result.result
    short.request_id, short.outcome, short.model = result.request_id, result.outcome, result.model
    if result.HasField("error"):
        short.error.CopyFrom(result.error)
    return outline
