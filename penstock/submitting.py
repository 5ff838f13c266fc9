"""Submits many requests over one stream: batched, bounded in flight, resumed over reconnects."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeAlias

from penstock.connection import Connection, Patience
from penstock.errors import Unavailable, as_given
from penstock.limits import MAX_FRAME_MESSAGES, MAX_REQUEST_BYTES, TARGET_FRAME_BYTES
from penstock.loaded import grpc
from penstock.queue.v1 import queue_pb2 as pb
from penstock.request.v1 import request_pb2
from penstock.results import RequestError, Submitted

if TYPE_CHECKING:
    from penstock.queue.v1.queue_pb2_grpc import QueueServiceAsyncStub

Prepared: TypeAlias = request_pb2.Request | RequestError
"""A request to submit, or why there can be none: its ack says so."""

WINDOW_REQUESTS = 4096
"""Most requests without an ack: what a queue takes in a fifth of a second, so the stream never idles."""

WINDOW_BYTES = 32 * 1024 * 1024
"""Most bytes without an ack, unless told otherwise; they are kept until then, as a lost stream sends them again."""

TURN_S = 0.01
"""Longest that requests are taken at one go. A source that makes each of them on the loop, as any plain iterable does,
keeps all else from running meanwhile, and what it has made from being sent. As long as several frames of requests that
are ready take: shorter ones would each be sent for less."""

QUOTA_PAUSE_S = 1.0
"""Before requests that a quota did not let in are submitted again: requests end at a pace of seconds."""

REFUSALS = frozenset({pb.SUBMIT_STATUS_INVALID, pb.SUBMIT_STATUS_OVER_QUOTA})
"""Statuses of a request that was not accepted and will not be."""


class SubmitSession:
    """One `submit_many`: requests in, acks out, each request acked exactly once.

    Requests without an ack are sent again when the stream breaks; their
    idempotency keys make that harmless, so one that has none is given one.
    """

    def __init__(
        self,
        stub: QueueServiceAsyncStub,
        connection: Connection,
        client_id: str,
        wait_for_quota: bool = False,
        waits: Callable[[str], None] | None = None,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        """Submit through `stub` with the patience of `connection`; `wait_for_quota` as long as it takes.

        `waits` is told why before each wait for a queue that takes no more now. No request is taken from the source
        while `window_bytes` of them have no ack.
        """
        self._waits = waits
        self._window_bytes = window_bytes
        more = (pb.SUBMIT_STATUS_OVER_QUOTA,) if wait_for_quota else ()
        self._tried_again = frozenset({pb.SUBMIT_STATUS_UNAVAILABLE, *more})
        """Statuses after which a request is submitted once more."""
        self._stub = stub
        self._connection = connection
        self._client_id = client_id
        self._held: dict[int, tuple[request_pb2.Request, int, bool]] = {}
        """By tag, with their size in bytes, which takes as long to find as to encode them, and whether the key is
        this client's own."""
        self._bytes_held = 0
        self._exhausted = False
        self._stream = _Stream(())
        self._room = asyncio.Event()
        self._refused: Submitted | None = None
        """Ack of a request that is not even sent, until it is handed out."""
        self._news = asyncio.Event()
        """Something has come, from the queue or from here."""

    @property
    def _finished(self) -> bool:
        return self._exhausted and not self._held

    async def acks(self, source: AsyncIterable[Prepared]) -> AsyncGenerator[Submitted, None]:
        """Yield the ack of every request of `source`, in the order the queue acked them.

        Raises what `source` raises, once what it gave before is acked, and
        Unavailable if the queue stays away or full.
        """
        filling = asyncio.create_task(self._fill(source))
        patience = self._connection.patience()
        try:
            while not self._finished:
                try:
                    async with aclosing(self._one_stream(patience)) as stream:
                        async for acks in stream:
                            for ack in acks:
                                yield ack
                except grpc.aio.AioRpcError as error:
                    await self._connection.wait_or_raise(patience, error)
                else:
                    if not self._finished:
                        await patience.wait_or_raise(Unavailable(f"{self._connection.address} ended the submit stream"))
            await filling
        finally:
            filling.cancel()
            await asyncio.wait([filling])

    async def _fill(self, source: AsyncIterable[Prepared]) -> None:
        """Take requests from the source while the window has room, and let others run in between."""
        tag = 0
        turn = _Turn(asyncio.get_running_loop())
        try:
            async for request in source:
                while len(self._held) >= WINDOW_REQUESTS or self._bytes_held >= self._window_bytes:
                    self._room.clear()
                    await self._room.wait()
                if (refused := self._take_in(tag, request)) is not None:
                    await self._refuse(tag, refused)
                tag += 1
                if turn.is_long():
                    await asyncio.sleep(0)
        finally:
            self._exhausted = True
            self._stream.wake.set()

    def _take_in(self, tag: int, request: Prepared) -> RequestError | None:
        """Have a request sent; return why it is not to be, if so."""
        if isinstance(request, RequestError):
            return request
        drawn = with_key(request)
        if (size := request.ByteSize()) > MAX_REQUEST_BYTES:
            # gRPC would break the stream off for some, at each attempt, and with it all the others.
            return too_large(size)
        self._held[tag] = request, size, drawn
        self._bytes_held += size
        self._stream.put(tag)
        return None

    async def _refuse(self, tag: int, error: RequestError) -> None:
        """Have a request acked as wrong; returns when it is, so that a source of many such is bounded too."""
        self._refused = Submitted(tag, "", error=error)
        self._news.set()
        while self._refused is not None:
            self._room.clear()
            await self._room.wait()

    def _take_refused(self) -> list[Submitted]:
        """Return the ack of what was refused here, if there is one."""
        if self._refused is None:
            return []
        refused, self._refused = self._refused, None
        self._room.set()
        return [refused]

    async def _one_stream(self, patience: Patience) -> AsyncGenerator[list[Submitted], None]:
        """Yield the acks of one stream, those that came together together."""
        stream = self._stream = _Stream(self._held)
        call = self._stub.Submit(self._frames(stream))
        try:
            async with aclosing(self._answers(call)) as answers:
                async for response in answers:
                    acks = self._take_refused()
                    if response is not None:
                        acks += self._taken(stream, response, patience)
                    if acks:
                        yield acks
                    if stream.refused and not stream.unanswered:
                        await self._pause(stream, patience)
                    stream.wake.set()
        finally:
            stream.end()
            call.cancel()

    async def _answers(self, call: AsyncIterable[pb.SubmitResponse]) -> AsyncGenerator[pb.SubmitResponse | None, None]:
        """Yield what the queue answers, and None when something was refused here while it answers nothing."""
        answers = aiter(call)
        reading: asyncio.Future[pb.SubmitResponse | None] | None = None
        try:
            while True:
                reading = asyncio.ensure_future(_next(answers))
                reading.add_done_callback(lambda _done: self._news.set())
                while not reading.done():
                    if self._refused is not None:
                        yield None
                    await self._news.wait()
                    self._news.clear()
                if (response := reading.result()) is None:
                    return
                yield response
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    def _taken(self, stream: _Stream, response: pb.SubmitResponse, patience: Patience) -> list[Submitted]:
        """Return the acks of an answer that are for the caller; note what is to be tried again."""
        if not self._held:
            # Nothing waits for an ack, so the opening itself is an answer. While something does it is none: a request
            # that the stream breaks of would be sent for ever.
            patience.succeeded()
        acks = []
        for ack in response.acks.acks:
            stream.unanswered -= 1
            status = ack.status
            if status in self._tried_again:
                stream.refuse(ack)
                continue
            patience.succeeded()
            if (submitted := self._take(ack, status)) is not None:
                acks.append(submitted)
        return acks

    async def _pause(self, stream: _Stream, patience: Patience) -> None:
        """Wait before what the queue did not take is sent again; raises Unavailable if patience has run out."""
        if self._waits is not None:
            self._waits(stream.reason)
        if stream.over_quota:
            patience.succeeded()
            await self._connection.pause(QUOTA_PAUSE_S)
        else:
            await patience.wait_or_raise(Unavailable(stream.reason))
        stream.try_again()

    def _take(self, ack: pb.SubmitAck, status: int) -> Submitted | None:
        """Return the ack for the caller; None if its request had one already."""
        tag = ack.tag
        held = self._held.pop(tag, None)
        if held is None:
            return None
        _, size, drawn = held
        self._bytes_held -= size
        self._room.set()
        return Submitted(
            tag,
            ack.request_id,
            # With a key that nobody else has, it is what this client sent before a stream broke.
            duplicate=status == pb.SUBMIT_STATUS_DUPLICATE and not drawn,
            error=_error(ack.error) if status in REFUSALS else None,
        )

    async def _frames(self, stream: _Stream) -> AsyncIterator[pb.SubmitRequest]:
        """Yield the opening, then batches until every request is acked or the stream is over."""
        yield pb.SubmitRequest(open=pb.SubmitOpen(client_id=self._client_id))
        while True:
            while not (stream.may_send or stream.over or self._finished):
                stream.wake.clear()
                await stream.wake.wait()
            if stream.over or self._finished:
                return
            yield pb.SubmitRequest(batch=self._batch(stream))

    def _batch(self, stream: _Stream) -> pb.SubmitBatch:
        batch = pb.SubmitBatch()
        requests = batch.requests
        frame_bytes = count = 0
        while stream.to_send and count < MAX_FRAME_MESSAGES:
            tag = stream.to_send[0]
            held = self._held.get(tag)
            if held is not None:
                request, size, _ = held
                if frame_bytes and frame_bytes + size > TARGET_FRAME_BYTES:
                    break
                frame_bytes += size
                count += 1
                # A message given as an argument would be encoded and decoded again, and so would one that is appended.
                requests.add(tag=tag).request.CopyFrom(request)
            stream.to_send.popleft()
        stream.unanswered += count
        return batch


class _Stream:
    """What one stream has to send. The next one begins with everything that has no ack, and shares nothing with it:

    gRPC leaves the writer of a broken stream waiting for the next frame, and what it took then would be lost.
    """

    def __init__(self, tags: Iterable[int]) -> None:
        """Send the requests with these tags first."""
        self.to_send = deque(tags)
        self.wake = asyncio.Event()
        self.over = False
        self.unanswered = 0
        """Requests sent and not yet answered, with an ack or a refusal."""
        self.refused: list[int] = []
        """Requests that the queue takes later. Nothing more is sent, and everything sent is answered, before they are
        tried again: a pause for each of many refused frames would add up to more than any patience."""
        self.reason = ""
        """Why, in the queue's words."""
        self.over_quota = False
        """Whether it is for a quota alone: the queue answers, and there will be room when others have run."""

    @property
    def may_send(self) -> bool:
        """Whether there is something to send now."""
        return bool(self.to_send) and not self.refused

    def put(self, tag: int) -> None:
        """Send one more."""
        self.to_send.append(tag)
        self.wake.set()

    def refuse(self, ack: pb.SubmitAck) -> None:
        """Note that the queue does not take a request now."""
        over_quota = ack.status == pb.SUBMIT_STATUS_OVER_QUOTA
        self.over_quota = over_quota and (self.over_quota or not self.refused)
        self.refused.append(ack.tag)
        self.reason = ack.error.message or "the queue takes no submits now"

    def try_again(self) -> None:
        """Send what was refused once more, before anything newer."""
        self.to_send.extendleft(reversed(self.refused))
        self.refused.clear()

    def end(self) -> None:
        """Let the writer end."""
        self.over = True
        self.wake.set()


class _Turn:
    """How long the loop has been held: from the first look until it turns, for whichever wait."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._until: float | None = None

    def is_long(self) -> bool:
        """Return whether the loop is to be given back."""
        if self._until is None:
            self._until = self._loop.time() + TURN_S
            self._loop.call_soon(self._end)
        return self._loop.time() > self._until

    def _end(self) -> None:
        self._until = None


def with_key(request: request_pb2.Request) -> bool:
    """Give a request that has no idempotency key one of its own; return whether it had none."""
    if request.idempotency_key:
        return False
    request.idempotency_key = secrets.token_hex(16)
    return True


def too_large(size_bytes: int) -> RequestError:
    """Return what is wrong with a request of this size, in the queue's words."""
    text = f"request: {size_bytes} bytes encoded; at most {MAX_REQUEST_BYTES} are allowed"
    return RequestError("invalid_request", text, "request")


async def _next(answers: AsyncIterator[pb.SubmitResponse]) -> pb.SubmitResponse | None:
    return await anext(answers, None)


def _error(error: request_pb2.RequestError) -> RequestError:
    return RequestError(error.code, *as_given(error.message, error.param))
