"""`POST /v1/chat/completions` and `/v1/completions`: one generation, answered whole or as a stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry import trace
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from penstock.client import Client
from penstock.errors import NotFound, PenstockError, ServiceError, Unavailable
from penstock.following import Told
from penstock.openai.chunks import Chunks
from penstock.openai.jsontext import json_bytes
from penstock.openai.message import DivergedError
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2 as pb
from services.gateway.admission import Admission, Asked, Submitted, Wanted, understand
from services.gateway.doorman import Doorman
from services.gateway.extras import RESPOND_ASYNC, Extras, read_extras
from services.gateway.group import Gathered, JoinedChunks, body_of_all
from services.gateway.hangup import until_hangup
from services.gateway.intake import ClientGoneError, Held, Intake
from services.gateway.limits import CLIENT_CLOSED, KEEP_ALIVE_S
from services.gateway.lookup import Each, Lookup, pieces_of
from services.gateway.metrics import GatewayMetrics
from services.gateway.pages import Paged, Pages
from services.gateway.problem import NO_RETRY, Problem, of_error, of_result
from services.gateway.recent import Recent
from services.gateway.reply import LARGE_BYTES, Reply, events_of, json_of
from services.gateway.served import FRESH_S, Served, View
from services.gateway.vigil import Vigil
from services.logs import about
from services.telemetry import Telemetry, traceparent_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What every request is answered with."""

    client: Client
    admission: Admission
    intake: Intake
    served: Served
    metrics: GatewayMetrics
    telemetry: Telemetry
    pages: Pages = field(default_factory=Pages)
    recent: Recent = field(default_factory=Recent)
    doorman: Doorman = field(default_factory=Doorman)
    vigil: Vigil = field(default_factory=Vigil)


class Generation:
    """Answers one endpoint; an ASGI application."""

    def __init__(self, url: str, parts: Parts) -> None:
        """Take bodies of the endpoint `url`."""
        self._url = url
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        metrics = self._parts.metrics
        started_s = time.monotonic()
        exchange = _Exchange(self._url, self._parts, Reply(send), started_s)
        metrics.open_requests.inc()
        try:
            await exchange.answer(Headers(scope=scope), receive)
        finally:
            metrics.open_requests.dec()
            metrics.seconds.labels(self._url).observe(time.monotonic() - started_s)
            metrics.requests.labels(self._url, str(exchange.status)).inc()
            self._parts.recent.ended(exchange.request_id, exchange.status)


class _Exchange:
    """One HTTP request and its response."""

    def __init__(self, url: str, parts: Parts, reply: Reply, started_s: float) -> None:
        self._url = url
        self._parts = parts
        self._reply = reply
        self._started_s = started_s
        self._tenant = ""
        self._asked: Asked | None = None
        """Until it is submitted."""
        self._wanted: Wanted | None = None
        self._submitted = Submitted("", ())
        self.request_id = ""
        """The name of it, once it is durable."""
        self._failed_status = 0
        self._failed_of = ""
        """The code of what it failed of."""
        self._span: trace.Span = trace.INVALID_SPAN

    @property
    def status(self) -> int:
        """Status the request ended with: of a stream that broke, the one it would have had."""
        return self._failed_status or self._reply.status or CLIENT_CLOSED

    async def answer(self, headers: Headers, receive: Receive) -> None:
        """Answer, whatever happens."""
        try:
            await self._answer(headers, receive)
        except ClientGoneError:
            self._hung_up()
        except Problem as problem:
            self._leave_others()
            await self._tell(problem)
        except DivergedError:
            # Nobody leaves: it goes on, and so do the requests of other prompts, as their joined answer is to be had.
            self._parts.metrics.diverged.inc()
            again = "the request" if len(self._submitted.ids) == 1 else "the request of one prompt"
            text = f"{again} was started again and its answer differs from what was streamed"
            await self._tell(self._unanswered(500, text, "answer_restarted"))
        except PenstockError as error:
            if isinstance(error, NotFound):  # somebody has deleted one of them
                self._leave_others()
            await self._tell(self._of(error))
        except asyncio.CancelledError:
            await self._tell(self._unanswered(503, "the gateway is stopping", "gateway_stopping"))
            raise
        except Exception:
            log.exception("a request failed%s", self._where(), extra=about(self.request_id, traceparent_of(self._span)))
            await self._tell(self._unanswered(500, "the gateway failed", "internal_error"))
        finally:
            self._end_span()

    async def _answer(self, headers: Headers, receive: Receive) -> None:
        extras = read_extras(headers.items())
        self._span = self._start_span(extras)
        authorization = headers.get("authorization", "")
        # Before a body is read, which takes a share of its tenant's, and parsed, which takes time from all others.
        self._tenant = (await self._parts.doorman.let_in(authorization)).tenant
        with self._parts.intake.holding(self._tenant) as held:
            self._understand(await self._parts.intake.read_held(headers, receive, held), extras)
            async with until_hangup(receive):
                with self._parts.vigil.over(authorization):
                    served = await self._submit(held)
                    await self._answer_with(served)

    def _understand(self, content: dict[str, Any], extras: Extras) -> None:
        asked = understand(self._url, content, extras, time.time_ns())
        asked.request.traceparent = traceparent_of(self._span) or extras.traceparent
        asked.request.tracestate = extras.tracestate
        self._asked, self._wanted = asked, asked.wanted

    async def _submit(self, held: Held) -> str:
        """Submit what was asked for, and let go of it; return the name of the model that serves it, if known."""
        asked, self._asked = self._asked, None
        assert asked is not None, "it has been understood"
        view = await self._check_model(asked)
        self._submitted = await self._parts.admission.submit(asked, held.pass_on())
        self.request_id = self._submitted.name
        self._parts.recent.began(self.request_id, self._url, asked.request.model, asked.request.channel)
        self._reply.headers["x-request-id"] = self.request_id
        self._span.set_attribute("penstock.request.id", self.request_id)
        return view.model_of(asked.request.model)

    async def _answer_with(self, model: str) -> None:
        assert self._wanted is not None, "it has been understood"
        if self._wanted.respond_async:
            await self._promise()
        elif self._wanted.stream:
            await self._stream(self._wanted, model)
        else:
            await self._whole(self._wanted)

    async def _promise(self) -> None:
        """Say where the answer will be: whoever was told goes away, and the request goes on."""
        headers = {"location": f"/v1/requests/{self.request_id}", "preference-applied": RESPOND_ASYNC}
        await self._reply.json(202, {"id": self.request_id, "object": "request"}, headers)

    async def _check_model(self, asked: Asked) -> View:
        """Return what is served; raises Problem if the model is not, and the answer is not to be had without it."""
        try:
            return await self._parts.served.check(asked.request.model)
        except Problem:
            if not await self._parts.admission.knows(asked):
                raise
            return await self._parts.served.view()

    async def _whole(self, wanted: Wanted) -> None:
        gathered = await self._gather()
        if not gathered.large:
            await self._reply.whole(200, json_of(gathered.body(self.request_id, wanted.shape)))
            return
        page = self._page(self.request_id, gathered.size_bytes)
        pieces = pieces_of(
            page,
            lambda found: json_bytes(body_of_all(self.request_id, wanted.shape, results_of(found))),
            gathered.size_bytes,
        )
        async with aclosing(pieces):
            await self._reply.whole_in_pieces(pieces, lambda: page.line_bytes)

    async def _gather(self) -> Gathered:
        gathered = Gathered(self._submitted.ids)
        async with aclosing(self._told(tokens=False)) as told:
            async for events in told:
                gather(gathered, events)
                del events  # they may be large, and the next ones may be long in coming
                if gathered.whole:
                    break
        return gathered

    def _page(self, name: str, size_bytes: int) -> Paged[Each]:
        """Return what reads results of this size again, when there is room for them."""
        return Lookup(self._parts.client, self._parts.pages).page(name, self._tenant, size_bytes)

    def _told(self, tokens: bool) -> AsyncGenerator[Told, None]:
        """Return what the queue tells of all that was submitted; of large results that come unasked an outline."""
        ids, client = self._submitted.ids, self._parts.client
        if len(ids) == 1:
            return client.wire_events(ids[0], tokens, LARGE_BYTES)
        return client.wire_events_of(ids, tokens, LARGE_BYTES)

    async def _stream(self, wanted: Wanted, model: str) -> None:
        chunks: Chunks | JoinedChunks | None = None
        async with aclosing(self._told(tokens=True)) as told, self._kept_alive():
            async for events in told:
                if chunks is None:
                    check_completed(events)
                    chunks = await self._begun(wanted, model, events[-1])
                lines, large = told_now(chunks, events)
                del events  # a client may be long in taking what is told of them
                await self._reply.events(lines)
                for name, size_bytes in large.items():
                    await self._end_later(chunks, name, size_bytes)
        await self._reply.end()

    async def _end_later(self, chunks: Chunks | JoinedChunks, name: str, size_bytes: int) -> None:
        """Tell the rest of a request's result of this size, most of which has not been told, when there is room."""
        await self._reply.events(chunks.opening())
        ending = chunks.ending(name)
        pieces = pieces_of(
            self._page(name, size_bytes),
            lambda found: events_of(line for result in results_of(found) for line in ending(result)),
            size_bytes,
        )
        async with aclosing(pieces):
            await self._reply.event_in_pieces(pieces)

    async def _begun(self, wanted: Wanted, model: str, event: queue_pb2.WatchEvent) -> Chunks | JoinedChunks:
        """Return the writer of the chunks, made when there is a first one: only then is it known who answers."""
        if event.WhichOneof("event") == "result":
            model = event.result.result.model or model
        if not model:
            info = await self._parts.client.get(event.tokens.request_id)
            view = await self._parts.served.view(FRESH_S)
            is_adapter = wanted.model in view.adapters
            model = wanted.model if is_adapter else view.workers.get(info.worker_id, wanted.model)
        self._parts.metrics.first_token.labels(self._url).observe(time.monotonic() - self._started_s)
        shape, n, usage = wanted.shape, wanted.n, wanted.streamed_usage
        ids, name, created_s = self._submitted.ids, self.request_id, int(time.time())
        if len(ids) == 1:
            return Chunks(shape, name, created_s, model, n, usage, wanted.offers_tools)
        each = [Chunks(shape, name, created_s, model, n, False, first=number * n) for number in range(len(ids))]
        return JoinedChunks(each, ids, usage)

    @asynccontextmanager
    async def _kept_alive(self) -> AsyncIterator[None]:
        """Send a comment whenever the stream has been silent for KEEP_ALIVE_S."""

        async def comment() -> None:
            while True:
                self._reply.wrote = False
                await asyncio.sleep(KEEP_ALIVE_S)
                if not self._reply.wrote:
                    await self._reply.comment("waiting")

        task = asyncio.create_task(comment(), name="keep-alive")
        try:
            yield
        finally:
            task.cancel()

    def _hung_up(self) -> None:
        if self._reply.ended:
            return  # with its answer
        self._failed_status = CLIENT_CLOSED
        self._parts.metrics.hangups.inc()
        self._leave()

    def _leave(self) -> None:
        """Cancel what nobody waits for any more, unless it is to be kept."""
        if self.request_id and self._wanted is not None and not self._wanted.keep:
            self._parts.admission.abandon(self.request_id)

    def _leave_others(self) -> None:
        """One prompt's end without an answer is that of the whole."""
        if len(self._submitted.ids) > 1:
            self._leave()

    def _of(self, error: PenstockError) -> Problem:
        """Return what is told of a call to the queue that failed."""
        if self.request_id and isinstance(error, Unavailable):
            return self._unanswered(503, f"the queue does not answer now: {error}", "queue_unavailable")
        if self.request_id and isinstance(error, ServiceError):
            return self._unanswered(500, str(error), "internal_error")
        return of_error(error)

    def _unanswered(self, status: int, text: str, code: str) -> Problem:
        """Return what is told who hears no more of a request, if there is one: it goes on, and another would be paid
        for as well, unless a key makes it the same."""
        again = not self.request_id or (self._wanted is not None and self._wanted.keyed)
        return Problem(status, f"{text}{self._where()}", "", code, {} if again else NO_RETRY)

    async def _tell(self, problem: Problem) -> None:
        self._failed_status = problem.status
        self._failed_of = problem.error["code"] or str(problem.status)
        if not (self._reply.ended or self._reply.torn):
            await self._reply.problem(problem)

    def _where(self) -> str:
        return f"; GET /v1/requests/{self.request_id} has the answer" if self.request_id else ""

    def _start_span(self, extras: Extras) -> trace.Span:
        attributes = {"http.request.method": "POST", "url.path": self._url}
        return self._parts.telemetry.start(
            "gateway.request", extras.traceparent, time.time_ns(), attributes, trace.SpanKind.SERVER
        )

    def _end_span(self) -> None:
        """End it, by OpenTelemetry's conventions for HTTP: what a client did wrong is no error of the server's."""
        self._span.set_attribute("http.response.status_code", self.status)
        if self.status >= 500:
            self._span.set_attribute("error.type", self._failed_of)
            self._span.set_status(trace.StatusCode.ERROR)
        self._span.end()


def gather(gathered: Gathered, events: Told) -> None:
    """Add the results that came; raises Problem if one of the requests ended without an answer."""
    for event in events:
        result = completed(event.result.result)
        gathered.add(result, events.sizes_bytes[result.request_id])


def told_now(chunks: Chunks | JoinedChunks, events: Told) -> tuple[list[str], dict[str, int]]:
    """Return the chunks of what came, and the sizes of results of which so much is untold that it is to wait for room.

    Raises as `lines_of` does.
    """
    sizes_bytes = events.sizes_bytes
    large: dict[str, int] = {}
    lines: list[str] = []
    for event in events:
        if sizes_bytes and event.WhichOneof("event") == "result":
            result = event.result.result
            size_bytes = sizes_bytes[result.request_id]
            if size_bytes >= LARGE_BYTES and size_bytes * chunks.untold(completed(result)) >= LARGE_BYTES:
                large[result.request_id] = size_bytes
                continue
        lines += lines_of(chunks, event)
    return lines, large


def results_of(found: Each) -> list[pb.Result]:
    """Return what was read again; raises Problem if there is no answer any more."""
    return [completed(one.result) for one in found]


def lines_of(chunks: Chunks | JoinedChunks, event: queue_pb2.WatchEvent) -> list[str]:
    """Return the chunks of one event; raises Problem if a request ended without an answer, and DivergedError if a later
    attempt disagrees with what was told."""
    if event.WhichOneof("event") == "tokens":
        return chunks.of_delta(event.tokens)
    return chunks.of_result(completed(event.result.result))


def check_completed(events: Sequence[queue_pb2.WatchEvent]) -> None:
    """Raise Problem if one of the requests ended without an answer."""
    for event in events:
        if event.WhichOneof("event") == "result":
            completed(event.result.result)


def completed(result: pb.Result) -> pb.Result:
    """Return `result`; raises Problem if the request ended without an answer."""
    if result.outcome != pb.OUTCOME_COMPLETED:
        raise of_result(result)
    return result
