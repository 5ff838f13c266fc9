"""Get, Cancel, Delete, Stats and the dead letters, and the sweep of results that are too old."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import grpc

from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2
from services.auth.caller import CALLER
from services.clock import Clock
from services.queue import wire
from services.queue.committer import Committer, RefusedError
from services.queue.core import records
from services.queue.core.ages import Ages
from services.queue.core.effects import Cancelled, Deleted, Inspected, QueueView, Requeued, View
from services.queue.core.entry import NO_SEQ, parse_request_id, request_id_of
from services.queue.core.lifecycle import State
from services.queue.core.machine import ENDED_AT_ONCE
from services.queue.core.messages import ANY_PLACE, Cancel, Delete, EndedRow, Inspect, InspectQueue, RequeueDead
from services.queue.items import Lookup
from services.queue.metrics import QueueMetrics, age_ns
from services.queue.speaker import Speaker
from services.queue.storage.read_faults import code_of
from services.queue.storage.reader import PAGE_BYTES, Heads, Reader
from services.queue.storage.store import Store, StoreDamagedError, StoreError
from services.queue.submits.validate import check_name
from services.rpc.encoding import length_tag, number_field, number_tag, text_field, wrapped
from services.rpc.strict import BadInputError

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

PAGE_DEFAULT = 100
PAGE_MOST = 1000
"""Dead letters in one response, where no number is asked for, and at most. It ends after PAGE_BYTES as well: an engine
may have said much of what it failed of."""

DELETE_PAGE = 250
"""Results deleted in one commit, so that a large delete does not hold up everybody else's."""

MAX_KEYS = 1000
"""Keys in one call: as many small results as one answer has room for."""

TENANTS_TOLD = 10
"""Of which most waits: one that floods a channel is among them."""

MAX_IDS = 10_000
"""Names in one call; a frame of 16 MiB could hold half a million, and all would be in one commit."""


class Admin:
    """Calls about requests that are in the queue already."""

    def __init__(
        self,
        committer: Committer,
        reader: Reader,
        speaker: Speaker,
        metrics: QueueMetrics,
        clock: Clock,
        store_id: str,
        batch_channel: Callable[[], str],
        ages: Ages,
    ) -> None:
        """Ask `committer` for what changes, and read results with `reader`.

        `batch_channel` returns the channel for batches of the caller's for which nobody has named one.
        """
        self._batch_channel = batch_channel
        self._ages = ages
        self._committer = committer
        self._reader = reader
        self._speaker = speaker
        self._metrics = metrics
        self._clock = clock
        self._store_id = store_id
        self._swept = b""
        """Where the next sweep begins. No result ends before one that is swept, for the clock of a life goes forward
        only; what could not be deleted is met again at the next start."""

    async def get(self, request: queue_pb2.GetRequest, context: Context) -> queue_pb2.GetResponse:
        """Return where one request is; NOT_FOUND if it is unknown."""
        request_id = await self._named(request, context)
        sees = CALLER.get().sees
        found: Inspected = await self._ask(context, lambda ticket: Inspect(ticket, (request_id,), sees))
        view = found.views[0]
        response = wire.get_response(view) if view is not None else None
        if view is None or view.state is State.DEAD:
            row = await self._reader.result(parse_request_id(self._store_id, request_id), sees)
            if row is not None:
                result = row.result()
                response = response or _ended(result)
                response.result.CopyFrom(result)
        if response is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"request_id: {request_id!r} is unknown")
        return response

    async def get_many(self, request: queue_pb2.GetManyRequest, context: Context) -> bytes:
        """Return where the first of many requests are, encoded. Raises BadInputError, or StoreError."""
        keys = request.keys
        _check_keys(request)
        caller = CALLER.get()
        tenant = request.tenant or caller.tenant
        seqs = [NO_SEQ] * len(keys)
        if caller.sees in {None, tenant}:
            seqs = await self._reader.known_of(tenant, keys)
        names = [request_id_of(self._store_id, seq) if seq != NO_SEQ else "" for seq in seqs]
        found: Inspected = await self._ask(context, lambda ticket: Inspect(ticket, tuple(names), caller.sees))
        # What lives has no result, or one of before it was requeued.
        ended = [
            seq if view is None or view.state is State.DEAD else NO_SEQ
            for seq, view in zip(seqs, found.views, strict=True)
        ]
        results = await self._reader.first_results(ended, caller.sees)
        told: list[bytes] = []
        size_bytes = 0
        for name, view, result in zip(names, found.views, results, strict=False):
            told.append(_told(name, view, result))
            size_bytes += len(told[-1])
            if size_bytes >= PAGE_BYTES:
                break
        return b"".join(told)

    async def _named(self, request: queue_pb2.GetRequest, context: Context) -> str:
        kind = request.WhichOneof("key")
        if kind is None:
            raise BadInputError("key: exactly one of request_id and idempotency_key must be set")
        if kind == "request_id":
            return request.request_id
        key = request.idempotency_key
        if not key.key:
            raise BadInputError("idempotency_key.key: must not be empty")
        check_name("idempotency_key.key", key.key)
        check_name("idempotency_key.tenant", key.tenant)
        caller = CALLER.get()
        tenant = key.tenant or caller.tenant
        seq = await self._reader.known(tenant, key.key) if caller.sees in {None, tenant} else None
        if seq is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"idempotency_key: {key.key!r} is unknown")
        return request_id_of(self._store_id, seq)

    async def cancel(self, request: queue_pb2.CancelRequest, context: Context) -> queue_pb2.CancelResponse:
        """Cancel by name, or what lives of a batch."""
        ids = subject_ids(request)
        check_name("batch", request.batch)
        caller = CALLER.get()
        batch = (caller.tenant, request.batch)
        response = queue_pb2.CancelResponse()
        if ids is None:
            first: Cancelled = await self._ask(context, lambda ticket: Cancel(ticket, None, batch, caller.sees))
            _add_cancelled(response, first)
        for names in self._pages(first.left if ids is None else ids):
            make = partial(Cancel, request_ids=names, sees=caller.sees)
            _add_cancelled(response, await self._ask(context, make))
        if ids is None:
            del response.not_cancelled[:]  # what ended by itself meanwhile
        elif response.not_cancelled:
            others = await self._not_cancelled_before(response.not_cancelled)
            del response.not_cancelled[:]
            response.not_cancelled.extend(others)
        return response

    async def _not_cancelled_before(self, names: Sequence[str]) -> list[str]:
        """Return `names` without what an earlier cancel has ended: the call may repeat one whose answer was lost."""
        by_seq = {parse_request_id(self._store_id, name): name for name in names}
        try:
            ended = await self._reader.cancelled(list(by_seq), CALLER.get().sees)
        except StoreError:
            return list(names)  # the cancel itself has been done
        return [name for name in names if parse_request_id(self._store_id, name) not in ended]

    async def delete(self, request: queue_pb2.DeleteRequest, context: Context) -> queue_pb2.DeleteResponse:
        """Delete results by name, or every result of a batch; raises StoreError.

        One that is damaged keeps no other: that there are some is told after all that can be has been deleted.
        """
        ids = subject_ids(request)
        check_name("batch", request.batch)
        last = _up_to(request)
        if ids is None:
            # What ends from here on can have been read by nobody who asked for this. The answer is durable, so that
            # this place of the log goes to nothing else.
            view: QueueView = await self._ask(context, InspectQueue)
            last = min(last, view.completion_seq)
        deleted = damaged = 0
        damage = ""
        async for page in self._ended(request.batch, last) if ids is None else self._numbers(ids):
            done, heads = await self._delete(context, page, last)
            deleted += done
            damaged += heads.damaged
            damage = damage or heads.damage
        if damaged:
            raise StoreDamagedError(f"{damage}; so stay {damaged} of the results, {deleted} were deleted")
        return queue_pb2.DeleteResponse(deleted=deleted)

    async def _ended(self, batch: str, last: int) -> AsyncIterator[list[int]]:
        """Yield what has ended of a batch, up to this place in the log, as many as one commit deletes."""
        cursor = 0
        while page := await self._reader.log((CALLER.get().tenant, batch), cursor, DELETE_PAGE, last):
            cursor = page[-1].completion_seq
            yield [row.seq for row in page]

    async def _numbers(self, names: Sequence[str]) -> AsyncIterator[list[int]]:
        """Yield the numbers of those names that have one, as many as one commit deletes."""
        seqs = [parse_request_id(self._store_id, name) for name in dict.fromkeys(names)]
        known = [seq for seq in seqs if seq >= 0]
        for start in range(0, len(known), DELETE_PAGE):
            yield known[start : start + DELETE_PAGE]

    async def _delete(self, context: Context, seqs: Sequence[int], last: int) -> tuple[int, Heads]:
        """Delete the results of these requests, but none whose place in the log is after `last`.

        A dead letter that was found before it may have been revived, and have ended anew after it.
        Return how many were deleted, and what was found of them.
        """
        sees = CALLER.get().sees
        heads = await self._reader.heads(seqs)
        rows = [row for row in heads.rows if sees in {None, row.tenant} and row.completion_seq <= last]
        done: Deleted = await self._ask(context, partial(delete_item, rows=rows))
        return done.deleted, heads

    async def sweep(self, ttl_ns: int) -> int:
        """Delete the results older than `ttl_ns`, a page in a commit; return how many were deleted.

        Raises StoreError or RefusedError.
        """
        before_ns = self._ages.ago(self._clock.now_ns(), ttl_ns)
        deleted = 0
        while True:
            # Each page after the last one: the store would walk over what was deleted there, and find again and again
            # what could not be.
            old, after = await self._reader.older_than(before_ns, DELETE_PAGE, self._swept)
            if not old:
                return deleted
            # What is damaged stays. And a dead letter may be younger than it was: requeued, and ended anew, since its
            # age was read.
            heads = await self._reader.heads(old)
            rows = [row for row in heads.rows if row.completed_ns < before_ns]
            done: Deleted = await self._committer.ask(partial(delete_item, rows=rows))
            self._metrics.expired_results.inc(done.deleted)
            deleted += done.deleted
            self._swept = after

    async def stats(self, context: Context) -> queue_pb2.StatsResponse:
        """Return counts per channel and of the store."""
        view: QueueView = await self._ask(context, InspectQueue)
        now_ns = self._clock.now_ns()
        self._committer.health.check_disk()
        caller = CALLER.get()
        if caller.sees is not None and caller.role is not None:
            # How busy others are is not a client's business; which channels there are for it is.
            names = (line.channel for line in view.lines if caller.may_use(line.channel))
            channels = [queue_pb2.ChannelStats(channel=name) for name in names]
            return queue_pb2.StatsResponse(
                store_id=self._store_id,
                channels=channels,
                names_only=True,
                batch_channel=self._batch_channel(),
                cursor=view.completion_seq,
            )
        response = queue_pb2.StatsResponse(
            dead=view.dead,
            results=view.results,
            disk_free_bytes=self._committer.health.disk_free_bytes,
            store_id=self._store_id,
            workers=view.workers,
            scheduler_connected=view.scheduler_connected,
            submits_refused=bool(refusal := self._committer.health.refusal()),
            refusal=refusal,
            batch_channel=self._batch_channel(),
            cursor=view.completion_seq,
        )
        for line in view.lines:
            tally = self._speaker.tallies[line.channel]
            response.channels.add(
                channel=line.channel,
                ready=line.ready,
                leased=line.leased,
                oldest_ready_age_ns=age_ns(line.oldest_submitted_ns, now_ns),
                accepted=tally.accepted,
                ended_by_outcome=tally.ended,
                completion_tokens=tally.completion_tokens,
                prompt_tokens=tally.prompt_tokens,
            )
        if caller.sees is None:
            for waits in self._committer.machine.book.waiting.most(TENANTS_TOLD):
                response.tenants.add(tenant=waits.tenant, requests=waits.requests, bytes=waits.bytes)
        return response

    async def list_dead(self, request: queue_pb2.ListDeadRequest) -> queue_pb2.ListDeadResponse:
        """Return a page of dead letters, oldest first. Raises BadInputError."""
        token = request.page_token
        if token and not (token.isascii() and token.isdigit() and len(token) < 20):
            raise BadInputError(f"page_token: {token!r} is not a token of this queue")
        if request.page_size > PAGE_MOST:
            raise BadInputError(f"page_size: {request.page_size} is more than {PAGE_MOST}")
        size = request.page_size or PAGE_DEFAULT
        letters = await self._reader.dead(int(token or 0), size + 1)
        told = size_bytes = 0
        while told < min(size, len(letters)) and size_bytes < PAGE_BYTES:
            size_bytes += letters[told][1].ByteSize()
            told += 1
        response = queue_pb2.ListDeadResponse(letters=[letter for _, letter in letters[:told]])
        if len(letters) > told:
            response.next_page_token = str(letters[told - 1][0])
        return response

    async def requeue_dead(
        self, request: queue_pb2.RequeueDeadRequest, context: Context
    ) -> queue_pb2.RequeueDeadResponse:
        """Revive dead letters. Raises BadInputError unless it is said of which."""
        kind = request.WhichOneof("subject")
        if kind is None:
            raise BadInputError("subject: exactly one of request_ids and all must be set")
        if kind == "all" and not request.all:
            raise BadInputError("all: must be true if it is set")
        ids = None if kind == "all" else ids_of(request.request_ids)
        up_to = _up_to(request)
        response = queue_pb2.RequeueDeadResponse()
        if ids is None:
            first: Requeued = await self._ask(context, lambda ticket: RequeueDead(ticket, None, up_to))
            response.requeued = first.requeued
        for names in self._pages(first.left if ids is None else ids):
            done: Requeued = await self._ask(context, partial(RequeueDead, request_ids=names, up_to=up_to))
            response.requeued += done.requeued
            # Of all there were, what was deleted or revived by somebody else meanwhile was not asked for by name.
            response.not_dead.extend(() if ids is None else done.not_dead)
        return response

    def _pages(self, wanted: Sequence[str] | Sequence[int]) -> Iterator[tuple[str, ...]]:
        """Yield the names of one commit after another. Those of numbers are made then: a million is a second's work."""
        for start in range(0, len(wanted), ENDED_AT_ONCE):
            page = wanted[start : start + ENDED_AT_ONCE]
            yield tuple(each if isinstance(each, str) else request_id_of(self._store_id, each) for each in page)

    async def _ask(self, context: Context, make: Any) -> Any:
        try:
            return await self._committer.ask(make)
        except RefusedError as error:
            await context.abort(code_of(error), str(error))


def _up_to(request: queue_pb2.DeleteRequest | queue_pb2.RequeueDeadRequest) -> int:
    """Return the highest cursor that is meant."""
    return request.up_to if request.HasField("up_to") else ANY_PLACE


def _add_cancelled(response: queue_pb2.CancelResponse, done: Cancelled) -> None:
    response.cancelled += done.cancelled
    response.aborting += done.aborting
    response.not_cancelled.extend(done.not_cancelled)


def _ended(result: request_pb2.Result) -> queue_pb2.GetResponse:
    return queue_pb2.GetResponse(
        request_id=result.request_id,
        state=queue_pb2.REQUEST_STATE_DONE,
        attempts=result.attempts,
        worker_id=result.worker_id,
        channel=result.channel,
        client_reference=result.client_reference,
    )


_TOLD = length_tag(queue_pb2.GetManyResponse, "requests")
_REQUEST_ID = length_tag(queue_pb2.GetResponse, "request_id")
_STATE = number_tag(queue_pb2.GetResponse, "state")
_RESULT = length_tag(queue_pb2.GetResponse, "result")


def _told(name: str, view: View | None, result: wire.StoredResult | None) -> bytes:
    """Return what a GetManyResponse says of one request, encoded: of its result nothing is decoded for that."""
    content = b""
    if view is not None:
        content = wire.get_response(view).SerializeToString()
    elif result is not None:
        content = text_field(_REQUEST_ID, name) + number_field(_STATE, queue_pb2.REQUEST_STATE_DONE)
    if result is not None:
        content += wrapped(_RESULT, result.body)
    return wrapped(_TOLD, content)


def _check_keys(request: queue_pb2.GetManyRequest) -> None:
    if not request.keys:
        raise BadInputError("keys: at least one is needed")
    if len(request.keys) > MAX_KEYS:
        raise BadInputError(f"keys: {len(request.keys)} given; at most {MAX_KEYS} are allowed")
    check_name("tenant", request.tenant)
    for key in request.keys:
        if not key:
            raise BadInputError("keys: must not be empty")
        check_name("keys", key)


def ids_of(request_ids: queue_pb2.RequestIds) -> tuple[str, ...]:
    """Return the names; raises BadInputError if there are none or too many."""
    if not request_ids.ids:
        raise BadInputError("request_ids.ids: at least one is needed")
    if len(request_ids.ids) > MAX_IDS:
        raise BadInputError(f"request_ids.ids: {len(request_ids.ids)} given; at most {MAX_IDS} are allowed")
    return tuple(request_ids.ids)


def subject_ids(request: queue_pb2.CancelRequest | queue_pb2.DeleteRequest) -> tuple[str, ...] | None:
    """Return the names in a request, or None if it is about a batch; raises BadInputError if it is about neither."""
    kind = request.WhichOneof("subject")
    if kind is None:
        raise BadInputError("subject: exactly one of request_ids and batch must be set")
    if kind == "batch" and not request.batch:
        # Every request without a batch would be meant, and never is: somebody's variable was not set.
        raise BadInputError("batch: is empty")
    return ids_of(request.request_ids) if kind == "request_ids" else None


def delete_item(ticket: int, rows: Sequence[EndedRow]) -> Lookup:
    """Return a delete of those of `rows` that are still what they were when they were read.

    That is looked up right before it is stepped, and in the log, whose rows are small: what is to be deleted may have
    bodies of megabytes, and all that everybody else commits waits for this look. A result that was deleted meanwhile
    has no place there any more, and one that took its place, as of a revived dead letter, has another.
    """

    def read(store: Store) -> Delete:
        places = [records.completion_key((row.tenant, row.batch), row.completion_seq) for row in rows]
        found = store.get_many(records.COMPLETIONS, places)
        held = zip(rows, found, strict=True)
        return Delete(ticket, tuple([row for row, seq in held if seq == records.seq_key(row.seq)]))

    return Lookup(ticket, read)
