"""A queue service in memory for tests of the client: real gRPC, scripted behaviour, no engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc

from penstock.queue.v1 import queue_pb2 as pb
from penstock.queue.v1 import queue_pb2_grpc
from penstock.request.v1 import request_pb2

SOON_S = 60.0
"""Time that a fact is given which is there at once."""

Answerer = Callable[[request_pb2.Request], request_pb2.Result]


def completed(request: request_pb2.Request) -> request_pb2.Result:
    """Answer with the prompt in upper case, a token a word."""
    prompt = request.text or request.chat.messages_json or str(list(request.token_ids.ids))
    tokens = len(prompt.split())
    return request_pb2.Result(
        outcome=request_pb2.OUTCOME_COMPLETED,
        choices=[
            request_pb2.Choice(
                text=prompt.upper(), token_ids=range(tokens), finish_reason=request_pb2.FINISH_REASON_LENGTH
            )
        ],
        usage=request_pb2.Usage(prompt_tokens=tokens, completion_tokens=tokens),
        model=request.model or "fake",
    )


def saying(text: str) -> Answerer:
    """Return who answers with `text`, a token a character, numbered from 0."""

    def answer(_request: request_pb2.Request) -> request_pb2.Result:
        choice = request_pb2.Choice(text=text, token_ids=range(len(text)))
        return request_pb2.Result(outcome=request_pb2.OUTCOME_COMPLETED, choices=[choice], attempts=1)

    return answer


def cancelled(_request: request_pb2.Request) -> request_pb2.Result:
    """Answer without a completion: of what was generated there are the token deltas alone."""
    return request_pb2.Result(outcome=request_pb2.OUTCOME_CANCELLED)


def refusal(request: request_pb2.Request) -> request_pb2.RequestError | None:
    """Return what is wrong with a request, fields named by their path on the wire."""
    for wrong, param in (
        (request.channel == "nowhere", "channel"),
        (request.sampling.HasField("max_tokens") and not request.sampling.max_tokens, "sampling.max_tokens"),
        (request.deadline_unix_ns == 1, "deadline_unix_ns"),
    ):
        if wrong:
            return request_pb2.RequestError(code="invalid_request", message=f"{param}: is wrong", param=param)
    if request.channel == "of another key":
        message = f"channel: {request.channel!r} is not for this key"
        return request_pb2.RequestError(code="permission_denied", message=message, param="channel")
    return None


class FakeQueue(queue_pb2_grpc.QueueServiceServicer):
    """Accepts, answers at once (or when told), and breaks on demand. State outlives a restart of its server."""

    def __init__(self, answer: Answerer = completed) -> None:
        self.answer = answer
        self.store_id = "fake"
        self.batch_channel = ""
        """As an older queue, which does not tell."""
        self.requests: list[request_pb2.Request] = []
        self.by_key: dict[str, str] = {}
        self.results: list[request_pb2.Result] = []
        self.paused = False
        self.watches: list[pb.WatchRequest] = []
        self.follows: list[list[str]] = []
        """Names told to each Follow stream."""
        self.left: list[str] = []
        self.frames: list[int] = []
        self.submit_streams: list[dict[str, str]] = []
        """Metadata of each Submit stream."""
        self.unary_submits = 0
        self.break_submit_after_acks: int | None = None
        self.break_watch_after_results: int | None = None
        self.break_follow_after_tokens: int | None = None
        self.unavailable_calls = 0
        self.refuse_submits = 0
        self.over_quota = 0
        self.tokens: list[request_pb2.TokenDelta] = []
        self.dead: list[pb.DeadLetter] = []
        self.cancelled_batches: list[str] = []
        self.deleted: list[str] = []
        self.cursor = 0
        self.up_to: list[int | None] = []
        """Of every delete and requeue, None if it has none."""
        self.changed = asyncio.Condition()

    @property
    def followed(self) -> list[str]:
        """Every name that was followed, on whichever stream."""
        return [name for names in self.follows for name in names]

    # ---- submits ----

    async def _accept(self, request: request_pb2.Request, tag: int) -> pb.SubmitAck:
        if self.refuse_submits:
            self.refuse_submits -= 1
            error = request_pb2.RequestError(code="disk_full", message="the disk is nearly full")
            return pb.SubmitAck(tag=tag, status=pb.SUBMIT_STATUS_UNAVAILABLE, error=error)
        if self.over_quota:
            self.over_quota -= 1
            error = request_pb2.RequestError(code="insufficient_quota", message="max_waiting_requests is 1")
            return pb.SubmitAck(tag=tag, status=pb.SUBMIT_STATUS_OVER_QUOTA, error=error)
        wrong = refusal(request)
        if wrong is not None:
            return pb.SubmitAck(tag=tag, status=pb.SUBMIT_STATUS_INVALID, error=wrong)
        known = self.by_key.get(request.idempotency_key)
        if known is not None:
            return pb.SubmitAck(tag=tag, status=pb.SUBMIT_STATUS_DUPLICATE, request_id=known)
        stored = request_pb2.Request()
        stored.CopyFrom(request)
        stored.request_id = f"r-{len(self.requests)}"
        self.by_key[request.idempotency_key] = stored.request_id
        async with self.changed:
            self.requests.append(stored)
            self.changed.notify_all()
        if not self.paused:
            await self.finish(stored)
        return pb.SubmitAck(tag=tag, status=pb.SUBMIT_STATUS_ACCEPTED, request_id=stored.request_id)

    async def finish(self, request: request_pb2.Request) -> None:
        """End a request with its answer."""
        result = self.answer(request)
        result.request_id = request.request_id
        result.batch = request.batch
        result.client_reference = request.client_reference
        result.idempotency_key = request.idempotency_key
        async with self.changed:
            self.results.append(result)
            self.changed.notify_all()

    async def finish_all(self) -> None:
        """End everything that waits."""
        ended = {result.request_id for result in self.results}
        for request in self.requests:
            if request.request_id not in ended:
                await self.finish(request)

    async def Submit(self, request_iterator: AsyncIterator[pb.SubmitRequest], context: Any) -> AsyncIterator[Any]:
        acked = 0
        self.submit_streams.append(dict(context.invocation_metadata()))
        async for frame in request_iterator:
            if frame.HasField("open"):
                yield pb.SubmitResponse(open=pb.SubmitOpen(store_id=self.store_id))
                continue
            self.frames.append(len(frame.batch.requests))
            acks = pb.SubmitAcks()
            for tagged in frame.batch.requests:
                ack = await self._accept(tagged.request, tagged.tag)
                if self.break_submit_after_acks is not None and acked >= self.break_submit_after_acks:
                    # The request is stored, its ack is lost: what a crash between fsync and send looks like.
                    self.break_submit_after_acks = None
                    if acks.acks:
                        yield pb.SubmitResponse(acks=acks)
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "killed")
                acks.acks.append(ack)
                acked += 1
            await self._maybe_unavailable(context)
            yield pb.SubmitResponse(acks=acks)

    async def SubmitUnary(self, request: pb.SubmitUnaryRequest, context: Any) -> pb.SubmitUnaryResponse:
        self.unary_submits += 1
        for place, one in enumerate(request.requests):
            wrong = refusal(one)
            if wrong is not None:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"requests[{place}].{wrong.message}")
        acks = [await self._accept(one, tag) for tag, one in enumerate(request.requests)]
        await self._maybe_unavailable(context)
        return pb.SubmitUnaryResponse(acks=acks)

    async def _maybe_unavailable(self, context: Any) -> None:
        if self.unavailable_calls:
            self.unavailable_calls -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")

    # ---- watches ----

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchResponse]:
        self.watches.append(request)
        wanted = set(request.request_ids.ids)
        unknown = wanted - {r.request_id for r in self.requests}
        if unknown:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"{min(unknown)}: no such request")
        cursor, sent = (0 if wanted else request.cursor), 0
        for response in self._told_at_once(request):
            yield response
        while True:
            for position, result in enumerate(self.results[cursor:], cursor + 1):
                cursor = position
                if (result.request_id in wanted) if wanted else result.batch == request.batch:
                    if self.break_watch_after_results is not None and sent >= self.break_watch_after_results:
                        self.break_watch_after_results = None
                        await context.abort(grpc.StatusCode.UNAVAILABLE, "killed")
                    sent += 1
                    event = pb.WatchEvent(result=pb.WatchResult(cursor=position, result=result))
                    yield pb.WatchResponse(events=[event])
            if self._over(request, wanted):
                return
            async with self.changed:
                while len(self.results) <= cursor:
                    await self.changed.wait()

    def _told_at_once(self, request: pb.WatchRequest) -> list[pb.WatchResponse]:
        first = pb.WatchResponse()
        if request.until_now:
            ended = {result.request_id for result in self.results}
            waiting = sum(r.batch == request.batch and r.request_id not in ended for r in self.requests)
            first.events.add().progress.waiting = waiting
        deltas = self.tokens if request.tokens else []
        return [first] + [pb.WatchResponse(events=[pb.WatchEvent(tokens=delta)]) for delta in deltas]

    def _over(self, request: pb.WatchRequest, wanted: set[str]) -> bool:
        ended = {result.request_id for result in self.results}
        if wanted:
            return wanted <= ended
        return request.until_now or (
            not request.follow and all(r.request_id in ended for r in self.requests if r.batch == request.batch)
        )

    async def Follow(
        self, request_iterator: AsyncIterator[pb.FollowRequest], context: Any
    ) -> AsyncIterator[pb.FollowResponse]:
        yield pb.FollowResponse()
        wanted: dict[str, bool] = {}
        named: list[str] = []
        self.follows.append(named)

        async def read() -> None:
            async for frame in request_iterator:
                async with self.changed:
                    wanted.update({item.request_id: item.tokens for item in frame.follow})
                    named.extend(item.request_id for item in frame.follow)
                    self.left += frame.leave
                    for name in frame.leave:
                        wanted.pop(name, None)
                    self.changed.notify_all()
            wanted[""] = False
            async with self.changed:
                self.changed.notify_all()

        reader = asyncio.create_task(read())
        try:
            while wanted.keys() != {""}:
                for response in self._told(wanted):
                    yield response
                    if self.break_follow_after_tokens is not None and response.events[0].HasField("tokens"):
                        self.break_follow_after_tokens -= 1
                        if self.break_follow_after_tokens == 0:
                            self.break_follow_after_tokens = None
                            await context.abort(grpc.StatusCode.UNAVAILABLE, "killed")
                async with self.changed:
                    if not self._told(dict(wanted)) and wanted.keys() != {""}:
                        await self.changed.wait()
        finally:
            reader.cancel()

    def _told(self, wanted: dict[str, bool]) -> list[pb.FollowResponse]:
        known = {request.request_id for request in self.requests}
        ended = {result.request_id: result for result in self.results}
        told = []
        for name in [name for name in wanted if name]:
            if wanted[name]:
                wanted[name] = False
                deltas = [delta for delta in self.tokens if delta.request_id == name]
                told += [pb.FollowResponse(events=[pb.WatchEvent(tokens=delta)]) for delta in deltas]
            if name in ended:
                del wanted[name]
                event = pb.WatchEvent(result=pb.WatchResult(cursor=1, result=ended[name]))
                told.append(pb.FollowResponse(events=[event]))
            elif name not in known:
                del wanted[name]
                told.append(pb.FollowResponse(unknown=[name]))
        return told

    # ---- the rest ----

    async def Get(self, request: pb.GetRequest, context: Any) -> pb.GetResponse:
        await self._maybe_unavailable(context)
        name = request.request_id or self.by_key.get(request.idempotency_key.key, "")
        for result in self.results:
            if result.request_id == name:
                return pb.GetResponse(request_id=name, state=pb.REQUEST_STATE_DONE, attempts=1, result=result)
        if any(r.request_id == name for r in self.requests):
            return pb.GetResponse(request_id=name, state=pb.REQUEST_STATE_READY)
        await context.abort(grpc.StatusCode.NOT_FOUND, f"{name}: no such request")
        raise AssertionError

    async def GetMany(self, request: pb.GetManyRequest, context: Any) -> pb.GetManyResponse:
        await self._maybe_unavailable(context)
        ended = {result.request_id: result for result in self.results}
        told = pb.GetManyResponse()
        for name in (self.by_key.get(key, "") for key in request.keys):
            state = pb.REQUEST_STATE_DONE if name in ended else pb.REQUEST_STATE_READY if name else None
            told.requests.add(request_id=name, state=state, result=ended.get(name))
        return told

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        known = {r.request_id for r in self.requests}
        ids = list(request.request_ids.ids)
        if request.batch:
            self.cancelled_batches.append(request.batch)
        ended = {result.request_id for result in self.results}
        living = [r for r in self.requests if r.batch == request.batch != "" and r.request_id not in ended]
        return pb.CancelResponse(
            cancelled=sum(i in known for i in ids) or len(living),
            not_cancelled=[i for i in ids if i not in known],
        )

    async def Delete(self, request: pb.DeleteRequest, context: Any) -> pb.DeleteResponse:
        self.deleted += request.request_ids.ids
        self.up_to.append(request.up_to if request.HasField("up_to") else None)
        return pb.DeleteResponse(deleted=len(request.request_ids.ids))

    async def Identify(self, request: pb.IdentifyRequest, context: Any) -> pb.IdentifyResponse:
        return pb.IdentifyResponse(role="open", tenant="default", all_channels=True)

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsResponse:
        await self._maybe_unavailable(context)
        batch = pb.ChannelStats(channel="batch", ready=3, ended_by_outcome=[0, 7, 0, 2])
        told = pb.StatsResponse(store_id=self.store_id, channels=[batch], dead=1, cursor=self.cursor)
        told.batch_channel = self.batch_channel
        return told

    async def ListDead(self, request: pb.ListDeadRequest, context: Any) -> pb.ListDeadResponse:
        start = int(request.page_token or 0)
        page = self.dead[start : start + 2]
        more = start + 2 < len(self.dead)
        return pb.ListDeadResponse(letters=page, next_page_token=str(start + 2) if more else "")

    async def RequeueDead(self, request: pb.RequeueDeadRequest, context: Any) -> pb.RequeueDeadResponse:
        known = {letter.request_id for letter in self.dead}
        ids = list(request.request_ids.ids)
        self.up_to.append(request.up_to if request.HasField("up_to") else None)
        requeued = len(known) if request.all else sum(i in known for i in ids)
        return pb.RequeueDeadResponse(requeued=requeued, not_dead=[i for i in ids if i not in known])

    async def Backup(self, request: pb.BackupRequest, context: Any) -> pb.BackupResponse:
        if request.name == "taken":
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "name: there is a backup taken already")
        return pb.BackupResponse(path=f"/backups/{request.name or 'now'}", store_id=self.store_id, waiting=3, results=7)

    async def Backlog(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.BacklogResponse]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no scheduler here")
        yield pb.BacklogResponse()

    async def Work(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.WorkResponse]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no worker here")
        yield pb.WorkResponse()


@asynccontextmanager
async def serving(queue: FakeQueue, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """Serve `queue` at `address`, on a free port unless told otherwise; yield its address."""
    server = grpc.aio.server()
    queue_pb2_grpc.add_QueueServiceServicer_to_server(queue, server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@contextmanager
def served(queue: FakeQueue) -> Iterator[str]:
    """Serve `queue` from another thread; yield its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    service = serving(queue)
    try:
        yield asyncio.run_coroutine_threadsafe(service.__aenter__(), loop).result(SOON_S)
    finally:
        asyncio.run_coroutine_threadsafe(service.__aexit__(None, None, None), loop).result(SOON_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
