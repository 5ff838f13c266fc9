"""From an HTTP request to a durable request of the queue, and back out if the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from penstock.client import Client
from penstock.errors import InvalidRequest, NotFound, PenstockError, ServiceError, Unavailable, refusal_of
from penstock.limits import MAX_REQUEST_BYTES
from penstock.openai.bodies import BodyError, ChatBody, CompletionBody, parse_body
from penstock.openai.convert import to_request
from penstock.openai.shape import Shape
from penstock.openai.spelling import as_spelt
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2 as pb
from services.gateway.abandoned import Abandoned, drawn_key
from services.gateway.extras import PREFER, RESPOND_ASYNC, Extras
from services.gateway.group import Group
from services.gateway.intake import Held
from services.gateway.limits import MAX_ABANDONED, MAX_TOGETHER_BYTES, SUBMIT_WINDOW_BYTES
from services.gateway.metrics import GatewayMetrics
from services.gateway.problem import Problem, given_as


@dataclass(frozen=True, slots=True)
class Wanted:
    """What its answer takes of a generation. All else is let go of once it is submitted: a request may wait for hours,
    and a body that was parsed takes many times what it took on the wire."""

    shape: Shape
    model: str
    stream: bool
    n: int
    streamed_usage: bool
    offers_tools: bool
    keep: bool
    """It goes on if the client goes away."""
    keyed: bool
    """It is the same when it is asked for again."""
    respond_async: bool
    """Its id is all that is answered."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One generation, understood."""

    body: ChatBody | CompletionBody
    shape: Shape
    request: pb.Request
    keep: bool
    respond_async: bool

    @property
    def wanted(self) -> Wanted:
        """What its answer takes."""
        body, request = self.body, self.request
        return Wanted(
            self.shape,
            request.model,
            bool(body.stream),
            body.n or 1,
            body.streamed_usage,
            body.offers_tools,
            self.keep,
            bool(request.idempotency_key),
            self.respond_async,
        )


@dataclass(frozen=True, slots=True)
class Submitted:
    """What became of one generation at the queue."""

    name: str
    """Request id that its client knows it by."""
    ids: tuple[str, ...]
    """Its requests, one for each prompt."""


def understand(url: str, content: dict[str, Any], extras: Extras, now_ns: int) -> Asked:
    """Return what is asked for by the body of `url` and the headers; raises Problem naming what is wrong."""
    try:
        body = parse_body(url, content, streams=True)
        request = to_request(body)
    except BodyError as error:
        raise Problem(400, str(error), error.param, error.code) from None
    except InvalidRequest as error:
        raise Problem(400, str(error), error.param, error.code) from None
    if extras.respond_async and body.stream:
        text = f"{PREFER}: {RESPOND_ASYNC} is for whole answers, and the body asks for a stream"
        raise Problem(400, text, PREFER, "unsupported_parameter")
    shape = Shape.of(body)
    extras.put_into(request, now_ns)
    request.client_reference = shape.to_reference()
    _check_size(request.ByteSize())
    return Asked(body, shape, request, extras.keep, extras.respond_async)


def _check_size(size_bytes: int) -> None:
    """Raise Problem if the queue cannot store a request of this size."""
    if size_bytes > MAX_REQUEST_BYTES:
        text = f"the request takes {size_bytes} bytes; at most {MAX_REQUEST_BYTES} can be stored"
        raise Problem(413, text, "", "request_too_large")


def _check_sizes(sizes_bytes: Sequence[int]) -> None:
    """Raise Problem if the requests of several prompts are too large, one of them or all together."""
    for size_bytes in sizes_bytes:
        _check_size(size_bytes)
    if (all_bytes := sum(sizes_bytes)) > MAX_TOGETHER_BYTES:
        count = f"{len(sizes_bytes)} prompts are as many requests, each of which has all the other fields"
        text = f"prompt: {count}: {all_bytes} bytes together; at most {MAX_TOGETHER_BYTES} are taken in one body"
        raise Problem(413, text, "prompt", "request_too_large")


class Admission:
    """Submits; what a client left behind is cancelled in the background."""

    def __init__(self, client: Client, metrics: GatewayMetrics, most: int = MAX_ABANDONED) -> None:
        """Talk to the queue through `client`; of more than `most` that it is to cancel some go on."""
        self._client = client
        self._abandoned = Abandoned(client, metrics, most)
        # The longer the queue is away, the less of what cannot be submitted may have come to it.
        self._unanswered = Abandoned(client, metrics, most, keeps_oldest=True)
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, asked: Asked, held: Held) -> Submitted:
        """Return what is durable now, its body no longer `held`. Raises Problem, or the client's errors.

        If the caller is cancelled meanwhile, it is cancelled once its id is known, unless it is to be kept.
        """
        submitting = asyncio.create_task(self._submit(asked))
        submitting.add_done_callback(lambda _: held.let_go())
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:
            self._in_background(self._undo(submitting, asked.keep))
            raise
        except InvalidRequest as error:
            text, field = as_spelt(str(error), error.param, asked.shape.spellings)
            name = given_as(field)
            raise Problem(400, text.replace(field, name, 1), name, error.code) from None

    async def knows(self, asked: Asked) -> bool:
        """Return whether something was submitted under the key of `asked` before: that is what answers it."""
        key, prompts = asked.request.idempotency_key, asked.body.prompts
        if not key:
            return False
        if len(prompts) > 1:
            key = Group.of(key, len(prompts)).key(0)
        try:
            await self._client.wire_get(queue_pb2.GetRequest(idempotency_key=queue_pb2.IdempotencyKey(key=key)))
        except NotFound:
            return False
        return True

    async def _submit(self, asked: Asked) -> Submitted:
        prompts = asked.body.prompts
        if len(prompts) <= 1:
            return await self._submit_one(asked.request)
        group = Group.of(asked.request.idempotency_key, len(prompts))
        _check_sizes(list(group.sizes_bytes(asked.request, prompts)))  # before the first of them is sent
        requests = group.requests(asked.request, prompts)
        ids = dict.fromkeys(range(len(prompts)), "")
        try:
            async with aclosing(self._client.submit_many(requests, window_bytes=SUBMIT_WINDOW_BYTES)) as acks:
                async for ack in acks:
                    if ack.error is not None:
                        raise refusal_of(ack.error.code, ack.error.message, ack.error.param)
                    ids[ack.index] = ack.request_id
        except PenstockError:
            if not asked.request.idempotency_key:
                # What of it is durable answers nobody, who was told no name for it; a key brings the next try to it.
                self._unanswered.add(group.name)
            raise
        return Submitted(group.name, tuple(ids.values()))

    async def _submit_one(self, request: pb.Request) -> Submitted:
        drawn = "" if request.idempotency_key else drawn_key()
        request.idempotency_key = request.idempotency_key or drawn
        try:
            request_id = await self._client.submit_request(request)
        except (Unavailable, ServiceError) as error:
            if drawn and not error.is_undone:
                self._unanswered.add(drawn)  # it may be durable, and answers nobody, who was told no name for it
            raise
        return Submitted(request_id, (request_id,))

    def abandon(self, request_id: str) -> None:
        """Cancel a request whose client has gone."""
        self._abandoned.add(request_id)

    async def settle(self, within_s: float) -> None:
        """Wait until what was abandoned is cancelled, or so long: a call to a queue that hangs ends much later."""
        try:
            async with asyncio.timeout(within_s):
                await asyncio.gather(*self._tasks, return_exceptions=True)
                await asyncio.gather(self._abandoned.settle(), self._unanswered.settle())
        except TimeoutError:
            self._abandoned.give_up()
            self._unanswered.give_up()

    async def _undo(self, submitting: asyncio.Task[Submitted], keep: bool) -> None:
        try:
            submitted = await submitting
        except (PenstockError, Problem):
            return
        if not keep:
            self.abandon(submitted.name)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
