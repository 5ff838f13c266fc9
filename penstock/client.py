"""The asynchronous client of a Penstock queue (and, for the state of the fleet, of its scheduler)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, nullcontext
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, Unpack

from opentelemetry import trace

from penstock.address import DEFAULT_QUEUE_ADDRESS, DEFAULT_SCHEDULER_ADDRESS, check_address
from penstock.connection import Connection, Turn
from penstock.credentials import Credentials, check_sendable, key_from_environment
from penstock.errors import InvalidRequest, NotFound, from_rpc
from penstock.fields import RequestFields, build_request, copied
from penstock.fleet import names_of
from penstock.following import Follower, Told
from penstock.iteration import Iteration, told_again
from penstock.limits import MAX_REQUEST_BYTES
from penstock.loaded import grpc
from penstock.names import check_name, checked_names
from penstock.queue.v1 import queue_pb2 as pb
from penstock.queue.v1.queue_pb2_grpc import QueueServiceStub
from penstock.request.v1 import request_pb2
from penstock.results import (
    Cancelled,
    DeadLetter,
    RequestError,
    RequestInfo,
    Requeued,
    Result,
    Submitted,
    TokenDelta,
    info_from,
    result_from,
    tokens_from,
)
from penstock.scheduler.v1 import scheduler_pb2
from penstock.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from penstock.subjects import check_one_name, names_to_watch, of_batch, of_dead
from penstock.submit_line import SubmitLines
from penstock.submitting import WINDOW_BYTES, Prepared, SubmitSession, too_large, with_key
from penstock.tls import TlsFiles
from penstock.tracing import SubmitTracer
from penstock.watching import Event, Joined, Transcript, WatchSession

if TYPE_CHECKING:
    from penstock.queue.v1.queue_pb2_grpc import QueueServiceAsyncStub
    from penstock.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

DEFAULT_RETRY_FOR_S = 60.0
"""A killed queue service is supervised back within seconds; this leaves room for a slow disk's recovery."""

DEAD_PAGE_SIZE = 500
"""Dead letters in one answer: half as many as the queue gives at most."""

AnyRequest: TypeAlias = RequestFields | Mapping[str, Any] | request_pb2.Request
ManyRequests: TypeAlias = AsyncIterable[AnyRequest] | Iterable[AnyRequest]


class Client:
    """Submits requests and reads results. Use as `async with Client("HOST:PORT") as client:`.

    Calls are retried while the service is unavailable, at most `retry_for_s` seconds from when that shows: of a process
    that is stopped up to 50 s late, of a disk that hangs never (`asyncio.wait_for` bounds a call, and ends an iteration
    by cancelling a step: further ones raise PenstockError); every submit carries an idempotency key (drawn if none is
    given), so that a retry never submits twice. It belongs to the event loop that runs when it is made, and every call
    to it is made there.
    """

    def __init__(
        self,
        queue: str = DEFAULT_QUEUE_ADDRESS,
        scheduler: str = DEFAULT_SCHEDULER_ADDRESS,
        *,
        retry_for_s: float = DEFAULT_RETRY_FOR_S,
        tls: TlsFiles | None = None,
        api_key: str | None = None,
        tenant: str = "",
    ) -> None:
        """Talk to the queue and scheduler at these "HOST:PORT" addresses; nothing is sent yet. Raises AddressError.

        TLS is as `tls` says, by default as PENSTOCK_TLS_CA, PENSTOCK_TLS_CERT and PENSTOCK_TLS_KEY do; raises TlsError.
        Calls carry `api_key`, by default that of PENSTOCK_KEY; `tenant` is whom to act for, where a caller may choose.
        Raises KeysError if a call cannot carry them, and TracingError if spans are to be exported and cannot be.
        """
        check_address(queue, "queue")
        check_address(scheduler, "scheduler")
        key = key_from_environment() if api_key is None else api_key
        check_sendable("the API key", key)
        check_sendable("the tenant", tenant)
        credentials = Credentials(key, tenant)
        self._queue = Connection(queue, retry_for_s, tls, credentials)
        self._scheduler = Connection(scheduler, retry_for_s, tls, credentials)
        self._stub: QueueServiceAsyncStub = QueueServiceStub(self._queue.channel)
        self._fleet: SchedulerServiceAsyncStub = SchedulerServiceStub(self._scheduler.channel)
        self._follower = Follower(self._stub, self._queue)
        self._tracer = SubmitTracer()
        self._name = f"{socket.gethostname()}/{os.getpid()}"
        self._lines = SubmitLines(self._stub, self._queue, self._name)

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client."""
        await self.close()

    async def close(self) -> None:
        """Close the connections; whoever is in a call, or makes one later, gets Unavailable."""
        for connection in (self._queue, self._scheduler):
            connection.begin_to_close()  # so that nothing new begins while the rest of this waits
        await self._follower.close()
        await self._lines.close()
        await self._queue.close()
        await self._scheduler.close()
        try:
            # In a thread: a collector that does not answer is waited for, and the loop has others to serve.
            await asyncio.to_thread(self._tracer.close)
        except RuntimeError:  # in an exit handler of the process, which starts no thread any more
            self._tracer.close()

    async def submit(self, **fields: Unpack[RequestFields]) -> str:
        """Submit one request and return its id once it is durable.

        Raises InvalidRequest naming the field, also for a request of more than 12 MiB, or Unavailable.
        """
        return await self.submit_request(build_request(fields))

    async def submit_request(self, wanted: request_pb2.Request) -> str:
        """Submit a request as it goes over the wire, with key and trace where they are empty; see `submit`.

        `wanted` stays as it is: submitted again without a key of its own it is another request. Raises InvalidRequest.
        """
        request, span = self._prepared(wanted)
        with_key(request)
        with trace.use_span(span, end_on_exit=True):
            if (size_bytes := request.ByteSize()) > MAX_REQUEST_BYTES:
                refused = too_large(size_bytes)
                raise InvalidRequest(refused.message, refused.param, refused.code)
            request_id = await self._lines.submit(request)
            span.set_attribute("penstock.request.id", request_id)
        return request_id

    def submit_many(
        self,
        requests: ManyRequests,
        *,
        wait_for_quota: bool = False,
        waits: Callable[[str], None] | None = None,
        window_bytes: int = WINDOW_BYTES,
    ) -> AsyncGenerator[Submitted, None]:
        """Submit requests over one stream, batched; yield an ack for each once it is durable or refused.

        Reads `requests` only as fast as the queue takes them; an iterable that is
        not async is read on the loop, which it holds while it makes one or a few.
        One that is refused, here or by the queue, has `error` in its ack and stops
        no other; so has one that a quota does not let in, unless that is waited for.
        `waits` is called with the reason before each wait for a queue that takes
        no more now. `window_bytes` of requests, and one more, are held at most.
        """
        return Iteration(self.submit_prepared(self._prepare_each(requests), wait_for_quota, waits, window_bytes))

    async def submit_prepared(
        self,
        source: AsyncIterable[Prepared],
        wait_for_quota: bool = False,
        waits: Callable[[str], None] | None = None,
        window_bytes: int = WINDOW_BYTES,
    ) -> AsyncGenerator[Submitted, None]:
        """Submit what `prepared` has returned, which nobody changes any more; see `submit_many`."""
        session = SubmitSession(self._stub, self._queue, self._name, wait_for_quota, waits, window_bytes)
        async with self._queue.submit(), aclosing(session.acks(source)) as acks:
            async for ack in acks:
                yield ack

    def prepared(self, wanted: AnyRequest) -> Prepared:
        """Return the message as which `submit_many` submits `wanted`, or why there is none. Any thread may call it."""
        try:
            request, span = self._prepared(wanted)
        except InvalidRequest as error:
            return RequestError(error.code, str(error), error.param)
        span.end()
        return request

    async def generate(self, **fields: Unpack[RequestFields]) -> Result:
        """Submit one request and return its result, however it ended."""
        return await self.result(await self.submit(**fields))

    async def result(self, request_id: str) -> Result:
        """Wait until the request has ended and return its result. Raises NotFound.

        Whoever stops waiting leaves the request running: see `cancel`, and `deadline_s` of a request.
        """
        async with aclosing(self.wire_events(request_id, tokens=False)) as told:
            async for events in told:
                return result_from(events[-1].result.result, events[-1].result.cursor)
        raise NotFound(f"{request_id}: the queue has no result for it")

    async def get(self, request_id: str | None = None, *, idempotency_key: str = "", tenant: str = "") -> RequestInfo:
        """Return the state of a request, named by its id or by its idempotency key.

        Raises InvalidRequest for what is no name or for both, or NotFound.
        """
        check_one_name(request_id, idempotency_key)
        request = pb.GetRequest()
        if request_id is not None:
            check_name("request_id", request_id)
            request.request_id = request_id
        else:
            check_name("tenant", tenant)
            check_name("idempotency_key", idempotency_key)
            request.idempotency_key.CopyFrom(pb.IdempotencyKey(tenant=tenant, key=idempotency_key))
        return info_from(await self.wire_get(request))

    async def wire_get(self, request: pb.GetRequest, turn: Turn = nullcontext) -> pb.GetResponse:
        """Return the state of a request as it came over the wire, asked for within a `turn`. Raises NotFound."""
        return await self._queue.call(lambda: self._stub.Get(request), turn)

    async def wire_get_many(self, request: pb.GetManyRequest) -> pb.GetManyResponse:
        """Return the states of the first of many requests, by their keys, as they came over the wire."""
        return await self._queue.call(lambda: self._stub.GetMany(request))

    @told_again
    async def watch(
        self,
        batch: str | None = None,
        *,
        request_ids: Sequence[str] = (),
        cursor: int = 0,
        follow: bool = False,
    ) -> AsyncGenerator[Result, None]:
        """Yield results of a batch, or of at most 10,000 named requests, in completion order.

        Resume a batch with the `cursor` of the last result seen. Ends once
        nothing of it waits or runs, never for a batch with `follow`. Raises
        NotFound if nothing is known of a name, or of the batch from its beginning.
        """
        async with aclosing(self.events(batch, request_ids=request_ids, cursor=cursor, follow=follow)) as events:
            async for event in events:
                if isinstance(event, Result):
                    yield event

    @told_again
    async def events(
        self,
        batch: str | None = None,
        *,
        request_ids: Sequence[str] = (),
        cursor: int = 0,
        follow: bool = False,
        tokens: bool = False,
    ) -> AsyncGenerator[Event, None]:
        """Yield results, progress and (with `tokens`) token deltas; see `watch`.

        Tokens that were not sent while a request ran are in its result alone.
        """
        session = self._session(batch, request_ids, cursor, tokens, follow)
        async with self._queue.watch(), aclosing(session.events()) as events:
            async for event in events:
                yield event

    async def wire_results(
        self, batch: str, cursor: int = 0, joined: Joined | None = None
    ) -> AsyncGenerator[pb.WatchResult, None]:
        """Yield results of a batch after `cursor` as wire messages, for ever; for bulk readers.

        `joined` is awaited before the first result, and again after each reconnect; what it raises ends the watch.
        """
        session = WatchSession(self._stub, self._queue, batch, (), cursor, follow=True, joined=joined)
        async with self._queue.watch(), aclosing(session.wire_events()) as events:
            async for event in events:
                if event.HasField("result"):
                    yield event.result

    async def wire_ended(self, batch: str, cursor: int = 0) -> AsyncGenerator[pb.WatchEvent, None]:
        """Yield the results that a batch has now after `cursor`, and its progress, as wire messages.

        The last progress says how many of its requests still waited or ran before the last results were read.
        """
        session = WatchSession(self._stub, self._queue, batch, (), cursor, until_now=True)
        async with self._queue.watch(), aclosing(session.wire_events()) as events:
            async for event in events:
                yield event

    def wire_events(self, request_id: str, tokens: bool, large_bytes: int = 0) -> AsyncGenerator[Told, None]:
        """Yield (with `tokens`) token deltas and at last the result of one request, as `Follower.events` does.

        What has come together is yielded together; readers of one request share its result. Raises InvalidRequest for
        what cannot be a request's id, NotFound, or Unavailable if the queue stays away.
        """
        check_name("request_id", request_id)
        return self._follower.events((request_id,), tokens, large_bytes)

    def wire_events_of(
        self, request_ids: Sequence[str], tokens: bool, large_bytes: int = 0
    ) -> AsyncGenerator[Told, None]:
        """Yield events as `wire_events` does, of however many requests, which share a stream with all others."""
        return self._follower.events(checked_names("request_ids", request_ids), tokens, large_bytes)

    @told_again
    async def tokens(self, request_id: str) -> AsyncGenerator[TokenDelta, None]:
        """Yield the tokens of one request while they are generated, until it has ended. Raises NotFound.

        A delta with a higher `attempt` means that the request started again
        on another worker: discard the text of the attempt before. What was not
        sent while it ran comes out of its result, so that a completed request's
        text is that of the last attempt yielded. How it ended is not told here: a
        request that was refused, or whose deadline passed, ends this like another.
        """
        transcript = Transcript()
        async with aclosing(self.wire_events(request_id, tokens=True)) as told:
            async for events in told:
                for event in events:
                    if event.WhichOneof("event") == "tokens":
                        transcript.add(event.tokens)
                        yield tokens_from(event.tokens)
                        continue
                    for delta in transcript.rest(event.result.result):
                        yield tokens_from(delta)

    async def cancel(self, *request_ids: str, batch: str | None = None) -> Cancelled:
        """Cancel the named requests, or everything of a batch that has not ended. Raises InvalidRequest for no name.

        Names may be as many as you like; of more than 10,000 some may be cancelled where this raises Unavailable.
        """
        done = Cancelled(0, 0, ())
        for request in of_batch(pb.CancelRequest, request_ids, batch):
            response = await self._queue.call(partial(self._stub.Cancel, request))
            done = Cancelled(
                done.cancelled + response.cancelled,
                done.aborting + response.aborting,
                (*done.not_cancelled, *response.not_cancelled),
            )
        return done

    async def delete(self, *request_ids: str, batch: str | None = None) -> int:
        """Delete results that have been read, with their keys; return how many. Raises InvalidRequest for no name.

        Of a batch at least so many: it is repeated while the queue is away. What ends after this began stays.
        Of more than 10,000 names some may be deleted where this raises Unavailable.
        """
        deleted = 0
        for request in of_batch(pb.DeleteRequest, request_ids, batch):
            if batch is not None and (cursor := (await self.stats()).cursor):  # an older queue tells none
                request.up_to = cursor
            deleted += (await self._queue.call(partial(self._stub.Delete, request))).deleted
        return deleted

    @told_again
    async def dead_letters(self, page_size: int = DEAD_PAGE_SIZE) -> AsyncGenerator[DeadLetter, None]:
        """Yield the dead letters, oldest first, asked for `page_size` at a time."""
        request = pb.ListDeadRequest(page_size=page_size)
        while True:
            page = await self._queue.call(lambda: self._stub.ListDead(request))
            for dead in page.letters:
                yield DeadLetter(
                    dead.request_id, dead.channel, dead.batch, dead.attempts, dead.last_error, dead.died_unix_ns
                )
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def requeue(self, *request_ids: str, all_dead: bool = False) -> Requeued:
        """Put dead letters back to the front of their lines: the named ones, or all of now. Raises InvalidRequest.

        Of more than 10,000 names some may be requeued where this raises Unavailable.
        """
        done = Requeued(0, ())
        for request in of_dead(request_ids, all_dead):
            if all_dead and (cursor := (await self.stats()).cursor):
                request.up_to = cursor
            response = await self._queue.call(partial(self._stub.RequeueDead, request))
            done = Requeued(done.requeued + response.requeued, (*done.not_dead, *response.not_dead))
        return done

    async def identify(self) -> pb.IdentifyResponse:
        """Return who the queue takes this client for. Raises Unauthenticated."""
        return await self._queue.call(lambda: self._stub.Identify(pb.IdentifyRequest()))

    async def stats(self) -> pb.StatsResponse:
        """Return the queue's counts per channel."""
        return await self._queue.call(lambda: self._stub.Stats(pb.StatsRequest()))

    async def fleet(self, names_only: bool = False) -> scheduler_pb2.StatusResponse:
        """Return the scheduler's view of workers, channels and credits; with `names_only` what it tells every key."""
        request = scheduler_pb2.StatusRequest(names_only=names_only)
        return await self._scheduler.call(lambda: self._fleet.Status(request))

    async def models(self) -> frozenset[str]:
        """Return the names that models answer to just now, which the scheduler tells to every key."""
        return names_of(await self.fleet(names_only=True))

    async def drain_worker(self, worker_id: str) -> int:
        """Stop granting to a worker; return how many reservations it still has. Raises NotFound."""
        check_name("worker_id", worker_id)
        request = scheduler_pb2.DrainWorkerRequest(worker_id=worker_id)
        return (await self._scheduler.call(lambda: self._fleet.DrainWorker(request))).reservations

    async def undrain_worker(self, worker_id: str) -> None:
        """Let a drained worker have grants again. Raises NotFound, or ServiceError if it is not connected."""
        check_name("worker_id", worker_id)
        request = scheduler_pb2.UndrainWorkerRequest(worker_id=worker_id)
        await self._scheduler.call(lambda: self._fleet.UndrainWorker(request))

    async def backup(self, name: str = "") -> pb.BackupResponse:
        """Have the queue write a consistent copy of its store beside it; return where it is and what it holds.

        Raises InvalidRequest if the name is taken or no good, ServiceError or Unavailable if the copy cannot be made.
        """
        # Not repeated after a failure: whether the first call made the backup cannot be known.
        try:
            with self._queue.until_closed():
                return await self._stub.Backup(pb.BackupRequest(name=name))
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, self._queue.address) from None

    def _session(
        self, batch: str | None, request_ids: Sequence[str], cursor: int, tokens: bool, follow: bool
    ) -> WatchSession:
        names = names_to_watch(batch, request_ids, cursor)
        return WatchSession(self._stub, self._queue, batch, names, cursor, tokens, follow)

    async def _prepare_each(self, requests: ManyRequests) -> AsyncIterator[Prepared]:
        if isinstance(requests, AsyncIterable):
            async for request in requests:
                yield self.prepared(request)
            return
        for request in requests:
            yield self.prepared(request)

    def _prepared(self, fields: AnyRequest) -> tuple[request_pb2.Request, trace.Span]:
        request = copied(fields) if isinstance(fields, request_pb2.Request) else build_request(fields)
        span: trace.Span = trace.INVALID_SPAN
        if not request.traceparent:
            request.traceparent, request.tracestate, span = self._tracer.context(request.batch)
        return request, span
