"""The gRPC face of the queue: each method checks its input, posts to the committer and waits for what is durable."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import grpc

from penstock.errors import DISK_FULL
from penstock.limits import MAX_REQUEST_BYTES
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2
from services.auth.caller import CALLER, OPEN_ROLE
from services.queue import deeds, wire
from services.queue.admin import MAX_IDS, MAX_KEYS, Admin
from services.queue.backup_call import BackupCall
from services.queue.committer import Committer
from services.queue.core.messages import (
    BacklogClosed,
    BacklogOpened,
    WorkerClosed,
)
from services.queue.metrics import QueueMetrics
from services.queue.speaker import Greeting, Link, Speaker
from services.queue.storage.read_faults import code_of
from services.queue.storage.store import StoreError
from services.queue.submits.intake import Frame, Intake, Taking
from services.queue.submits.torn import Piece, Torn
from services.queue.submits.turns import BYTES_LIKE_ONE_MORE, SUBMITS_AT_ONCE, weight_of
from services.queue.submits.validate import check_name
from services.queue.submits.windows import Window
from services.queue.watch.following import MAX_FOLLOWED, Following
from services.queue.watch.hub import WatchHub
from services.queue.watch.watching import Watching
from services.rpc.reading import reading
from services.rpc.strict import BadInputError, abort_with_code
from services.rpc.waiters import FIRST_COME, Rank, SharedWindow

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

P = TypeVar("P", bound=Piece)

MAX_UNACKED = 20_000
"""Requests of one Submit stream whose acks are not sent; a client that sends faster than it takes in its acks is read
no further."""

MAX_UNACKED_BYTES = 256 * 1024 * 1024
"""Requests of all streams and calls together that may await their sync: large prompts are held in memory until then.
Each counts BYTES_LIKE_ONE_MORE more than it has: to check many small ones takes time too, in which nobody else is
served, and they wait in memory as well. An ack is small and holds none, so that who does not read its acks keeps nobody
else waiting."""

CHECKED_AT_ONCE = 64
"""Small requests that are checked before the loop looks for what else has come: half a millisecond. gRPC hands over a
call each time it does, so that a call behind thousands of large ones is seen after as many short whiles."""

GOES_ON: Rank = (-1,)
"""Of what goes on with something that had its turn: it comes before what else waits of its tenant."""

MAX_UNARY_REQUESTS = 1000
"""As the API says; larger sets belong on a stream."""

BOUNDS = {
    "SubmitUnaryRequest.requests": MAX_UNARY_REQUESTS,
    "SubmitBatch.requests": MAX_UNACKED,
    "RequestIds.ids": MAX_IDS,
    "GetManyRequest.keys": MAX_KEYS,
    "FollowRequest.follow": MAX_FOLLOWED,
    "FollowRequest.leave": MAX_FOLLOWED,
}
"""Entries of one message, by field: a large message with more is refused before it is decoded."""

TORN = {"SubmitRequest": Torn}
"""What is made of a message that cannot be decoded, by its type: the requests of the frame that can be are taken."""

BEYOND_QUOTA = {
    queue_pb2.SUBMIT_STATUS_OVER_QUOTA: grpc.StatusCode.RESOURCE_EXHAUSTED,
    # No waiting would let it in; what else is wrong with a call of all or none is raised where it is taken.
    queue_pb2.SUBMIT_STATUS_INVALID: grpc.StatusCode.INVALID_ARGUMENT,
}
"""Status of a call whose requests a quota does not let in."""


@dataclass
class Parts:
    """What the servicer works with."""

    committer: Committer
    speaker: Speaker
    hub: WatchHub
    intake: Intake
    admin: Admin
    watching: Watching
    following: Following
    metrics: QueueMetrics
    greeting: Greeting
    backup: BackupCall


class QueueServicer:
    """Implements `penstock.queue.v1.QueueService`."""

    def __init__(self, parts: Parts) -> None:
        """Serve with `parts`."""
        self._parts = parts
        self._streams = itertools.count(1)
        self._bytes = SharedWindow(MAX_UNACKED_BYTES)
        self._checks = SharedWindow(CHECKED_AT_ONCE)
        self._submits: set[asyncio.Queue[Frame | None]] = set()
        """Frames of the open Submit streams that are not acked yet; None after the last."""
        self._stopping = ""

    # ---- Submit ----

    async def Submit(
        self, requests: AsyncIterator[queue_pb2.SubmitRequest | Torn], context: Context
    ) -> AsyncIterator[queue_pb2.SubmitResponse]:
        """Accept batches of requests, and ack them in order once they are durable. Raises BadInputError."""
        first = await anext(requests, None)
        if first is None:
            return
        if isinstance(first, Torn) or first.WhichOneof("message") != "open":
            raise BadInputError("message: the first message of a Submit stream must be `open`")
        check_name("open.client_id", first.open.client_id)  # it is kept while the stream is open
        yield queue_pb2.SubmitResponse(
            open=queue_pb2.SubmitOpen(
                client_id=first.open.client_id,
                max_request_bytes=MAX_REQUEST_BYTES,
                store_id=self._parts.greeting.store_id,
            )
        )
        frames: asyncio.Queue[Frame | None] = asyncio.Queue()
        window = Window(MAX_UNACKED)
        self._submits.add(frames)
        if self._stopping:
            frames.put_nowait(None)
        try:
            async with reading(self._read_submits(requests, frames, window)) as reader:
                while (frame := await frames.get()) is not None:
                    acks = await frame.acks()
                    yield queue_pb2.SubmitResponse(acks=queue_pb2.SubmitAcks(acks=acks))
                    window.leave(_places(len(acks)))
                if self._stopping:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, self._stopping)
                await reader
        finally:
            self._submits.discard(frames)

    def end_submits(self, reason: str) -> None:
        """End every Submit stream once what it has read is acked; a client keeps one open also when it is idle."""
        self._stopping = reason
        for frames in self._submits:
            frames.put_nowait(None)

    async def _read_submits(
        self,
        requests: AsyncIterator[queue_pb2.SubmitRequest | Torn],
        frames: asyncio.Queue[Frame | None],
        window: Window,
    ) -> None:
        stream = next(self._streams)
        try:
            async for message in requests:
                if not isinstance(message, Torn) and message.WhichOneof("message") != "batch":
                    raise BadInputError("message: every message after the first must be `batch`")
                await self._parts.committer.room(submits=True)
                for number, (take, requested, size_bytes) in enumerate(self._takes(stream, message)):
                    await window.enter(_places(requested))
                    frames.put_nowait(await self._taken(take, requested, size_bytes, goes_on=number > 0))
        finally:
            frames.put_nowait(None)

    def _takes(
        self, stream: int, message: queue_pb2.SubmitRequest | Torn
    ) -> Iterator[tuple[Callable[[], Frame], int, int]]:
        """Yield for each part of a frame what takes it in, how many requests and how many bytes it has."""
        intake = self._parts.intake
        if isinstance(message, Torn):
            for pieces, size_bytes in _parts(message.pieces()):
                yield partial(intake.take_torn, stream, pieces), len(pieces), size_bytes
            return
        for part, size_bytes in _parts(message.batch.requests):
            tagged = [(item.tag, item.request) for item in part]
            yield partial(intake.take, stream, tagged), len(tagged), size_bytes

    async def SubmitUnary(
        self, request: queue_pb2.SubmitUnaryRequest, context: Context
    ) -> queue_pb2.SubmitUnaryResponse:
        """Accept all requests of one call, or none. Raises BadInputError for no request or too many."""
        if len(request.requests) > MAX_UNARY_REQUESTS:
            raise BadInputError(f"requests: {len(request.requests)} given; at most {MAX_UNARY_REQUESTS} are allowed")
        if not request.requests:
            raise BadInputError("requests: at least one is needed")
        frame = await self._taken_whole(next(self._streams), request)
        acks = await frame.acks()
        if acks[0].status == queue_pb2.SUBMIT_STATUS_UNAVAILABLE:
            full = acks[0].error.code == DISK_FULL
            code = grpc.StatusCode.RESOURCE_EXHAUSTED if full else grpc.StatusCode.UNAVAILABLE
            # By its code a client knows that the queue is there, and says so.
            await abort_with_code(context, code, acks[0].error.message, acks[0].error.code)
        beyond = BEYOND_QUOTA.get(acks[0].status)
        if beyond is not None:
            # Told apart from a full disk, which is nobody's in particular, and from what is wrong, by its code.
            error = acks[0].error
            await abort_with_code(context, beyond, error.message, error.code)
        return queue_pb2.SubmitUnaryResponse(acks=acks)

    async def _taken(self, take: Callable[[], Frame], requests: int, size_bytes: int, goes_on: bool) -> Frame:
        """Take in a part of a frame, of `size_bytes`, once there is room; the next of its frame if it `goes_on`."""
        async with self._room(requests, size_bytes) as leave:
            await self._turn(weight_of(requests, size_bytes), goes_on)
            frame = take()
            frame.on_durable(leave)
        return frame

    async def _taken_whole(self, call: int, request: queue_pb2.SubmitUnaryRequest) -> Frame:
        """Take in all requests of a call; raises BadInputError or NotAllowedError about the first bad one."""
        taking = Taking(all_or_none=True)
        size_bytes = request.ByteSize()
        async with self._room(len(request.requests), size_bytes) as leave:
            weight = weight_of(len(request.requests), size_bytes)
            step = max(1, CHECKED_AT_ONCE * len(request.requests) // weight)
            for first in range(0, len(request.requests), step):
                await self._turn(min(weight, CHECKED_AT_ONCE), goes_on=first > 0)
                self._parts.intake.check(taking, list(enumerate(request.requests[first : first + step], first)))
            frame = self._parts.intake.post(call, taking)
            frame.on_durable(leave)
        return frame

    @asynccontextmanager
    async def _room(self, requests: int, size_bytes: int) -> AsyncIterator[Callable[[], None]]:
        """Wait for room beside all that awaits its sync; what is yielded gives it back, as does a failure inside."""
        counted = size_bytes + requests * BYTES_LIKE_ONE_MORE
        await self._bytes.enter(CALLER.get().tenant, counted)
        leave = partial(self._bytes.leave, counted)
        try:
            yield leave
        except BaseException:
            leave()
            raise

    async def _turn(self, weight: int, goes_on: bool = False) -> None:
        """Wait until it is the caller's turn to have so many small requests checked."""
        await self._checks.enter(CALLER.get().tenant, weight, GOES_ON if goes_on else FIRST_COME)
        asyncio.get_running_loop().call_soon(self._checks.leave, weight)

    # ---- reads and administration ----

    async def Identify(self, _request: queue_pb2.IdentifyRequest, _context: Context) -> queue_pb2.IdentifyResponse:
        """Tell the caller who it is taken for."""
        caller = CALLER.get()
        return queue_pb2.IdentifyResponse(
            key_id=caller.key_id,
            role=caller.role or OPEN_ROLE,
            tenant=caller.tenant,
            all_channels=caller.channels is None,
            channels=sorted(caller.channels or ()),
        )

    def Watch(self, request: queue_pb2.WatchRequest, context: Context) -> AsyncIterator[bytes]:
        """Stream results after the cursor, and token deltas if asked for."""
        return self._parts.watching.watch(request, context)

    def Follow(self, requests: AsyncIterator[queue_pb2.FollowRequest], context: Context) -> AsyncIterator[bytes]:
        """Stream results and token deltas of the requests that the follower names."""
        return self._parts.following.follow(requests, context)

    async def Get(self, request: queue_pb2.GetRequest, context: Context) -> queue_pb2.GetResponse:
        """Return the state of one request."""
        async with _readable(context):
            return await self._parts.admin.get(request, context)

    async def GetMany(self, request: queue_pb2.GetManyRequest, context: Context) -> bytes:
        """Return the state of many requests, encoded."""
        async with _readable(context):
            return await self._parts.admin.get_many(request, context)

    async def Cancel(self, request: queue_pb2.CancelRequest, context: Context) -> queue_pb2.CancelResponse:
        """Cancel requests."""
        await self._turn(1)  # what its tenant submitted before it, and waits to be checked, is stored first
        with deeds.until_cut_short(request):
            response = await self._parts.admin.cancel(request, context)
        deeds.cancelled(request, response)
        return response

    async def Delete(self, request: queue_pb2.DeleteRequest, context: Context) -> queue_pb2.DeleteResponse:
        """Delete results."""
        async with _readable(context):
            with deeds.until_cut_short(request):
                response = await self._parts.admin.delete(request, context)
        deeds.deleted(request, response)
        return response

    async def Stats(self, _request: queue_pb2.StatsRequest, context: Context) -> queue_pb2.StatsResponse:
        """Return counts."""
        return await self._parts.admin.stats(context)

    async def ListDead(self, request: queue_pb2.ListDeadRequest, context: Context) -> queue_pb2.ListDeadResponse:
        """Return a page of dead letters."""
        async with _readable(context):
            return await self._parts.admin.list_dead(request)

    async def RequeueDead(
        self, request: queue_pb2.RequeueDeadRequest, context: Context
    ) -> queue_pb2.RequeueDeadResponse:
        """Put dead letters back in line."""
        with deeds.until_cut_short(request):
            response = await self._parts.admin.requeue_dead(request, context)
        deeds.requeued(request, response)
        return response

    async def Backup(self, request: queue_pb2.BackupRequest, context: Context) -> queue_pb2.BackupResponse:
        """Write a consistent copy of the store beside it."""
        response = await self._parts.backup.make(request, context)
        deeds.backed_up(response)
        return response

    # ---- Backlog and Work ----

    async def Backlog(
        self, requests: AsyncIterator[queue_pb2.BacklogRequest], context: Context
    ) -> AsyncIterator[bytes]:
        """Announce waiting requests to the scheduler."""
        stream = next(self._streams)

        def handle(message: queue_pb2.SchedulerToQueue, first: bool) -> None:
            if not first:
                known = self._parts.committer.machine.book.lines
                self._parts.committer.post(wire.scheduler_message(stream, message, known))
            elif message.WhichOneof("message") == "open":
                self._parts.committer.post(BacklogOpened(stream, message.open.instance_id, message.open.workers))
            else:
                raise BadInputError("messages: the first message of a Backlog stream must be `open`")

        async with self._link(stream, requests, handle, context) as link:
            async for frame in link.outbox.frames():
                yield frame
            await _end(link, context)

    async def Work(self, requests: AsyncIterator[queue_pb2.WorkRequest], context: Context) -> AsyncIterator[bytes]:
        """Deliver claimed requests to a worker and take its completions."""
        stream = next(self._streams)

        def handle(message: queue_pb2.WorkerToQueue, first: bool) -> None:
            kind = message.WhichOneof("message")
            if first:
                if kind != "open":
                    raise BadInputError("messages: the first message of a Work stream must be `open`")
                self._parts.committer.post(wire.worker_opened(stream, message.open))
            elif kind == "tokens":
                self._publish(message.tokens)
            else:
                self._parts.committer.post(wire.worker_message(stream, message))

        async with self._link(stream, requests, handle, context, WorkerClosed(stream)) as link:
            async for frame in link.outbox.frames():
                yield frame
            await _end(link, context)

    def _publish(self, delta: request_pb2.TokenDelta) -> None:
        entry = self._parts.committer.machine.runs(delta.request_id, delta.attempt)
        if entry is not None and self._parts.hub.publish(entry.seq, entry.meta.batch_key, delta):
            self._parts.metrics.deltas.inc()
        else:
            self._parts.metrics.dropped_deltas.inc()

    @asynccontextmanager
    async def _link(
        self,
        stream: int,
        requests: AsyncIterator[Any],
        handle: Callable[[Any, bool], None],
        context: Context,
        closed: WorkerClosed | BacklogClosed | None = None,
    ) -> AsyncIterator[Link]:
        """Read a stream of framed messages into `handle` while the caller writes what its link gets."""
        committer = self._parts.committer
        if committer.health.broken:
            await context.abort(grpc.StatusCode.UNAVAILABLE, committer.health.broken)
        link = self._parts.speaker.links[stream] = Link()

        async def read() -> None:
            first = True
            try:
                async for frame in requests:
                    await committer.room()
                    await link.outbox.room()
                    for message in frame.messages:
                        handle(message, first)
                        first = False
            except BadInputError as error:
                link.end(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            finally:
                link.outbox.close()

        try:
            async with reading(read()):
                yield link
        finally:
            del self._parts.speaker.links[stream]
            committer.post(closed or BacklogClosed(stream))


def _places(requests: int) -> int:
    """Return what a part of a frame takes of its stream's window: also one without requests is kept until its ack."""
    return max(1, requests)


def _parts(items: Iterable[P]) -> Iterator[tuple[list[P], int]]:
    """Cut a frame into what a commit should take in at once, with the size of each part in bytes; at least one part."""
    part: list[P] = []
    size_bytes = cut = 0
    for item in items:
        part.append(item)
        size_bytes += item.ByteSize()
        if weight_of(len(part), size_bytes) >= SUBMITS_AT_ONCE:
            yield part, size_bytes
            part, size_bytes = [], 0
            cut += 1
    if part or not cut:
        yield part, size_bytes


@asynccontextmanager
async def _readable(context: Context) -> AsyncIterator[None]:
    """End the call with the code of a read that failed."""
    try:
        yield
    except StoreError as error:
        await context.abort(code_of(error), f"the store cannot be read: {error}")


async def _end(link: Link, context: Context) -> None:
    if link.code is not None:
        await context.abort(link.code, link.reason)
