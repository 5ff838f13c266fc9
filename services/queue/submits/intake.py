"""Submits on their way in: check, post to the committer, and turn what became of them into acks in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from opentelemetry.trace import StatusCode

from penstock.errors import CHANNEL_DENIED, DISK_FULL, STORE_UNAVAILABLE
from penstock.names import BATCH_CHANNEL
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2
from penstock.trace_context import parent_of, state_of
from services.auth.caller import CALLER, Caller
from services.auth.keyring import NotAllowedError, Reason
from services.clock import Clock
from services.core.value import Value
from services.queue import wire
from services.queue.committer import Committer, RefusedError
from services.queue.core import records
from services.queue.core.effects import Submitted
from services.queue.core.entry import Failure, RequestMeta
from services.queue.core.messages import NewRequest, Submit
from services.queue.core.quotas import OVER_QUOTA
from services.queue.items import Item, Lookup
from services.queue.metrics import BEYOND_QUOTA, INVALID, UNAVAILABLE, QueueMetrics
from services.queue.storage.store import Store, StoreError
from services.queue.submits.torn import Piece, Undecoded
from services.queue.submits.turns import Source, weight_of
from services.queue.submits.validate import InvalidRequestError, check
from services.rpc.strict import BadInputError
from services.telemetry import Telemetry, names_trace_of, traceparent_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span


Fate: TypeAlias = tuple[str, bool, Failure | None]
"""Name of a request, whether it is new, and why it was not stored if it was not."""


class _Taken(Value):
    """One request of a frame: refused, or on its way to the disk."""

    def __init__(self, tag: int, failure: Failure | None) -> None:
        self.tag, self.failure = tag, failure


class Taking:
    """Requests of one frame or call that are being checked."""

    def __init__(self, all_or_none: bool) -> None:
        """Have none yet; with `all_or_none` they are stored together or not at all."""
        self.all_or_none = all_or_none
        self.taken: list[_Taken] = []
        self.good: list[NewRequest] = []
        self.spans: list[Span] = []
        """Of the good ones, if there are spans."""


class Frame:
    """The requests that came together, and their acks to be."""

    def __init__(self, taken: list[_Taken], answer: asyncio.Future[Submitted] | None) -> None:
        """Wait for `answer`, which covers the requests of `taken` that were not refused."""
        self._taken = taken
        self._answer = answer

    def on_durable(self, call: Callable[[], None]) -> None:
        """Have `call` called when the fate of the frame is known, also if nobody waits for the acks any more."""
        if self._answer is None:
            call()
        else:
            self._answer.add_done_callback(lambda _: call())

    async def acks(self) -> list[queue_pb2.SubmitAck]:
        """Return the acks, in order, once everything accepted is durable."""
        refusal: Failure | None = None
        durable: list[Fate] = []
        if self._answer is not None:
            try:
                # What is to be stored is stored, and counted until then, also if the caller goes meanwhile.
                answer = await asyncio.shield(self._answer)
                durable = [(name, new, answer.refused.get(place)) for place, (name, new) in enumerate(answer.acks)]
            except RefusedError as error:
                refusal = Failure(_code_of(error), str(error))
        fates = iter(durable)
        return [self._ack(taken, refusal, fates) for taken in self._taken]

    def _ack(self, taken: _Taken, refusal: Failure | None, fates: Iterator[Fate]) -> queue_pb2.SubmitAck:
        ack = queue_pb2.SubmitAck(tag=taken.tag)
        if taken.failure is not None:
            ack.status = queue_pb2.SUBMIT_STATUS_INVALID
            ack.error.CopyFrom(wire.error_of(taken.failure))
        elif refusal is not None:
            ack.status = queue_pb2.SUBMIT_STATUS_UNAVAILABLE
            ack.error.CopyFrom(wire.error_of(refusal))
        else:
            ack.request_id, new, beyond = next(fates)
            ack.status = queue_pb2.SUBMIT_STATUS_ACCEPTED if new else queue_pb2.SUBMIT_STATUS_DUPLICATE
            if beyond is not None:
                waits = beyond.code == OVER_QUOTA
                ack.status = queue_pb2.SUBMIT_STATUS_OVER_QUOTA if waits else queue_pb2.SUBMIT_STATUS_INVALID
                ack.error.CopyFrom(wire.error_of(beyond))
        return ack


class Intake:
    """Takes frames of submitted requests."""

    def __init__(
        self,
        committer: Committer,
        channels: tuple[str, ...],
        default_channel: str,
        clock: Clock,
        telemetry: Telemetry,
        metrics: QueueMetrics,
    ) -> None:
        """Post to `committer`; requests without a channel go to `default_channel`."""
        self._committer = committer
        self._channels = frozenset(channels)
        self._default_channel = default_channel
        self._clock = clock
        self._telemetry = telemetry
        self._metrics = metrics

    def reconfigure(self, channels: Iterable[str], default_channel: str) -> None:
        """Take requests for these channels alone from now on."""
        self._channels = frozenset(channels)
        self._default_channel = default_channel

    def batch_channel(self) -> str:
        """Return the channel for a batch of the caller's for which nobody has named one; empty if it may use none."""
        caller = CALLER.get()
        for channel in (BATCH_CHANNEL, self._default_channel, *sorted(self._channels)):
            if channel in self._channels and caller.may_use(channel):
                return channel
        return ""

    def take(self, call: int, tagged: Sequence[tuple[int, request_pb2.Request]]) -> Frame:
        """Check the requests and post the good ones; those of one `call` are stored in the order they came in."""
        taking = Taking(False)
        self.check(taking, tagged)
        return self.post(call, taking)

    def take_torn(self, call: int, pieces: Sequence[Piece]) -> Frame:
        """Do the same with requests of a frame that could not be decoded as a whole."""
        taking = Taking(False)
        for piece in pieces:
            if isinstance(piece, Undecoded):
                self._metrics.refused_submits.labels(INVALID).inc()
                taking.taken.append(_Taken(piece.tag, piece.failure))
            else:
                self.check(taking, [(piece.tag, piece.request)])
        return self.post(call, taking)

    def check(self, taking: Taking, tagged: Sequence[tuple[int, request_pb2.Request]]) -> None:
        """Add requests, checked, to what is being taken.

        If that is all or none, raises BadInputError or NotAllowedError about the first bad one.
        """
        caller = CALLER.get()
        now_ns = self._clock.now_ns()
        for tag, request in tagged:
            try:
                new = self._checked(request, caller)
            except InvalidRequestError as error:
                self._metrics.refused_submits.labels(INVALID).inc()
                if error.failure.code == CHANNEL_DENIED and not taking.all_or_none:
                    # As the guard counts it when it ends a call for the same reason.
                    self._metrics.auth.refused.labels(Reason.CHANNEL).inc()
                if taking.all_or_none:
                    raise _whole_refusal(error, tag) from None
                taking.taken.append(_Taken(tag, error.failure))
                continue
            if self._telemetry.enabled:
                span = self._persist_span(new.meta, now_ns)
                taking.spans.append(span)
                new = _traced(new, request, span)
            taking.good.append(new)
            taking.taken.append(_Taken(tag, None))

    def post(self, call: int, taking: Taking) -> Frame:
        """Post the good ones of what was checked; those of one `call` are stored in the order they came in."""
        good, spans = taking.good, taking.spans
        source = (CALLER.get().tenant, call)
        answer = self._post(source, tuple(good), taking.all_or_none) if good else None
        if answer is not None:
            answer.add_done_callback(lambda done: self._note_fate(done, len(good), spans))
        return Frame(taking.taken, answer)

    def _post(self, source: Source, good: tuple[NewRequest, ...], all_or_none: bool) -> asyncio.Future[Submitted]:
        weight = weight_of(len(good), sum(len(new.payload) for new in good))
        batches = {new.meta.batch_key for new in good if new.meta.batch}
        return self._committer.submit(source, weight, lambda ticket: submit_item(ticket, good, all_or_none), batches)

    def _checked(self, request: request_pb2.Request, caller: Caller) -> NewRequest:
        """Fill in the channel and the tenant, and return what is to be stored; raises InvalidRequestError."""
        if not request.channel:
            request.channel = self._default_channel
        if not request.tenant:
            request.tenant = caller.tenant
        _leave_out_malformed(request)
        payload = request.SerializeToString()
        meta = wire.meta_of(request, len(payload))
        check(request, meta, self._channels)
        check_caller(meta, caller)
        return NewRequest(meta, payload)

    def _persist_span(self, meta: RequestMeta, now_ns: int) -> Span:
        """Start the span of persisting; it is the root of the trace if the client sent none."""
        attributes = {"penstock.channel": meta.channel, "penstock.tenant": meta.tenant}
        return self._telemetry.start("queue.persist", meta.traceparent, now_ns, attributes)

    def _note_fate(self, answer: asyncio.Future[Submitted], count: int, spans: list[Span]) -> None:
        """Count what was refused and end the spans, whoever still listens: what is stored is run without its client."""
        # Reading the exception also keeps asyncio from reporting it when the client has gone.
        if answer.cancelled():
            return
        if answer.exception() is not None:
            self._metrics.refused_submits.labels(UNAVAILABLE).inc(count)
        elif answer.result().refused:
            for failure in answer.result().refused.values():
                cause = BEYOND_QUOTA if failure.code == OVER_QUOTA else INVALID
                self._metrics.refused_submits.labels(cause).inc()
        if spans:
            _end_spans(spans, answer, self._clock.now_ns())


def _end_spans(spans: list[Span], answer: asyncio.Future[Submitted], now_ns: int) -> None:
    error = answer.exception()
    for place, span in enumerate(spans):
        if error is not None:
            code = _code_of(error)
            span.set_status(StatusCode.ERROR, code)
        else:
            name, is_new = answer.result().acks[place]
            if name:
                span.set_attribute("penstock.request.id", name)
                if not is_new:  # which is why this trace ends here
                    span.set_attribute("penstock.duplicate", True)
            refusal = answer.result().refused.get(place)  # the client's own doing, and so no error
            code = "" if refusal is None else refusal.code
        if code:
            span.set_attribute("error.type", code)
        span.end(end_time=now_ns)


def _code_of(error: BaseException) -> str:
    return DISK_FULL if isinstance(error, RefusedError) and error.disk_full else STORE_UNAVAILABLE


def _leave_out_malformed(request: request_pb2.Request) -> None:
    """Leave out of a trace's context what cannot be read or is too long: it is no reason to refuse a request."""
    if request.traceparent:
        request.traceparent = parent_of(request.traceparent)
    if request.tracestate:
        request.tracestate = state_of(request.tracestate) if request.traceparent else ""


def _traced(new: NewRequest, request: request_pb2.Request, span: Span) -> NewRequest:
    """Return what is to be stored of a request that belongs to a trace, if need be to the one that `span` begins.

    It begins one too where the client sent something that names no trace; that is left out with its tracestate.
    """
    if names_trace_of(span, new.meta.traceparent):
        return new
    request.ClearField("tracestate")
    request.traceparent = traceparent_of(span)
    payload = request.SerializeToString()
    return NewRequest(new.meta.replace(traceparent=request.traceparent, payload_bytes=len(payload)), payload)


def check_caller(meta: RequestMeta, caller: Caller) -> None:
    """Raise InvalidRequestError if `caller` may not submit this for its tenant and in its channel."""
    if meta.tenant != caller.tenant and (caller.role is not None or caller.sees is not None):
        raise InvalidRequestError("tenant", f"is not {caller.tenant}, for whom this call is made; leave it empty")
    if not caller.may_use(meta.channel):
        allowed = ", ".join(sorted(caller.channels or ())) or "none"
        text = f"{meta.channel!r} is not for this key; it may use: {allowed}"
        raise InvalidRequestError("channel", text, CHANNEL_DENIED)


def _whole_refusal(error: InvalidRequestError, tag: int) -> BadInputError | NotAllowedError:
    """Return what ends a call of which one request is refused."""
    if error.failure.code == CHANNEL_DENIED:
        return NotAllowedError(Reason.CHANNEL, f"requests[{tag}].{error}")
    return BadInputError(f"requests[{tag}].{error}")


def submit_item(ticket: int, requests: tuple[NewRequest, ...], together: bool = False) -> Item:
    """Return the submit itself, or a look-up of its idempotency keys first if it has any."""
    named = [index for index, new in enumerate(requests) if new.meta.idempotency_key]
    if not named:
        return Submit(ticket, requests, together)
    metas = [requests[index].meta for index in named]
    keys = [records.idempotency_key(meta.tenant, meta.idempotency_key) for meta in metas]

    def glance(store: Store) -> Submit | None:
        try:
            known = any(store.may_hold(records.IDEMPOTENCY, key) for key in keys)
        except StoreError:
            return None  # what is wrong is for `read` to say
        return None if known else Submit(ticket, requests, together)

    def read(store: Store) -> Submit:
        looked_up = list(requests)
        for index, row in zip(named, store.get_many(records.IDEMPOTENCY, keys), strict=True):
            if row is not None:
                looked_up[index] = requests[index].replace(known_seq=records.seq_of(row))
        return Submit(ticket, tuple(looked_up), together)

    return Lookup(ticket, read, glance, submits=True)
