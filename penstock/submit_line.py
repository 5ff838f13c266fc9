"""Submits single requests over one standing stream: what several callers submit at once shares a frame and a sync.

A unary call costs client and queue about three times what a message costs on a stream that is open already. The stream
is opened with the first submit and closed once nothing has been sent for IDLE_S. It is only the faster way: what
it does not answer, because it broke or because the queue takes nothing now, is asked again with a unary call, which
says what is the matter; idempotency keys make that harmless, so every request must have one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, TypeAlias

from penstock.connection import CLOSED, Connection
from penstock.credentials import Identity
from penstock.errors import (
    CHANNEL_DENIED,
    LARGER_THAN_QUOTA,
    InvalidRequest,
    PenstockError,
    Unavailable,
    anew,
    as_given,
    is_refusal,
    refusal_of,
)
from penstock.limits import MAX_FRAME_MESSAGES, TARGET_FRAME_BYTES
from penstock.loaded import grpc
from penstock.queue.v1 import queue_pb2 as pb
from penstock.request.v1 import request_pb2

if TYPE_CHECKING:
    from penstock.queue.v1.queue_pb2_grpc import QueueServiceAsyncStub

IDLE_S = 10.0
"""An idle stream is kept so long: opening one costs as much as a unary call, and a client may submit again soon."""

MAX_LINES = 256
"""Streams of one client, each for another caller: a quarter of the calls that the queue lets one connection have. Who
comes beyond that makes unary calls."""

DENIALS = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})
"""What a queue answers to a stream that this caller may not open, as it would to the unary call."""

NO_ROOM = "disk_full"
"""Code of what the queue refuses before it writes anything. After a write that failed nobody knows what is stored."""

UNSENT = pb.SubmitAck(status=pb.SUBMIT_STATUS_UNAVAILABLE, error=request_pb2.RequestError(code=NO_ROOM))
"""In place of the ack of a request that did not get onto a stream."""

Answer: TypeAlias = pb.SubmitAck | Exception | None
"""What became of a request: its ack, what its caller has to raise, or None if the stream ended without a word of it."""


class SubmitLines:
    """The standing streams of one client: one for each identity it submits under.

    The queue authenticates a stream once, when it is opened, so a stream serves only what carries the very metadata
    that it was opened with. It does not outlive its key: the queue looks at the keys of open calls as often as at its
    keys file, and ends a stream whose key, or whose channels, are no longer the same. What has no ack then is asked by
    a unary call under the rights of the moment. So this holds also for keys that a gateway passes on.
    """

    def __init__(self, stub: QueueServiceAsyncStub, connection: Connection, client_id: str) -> None:
        """Nothing is opened yet."""
        self._stub = stub
        self._connection = connection
        self._client_id = client_id
        self._lines: dict[Identity, _Line] = {}
        self._tasks: dict[asyncio.Task[None], _Line] = {}
        """All streams, also those that are ending while another one serves their identity."""

    async def submit(self, request: request_pb2.Request) -> str:
        """Return the request's id once it is durable. Raises the client's errors, `is_undone` if nothing is stored."""
        doubt = _Doubt()
        try:
            ack = await self._connection.call(lambda: self._ask(request, doubt))
        except PenstockError as error:
            error.is_undone = not doubt.any
            raise
        if ack.status in {pb.SUBMIT_STATUS_ACCEPTED, pb.SUBMIT_STATUS_DUPLICATE}:
            return ack.request_id
        raise _refusal(ack)

    async def close(self) -> None:
        """End the streams; whoever still waits gets Unavailable."""
        closing = list(self._tasks)
        for task in closing:
            self._tasks[task].close()
            task.cancel()
        await asyncio.gather(*closing, return_exceptions=True)

    async def _ask(self, request: request_pb2.Request, doubt: _Doubt) -> pb.SubmitAck:
        """Return the queue's answer, over a stream if it has one there."""
        before, doubt.any = doubt.any, True  # until this attempt has ended
        line = self._line(request)
        ack = UNSENT if line is None else await line.ask(request)
        if ack is not None and ack.status != pb.SUBMIT_STATUS_UNAVAILABLE:
            return ack
        before = before or ack is None or ack.error.code != NO_ROOM
        try:
            return (await self._stub.SubmitUnary(pb.SubmitUnaryRequest(requests=[request]))).acks[0]
        except grpc.aio.AioRpcError as error:
            doubt.any = before or not is_refusal(error)
            raise

    def _line(self, request: request_pb2.Request) -> _Line | None:
        """Return the stream that `request` goes over, opened if need be; None if it is to be a unary call."""
        if request.ByteSize() > TARGET_FRAME_BYTES:
            # It would hold up the others, and gRPC's limit on a message has to concern it alone.
            return None
        identity = self._connection.identity()
        line = self._lines.get(identity)
        if line is not None and not line.over:
            return line
        if len(self._tasks) >= MAX_LINES:
            return None
        line = self._lines[identity] = _Line(self._stub, self._client_id)
        # The task makes its call in a copy of this context, under the identity that this one has now.
        task = asyncio.create_task(line.run(), name="submit line")
        self._tasks[task] = line
        task.add_done_callback(lambda done: self._forget(identity, line, done))
        return line

    def _forget(self, identity: Identity, line: _Line, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        line.finish()  # a task that is cancelled before its first step runs nothing
        if self._lines.get(identity) is line:
            del self._lines[identity]


class _Doubt:
    """Whether any attempt of a submit may have stored its request without its caller having heard."""

    any = False


class _Line:
    """One stream, from its opening to its end.

    What is under way is bounded by its callers, who hold each request anyway: gRPC takes the next frame once the one
    before is on its way, and the queue reads no more than it may leave unsynced.
    """

    def __init__(self, stub: QueueServiceAsyncStub, client_id: str) -> None:
        self._stub = stub
        self._client_id = client_id
        self._tags = itertools.count()
        self._unsent: dict[int, request_pb2.Request] = {}
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._wake = asyncio.Event()
        self._answered = False
        self._rest: Answer = None
        """What those hear who have no ack when the stream ends."""
        self.over = False
        """Whether nothing more goes over it."""

    async def ask(self, request: request_pb2.Request) -> pb.SubmitAck | None:
        """Return the ack of `request`, None if the stream ends before it, UNSENT if it had not even got onto it.

        Raises what opening the stream was refused with.
        """
        tag = next(self._tags)
        waiting: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[tag] = waiting
        self._unsent[tag] = request
        self._wake.set()
        try:
            answer = await waiting
        finally:
            # Also if the caller was cancelled: what it has not sent yet stays unsent, and its ack is nobody's.
            self._waiting.pop(tag, None)
            unsent = self._unsent.pop(tag, None)
        if isinstance(answer, Exception):
            raise anew(answer)
        return UNSENT if answer is None and unsent is not None else answer

    async def run(self) -> None:
        """Hand out the acks until the stream ends, and tell those who have none."""
        call = None
        try:
            call = self._stub.Submit(self._frames())
            async for response in call:
                self._answered = True
                for ack in response.acks.acks:
                    self._tell(ack.tag, ack)
        except grpc.aio.AioRpcError as error:
            # After an answer a denial says that the key is no longer what it was, and not what it may do now.
            if error.code() in DENIALS and not self._answered:
                self._rest = error
        except Exception as error:  # whatever it is, the callers have to know
            self._rest = error
        finally:
            self.finish()
            if call is not None:
                call.cancel()

    def close(self) -> None:
        """Say that the client is closed to whoever has no ack when the stream ends, which is now."""
        self._rest = Unavailable(CLOSED)

    def finish(self) -> None:
        """Take nothing more, and tell those who have no ack."""
        self.over = True
        self._wake.set()  # gRPC leaves the writer of a broken stream waiting for its next frame
        for tag in list(self._waiting):
            self._tell(tag, self._rest)

    def _tell(self, tag: int, answer: Answer) -> None:
        waiting = self._waiting.get(tag)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    async def _frames(self) -> AsyncIterator[pb.SubmitRequest]:
        """Yield the opening, then all that is ready at once, until the stream has been idle or is over."""
        yield pb.SubmitRequest(open=pb.SubmitOpen(client_id=self._client_id))
        while await self._more():
            yield pb.SubmitRequest(batch=self._batch())

    async def _more(self) -> bool:
        """Wait for something to send; return False if nothing will be."""
        while not self._unsent and not self.over:
            self._wake.clear()
            try:
                async with asyncio.timeout(IDLE_S):
                    await self._wake.wait()
            except TimeoutError:
                self.over = True  # the queue still acks what it has read
        return not self.over

    def _batch(self) -> pb.SubmitBatch:
        """Return what fits a frame of what is unsent, the oldest first."""
        batch = pb.SubmitBatch()
        frame_bytes = 0
        for tag, request in list(itertools.islice(self._unsent.items(), MAX_FRAME_MESSAGES)):
            frame_bytes += request.ByteSize()
            if batch.requests and frame_bytes > TARGET_FRAME_BYTES:
                break
            # A message given as an argument would be encoded and decoded again.
            batch.requests.add(tag=tag).request.CopyFrom(request)
            del self._unsent[tag]
        return batch


def _refusal(ack: pb.SubmitAck) -> PenstockError:
    """Return the client's error for a request that was not accepted: the same as after a unary call."""
    error = ack.error
    if ack.status == pb.SUBMIT_STATUS_UNAVAILABLE:
        return Unavailable(error.message or "the queue takes no submits now")
    if error.code == CHANNEL_DENIED:
        # A unary call is refused as a whole, so it says of which request; who reads that finds the field by it.
        return refusal_of(error.code, f"requests[0].{error.message}", error.param)
    if ack.status == pb.SUBMIT_STATUS_OVER_QUOTA or error.code == LARGER_THAN_QUOTA:
        return refusal_of(error.code, error.message, error.param)
    # As after a unary call, which has no code for anything else.
    return InvalidRequest(*as_given(error.message, error.param))
