"""Protobuf to the machine's messages, and its effects to protobuf."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterable
from sys import intern
from typing import Final, cast

from penstock.limits import MAX_NAME_BYTES
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2
from services.core.value import Value
from services.queue.core import records
from services.queue.core.effects import Announce, Deliver, Ended, Gone, PutResult, Recorded, View, Write
from services.queue.core.entry import Failure, LeaseRef, RequestMeta
from services.queue.core.lifecycle import Outcome, State
from services.queue.core.messages import (
    Claim,
    Complete,
    GiveBack,
    Message,
    Offer,
    Reject,
    Renew,
    SetWindow,
    Withdraw,
    WorkerOpened,
)
from services.rpc.encoding import fixed_tag, length_tag, number_field, number_tag, signed, text_field, varint, wrapped
from services.rpc.strict import BadInputError

PREFIX_BYTES = 256
"""Leading part of the prompt that `prefix_digest` covers: long enough to tell system prompts apart."""

WORKER_OUTCOMES: dict[int, Outcome] = {
    int(outcome): outcome for outcome in (Outcome.COMPLETED, Outcome.REJECTED, Outcome.CANCELLED, Outcome.EXPIRED)
}
"""What a worker may report; the queue alone decides that a request is dead."""

STATES = {
    State.READY: queue_pb2.REQUEST_STATE_READY,
    State.LEASED: queue_pb2.REQUEST_STATE_LEASED,
    State.STOPPING: queue_pb2.REQUEST_STATE_LEASED,
    State.DONE: queue_pb2.REQUEST_STATE_DONE,
    State.DEAD: queue_pb2.REQUEST_STATE_DEAD,
}


TRUE: Final = b"\x01"

_LEASE_REQUEST_ID: Final = length_tag(queue_pb2.LeaseRef, "request_id")
_LEASE_ATTEMPT: Final = number_tag(queue_pb2.LeaseRef, "attempt")
_LEASE_TOKEN: Final = number_tag(queue_pb2.LeaseRef, "fencing_token")
_REQUEST_ID: Final = length_tag(request_pb2.Request, "request_id")
_DELIVER: Final = length_tag(queue_pb2.QueueToWorker, "deliver")
_DELIVER_LEASE: Final = length_tag(queue_pb2.Deliver, "lease")
_DELIVER_REQUEST: Final = length_tag(queue_pb2.Deliver, "request")
_DELIVER_GRANT: Final = length_tag(queue_pb2.Deliver, "grant")
_DELIVER_ANNOUNCED: Final = length_tag(queue_pb2.Deliver, "announced")
_DELIVER_WATCHED: Final = number_tag(queue_pb2.Deliver, "watched")
_DELIVER_SUBMITTED: Final = number_tag(queue_pb2.Deliver, "submitted_unix_ns")
_RECORDED: Final = length_tag(queue_pb2.QueueToWorker, "recorded")
_RECORDED_LEASE: Final = length_tag(queue_pb2.Recorded, "lease")
_RECORDED_ACCEPTED: Final = number_tag(queue_pb2.Recorded, "accepted")
_ANNOUNCE: Final = length_tag(queue_pb2.QueueToScheduler, "announce")
_ANNOUNCE_REQUEST_ID: Final = length_tag(queue_pb2.Announce, "request_id")
_ANNOUNCE_CHANNEL: Final = length_tag(queue_pb2.Announce, "channel")
_ANNOUNCE_PRIORITY: Final = number_tag(queue_pb2.Announce, "priority")
_ANNOUNCE_POSITION: Final = number_tag(queue_pb2.Announce, "position")
_ANNOUNCE_ATTEMPT: Final = number_tag(queue_pb2.Announce, "attempt")
_ANNOUNCE_MODEL: Final = length_tag(queue_pb2.Announce, "model")
_ANNOUNCE_PROMPT_BYTES: Final = number_tag(queue_pb2.Announce, "prompt_bytes")
_ANNOUNCE_PROMPT_TOKENS: Final = number_tag(queue_pb2.Announce, "prompt_tokens")
_ANNOUNCE_MAX_TOKENS: Final = number_tag(queue_pb2.Announce, "max_tokens")
_ANNOUNCE_N: Final = number_tag(queue_pb2.Announce, "n")
_ANNOUNCE_CHAT: Final = number_tag(queue_pb2.Announce, "chat")
_ANNOUNCE_DEADLINE: Final = number_tag(queue_pb2.Announce, "deadline_unix_ns")
_ANNOUNCE_TRACEPARENT: Final = length_tag(queue_pb2.Announce, "traceparent")
_ANNOUNCE_SUBMITTED: Final = number_tag(queue_pb2.Announce, "submitted_unix_ns")
_ANNOUNCE_PREFIX_DIGEST: Final = fixed_tag(queue_pb2.Announce, "prefix_digest")
_ANNOUNCE_LAST_ATTEMPT: Final = number_tag(queue_pb2.Announce, "last_attempt")
_GONE: Final = length_tag(queue_pb2.QueueToScheduler, "gone")
_GONE_REQUEST_ID: Final = length_tag(queue_pb2.Gone, "request_id")
_GONE_REASON: Final = number_tag(queue_pb2.Gone, "reason")
_GONE_ATTEMPT: Final = number_tag(queue_pb2.Gone, "attempt")
_EVENT_RESULT: Final = length_tag(queue_pb2.WatchEvent, "result")
_CURSOR: Final = number_tag(queue_pb2.WatchResult, "cursor")
_RESULT: Final = length_tag(queue_pb2.WatchResult, "result")


# ---- requests and results ----


def meta_of(request: request_pb2.Request, payload_bytes: int) -> RequestMeta:
    """Return the metadata of a request, valid or not, whose encoding has `payload_bytes`."""
    kind = request.WhichOneof("prompt")
    sampling = request.sampling
    prompt = b""
    tokens = 0
    if kind == "token_ids":
        tokens = _tokens_left(len(request.token_ids.ids), sampling)
        prefix = array("I", request.token_ids.ids[: PREFIX_BYTES // 4]).tobytes()
    else:
        chat = request.chat
        prompt = (request.text if kind == "text" else chat.messages_json + chat.tools.tools_json).encode()
        prefix = prompt[:PREFIX_BYTES]
    return RequestMeta(
        # A backlog has few of these names: one string each instead of one for every request.
        tenant=intern(request.tenant),
        idempotency_key=request.idempotency_key,
        channel=intern(request.channel),
        model=intern(request.model),
        batch=intern(request.batch),
        priority=request.priority,
        deadline_ns=request.deadline_unix_ns,
        traceparent=request.traceparent,
        client_reference=request.client_reference,
        prompt_bytes=len(prompt),
        prompt_tokens=tokens,
        max_tokens=sampling.max_tokens,
        n=sampling.n if sampling.HasField("n") else 1,
        chat=kind == "chat",
        prefix_digest=int.from_bytes(hashlib.blake2b(prefix, digest_size=8).digest(), "big"),
        payload_bytes=payload_bytes,
    )


def _tokens_left(tokens: int, sampling: request_pb2.SamplingParams) -> int:
    """Return how many of a prompt's tokens the worker keeps; 0 if that is for the window of its model to say."""
    if not sampling.HasField("truncate_prompt_tokens"):
        return tokens
    most = sampling.truncate_prompt_tokens
    return min(tokens, most) if most > 0 else 0


MAX_TOLD_BYTES: Final = 64 * 1024
"""Of a result that a watcher gets without reading the store: what waits for a slow one stays small."""


class RunResult:
    """What a worker said of a run, and its encoding once the queue has written its own part into it, if it is small."""

    __slots__ = ("encoded", "message")

    def __init__(self, message: request_pb2.Result) -> None:
        """Take what the worker said."""
        self.message = message
        self.encoded = b""
        """As it is stored; empty until then, and of one that watchers have to read from the store."""


def encoded_result(put: PutResult) -> bytes:
    """Return the durable result: what the worker said, under the names the queue knows, which are written into it."""
    run = RunResult(request_pb2.Result()) if put.body is None else cast(RunResult, put.body)
    result, meta = run.message, put.meta
    result.request_id = put.request_id
    result.idempotency_key = meta.idempotency_key
    result.batch = meta.batch
    result.channel = meta.channel
    result.client_reference = meta.client_reference
    result.outcome = cast(request_pb2.Outcome.ValueType, int(put.outcome))
    result.attempts = put.attempts
    result.worker_id = put.worker_id
    timings = result.timings
    timings.submitted_unix_ns = meta.submitted_ns
    timings.completed_unix_ns = put.completed_ns
    if not timings.delivered_unix_ns:
        timings.delivered_unix_ns = put.delivered_ns
    if put.failure is not None:
        result.error.CopyFrom(error_of(put.failure))
    encoding = result.SerializeToString()
    if len(encoding) <= MAX_TOLD_BYTES:
        run.encoded = encoding
    return encoding


def result_write(put: PutResult) -> Write:
    """Return the store write of a result."""
    meta = put.meta
    head = records.ResultHead(put.completion_seq, put.completed_ns, meta.tenant, meta.idempotency_key, meta.batch)
    row = records.encode_result(head, encoded_result(put))
    return Write(records.RESULTS, records.seq_key(put.seq), row)


class StoredResult(Value):
    """A result as the store has it."""

    def __init__(self, cursor: int, body: bytes) -> None:
        """Take an encoded `Result`."""
        self.cursor, self.body = cursor, body

    def event(self) -> bytes:
        """Return the encoded WatchEvent of this result."""
        content = _CURSOR + varint(self.cursor) + wrapped(_RESULT, self.body)
        return wrapped(_EVENT_RESULT, content)

    def result(self) -> request_pb2.Result:
        """Return the result decoded."""
        return request_pb2.Result.FromString(self.body)


def told_result(ended: Ended) -> StoredResult | None:
    """Return the result of a request that has just ended, as `result_write` stored it; None if it must be read."""
    run = cast("RunResult | None", ended.body)
    if run is None or not run.encoded:
        return None
    return StoredResult(ended.completion_seq, run.encoded)


def error_code(ended: Ended) -> str:
    """Return the code of what a request ended of, as its result has it; that of its outcome if nobody gave one."""
    run = cast("RunResult | None", ended.body)
    code = ended.failure.code if ended.failure is not None else "" if run is None else run.message.error.code
    return code or ended.outcome.name.lower()


def read_result(row: bytes) -> StoredResult:
    """Return the result in a row of `results`, with its cursor."""
    return StoredResult(*records.split_result(row))


def error_of(failure: Failure) -> request_pb2.RequestError:
    """Return the wire's form of a failure."""
    return request_pb2.RequestError(code=failure.code, message=failure.message, param=failure.param)


def failure_of(error: request_pb2.RequestError) -> Failure:
    """Return the machine's form of an error."""
    return Failure(error.code, error.message, error.param)


def get_response(view: View) -> queue_pb2.GetResponse:
    """Return what Get says of a live request."""
    return queue_pb2.GetResponse(
        request_id=view.request_id,
        state=STATES[view.state],
        attempts=view.attempts,
        worker_id=view.worker_id if view.state in {State.LEASED, State.STOPPING} else "",
        last_error=view.last_error,
        channel=view.channel,
        client_reference=view.client_reference,
    )


# ---- the Work stream ----


def lease_of(lease: queue_pb2.LeaseRef) -> LeaseRef:
    """Return the machine's form of a lease's name."""
    return LeaseRef(lease.request_id, lease.attempt, lease.fencing_token)


def lease_ref(lease: LeaseRef) -> queue_pb2.LeaseRef:
    """Return the wire's form of a lease's name."""
    return queue_pb2.LeaseRef(request_id=lease.request_id, attempt=lease.attempt, fencing_token=lease.fencing_token)


def lease_bytes(lease: LeaseRef) -> bytes:
    """Return the encoded LeaseRef."""
    name = wrapped(_LEASE_REQUEST_ID, lease.request_id.encode())
    return name + _LEASE_ATTEMPT + varint(lease.attempt) + _LEASE_TOKEN + varint(lease.fencing_token)


def leases_of(leases: object) -> tuple[LeaseRef, ...]:
    """Return the machine's form of several leases' names."""
    return tuple(lease_of(lease) for lease in cast("Iterable[queue_pb2.LeaseRef]", leases))


def worker_opened(stream: int, opening: queue_pb2.WorkOpen) -> WorkerOpened:
    """Return the machine's form of the first message of a Work stream; raises BadInputError."""
    for name in ("worker_id", "instance_id"):
        if not getattr(opening, name):
            raise BadInputError(f"open.{name}: must not be empty")
    return WorkerOpened(stream, opening.worker_id, opening.instance_id, leases_of(opening.held))


def worker_message(stream: int, message: queue_pb2.WorkerToQueue) -> Message:
    """Return the machine's form of a later message of a Work stream, tokens excepted; raises BadInputError."""
    match message.WhichOneof("message"):
        case "claim":
            return Claim(stream, message.claim.request_id)
        case "offer":
            return _offer(stream, message.offer)
        case "withdraw":
            return Withdraw(stream, message.withdraw.grant)
        case "complete":
            return _complete(stream, message.complete)
        case "renew":
            return Renew(stream, leases_of(message.renew.leases))
        case "give_back":
            return GiveBack(stream, leases_of(message.give_back.leases))
        case "open":
            raise BadInputError("messages.open: only the first message of a stream may be `open`")
        case _:
            raise BadInputError("messages.message: none of the known messages is set")


def _offer(stream: int, offer: queue_pb2.Offer) -> Offer:
    if not 0 < len(offer.grant.encode()) <= MAX_NAME_BYTES:
        raise BadInputError(f"messages.offer.grant: must have 1 to {MAX_NAME_BYTES} bytes")
    return Offer(
        stream,
        offer.grant,
        offer.channel,
        offer.model,
        offer.chat,
        offer.most_prompt_bytes,
        offer.most_prompt_tokens,
        offer.most_output_tokens,
    )


MAX_USAGE_TOKENS = (1 << 32) - 1
"""Of one request: far more than its messages could hold, and so few that no sum over requests leaves a uint64."""


def _complete(stream: int, complete: queue_pb2.Complete) -> Complete:
    lease = lease_of(complete.lease)
    ending = complete.WhichOneof("ending")
    if ending == "failure":
        return Complete(stream, lease, None, failure_of(complete.failure), None)
    if ending is None:
        raise BadInputError("messages.complete.ending: exactly one of result and failure must be set")
    result = complete.result
    outcome = WORKER_OUTCOMES.get(result.outcome)
    if outcome is None:
        raise BadInputError(f"messages.complete.result.outcome: {result.outcome} is not an outcome a worker may report")
    usage = result.usage
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
        tokens = getattr(usage, name)
        if tokens > MAX_USAGE_TOKENS:
            text = f"{tokens} is more than a request can have ({MAX_USAGE_TOKENS})"
            raise BadInputError(f"messages.complete.result.usage.{name}: {text}")
    return Complete(stream, lease, outcome, None, RunResult(result))


def deliver(effect: Deliver, payload: bytes) -> bytes:
    """Return the encoded QueueToWorker with the request, stored as `payload`, and its lease."""
    name = effect.lease.request_id.encode()
    # A payload has no request_id: the one behind it counts.
    request = payload + wrapped(_REQUEST_ID, name)
    content = wrapped(_DELIVER_LEASE, lease_bytes(effect.lease)) + wrapped(_DELIVER_REQUEST, request)
    content += _DELIVER_SUBMITTED + varint(effect.submitted_ns)
    if effect.grant:
        announced = Announce(0, effect.lease.request_id, effect.seq, effect.lease.attempt, effect.meta)
        content += wrapped(_DELIVER_GRANT, effect.grant.encode())
        content += wrapped(_DELIVER_ANNOUNCED, _announced(announced))
    if effect.watched:
        content += _DELIVER_WATCHED + TRUE
    return wrapped(_DELIVER, content)


def recorded(effect: Recorded) -> bytes:
    """Return the encoded QueueToWorker that answers a Complete."""
    content = wrapped(_RECORDED_LEASE, lease_bytes(effect.lease))
    return wrapped(_RECORDED, content + _RECORDED_ACCEPTED + TRUE if effect.accepted else content)


# ---- the Backlog stream ----


def scheduler_message(stream: int, message: queue_pb2.SchedulerToQueue, channels: Collection[str]) -> Message:
    """Return the machine's form of a later message of a Backlog stream; raises BadInputError."""
    match message.WhichOneof("message"):
        case "window":
            return _window(stream, message.window, channels)
        case "reject":
            return Reject(stream, message.reject.request_id, failure_of(message.reject.error))
        case "open":
            raise BadInputError("messages.open: only the first message of a stream may be `open`")
        case _:
            raise BadInputError("messages.message: none of the known messages is set")


MAX_SERVED_MODELS: Final = 1024
"""Names of one window, as the protocol says: more than a fleet serves, and each of them may have that window."""


def _window(stream: int, window: queue_pb2.Window, channels: Collection[str]) -> SetWindow:
    if window.channel not in channels:
        known = ", ".join(sorted(channels))
        raise BadInputError(f"messages.window.channel: {window.channel!r} is unknown; known: {known}")
    served = tuple(window.served_models)
    if len(served) > MAX_SERVED_MODELS:
        raise BadInputError(f"messages.window.served_models: at most {MAX_SERVED_MODELS}, got {len(served)}")
    if any(len(model.encode()) > MAX_NAME_BYTES for model in served):
        raise BadInputError(f"messages.window.served_models: a name has at most {MAX_NAME_BYTES} bytes")
    return SetWindow(stream, window.channel, window.limit, served)


def announce(effect: Announce) -> bytes:
    """Return the encoded QueueToScheduler with the metadata of a waiting request."""
    return wrapped(_ANNOUNCE, _announced(effect))


def _announced(effect: Announce) -> bytes:
    """Return the encoded Announce."""
    meta = effect.meta
    content = text_field(_ANNOUNCE_REQUEST_ID, effect.request_id) + text_field(_ANNOUNCE_CHANNEL, meta.channel)
    content += number_field(_ANNOUNCE_PRIORITY, signed(meta.priority)) + number_field(_ANNOUNCE_POSITION, effect.seq)
    content += number_field(_ANNOUNCE_ATTEMPT, effect.attempt) + text_field(_ANNOUNCE_MODEL, meta.model)
    content += number_field(_ANNOUNCE_PROMPT_BYTES, meta.prompt_bytes)
    content += number_field(_ANNOUNCE_PROMPT_TOKENS, meta.prompt_tokens)
    content += number_field(_ANNOUNCE_MAX_TOKENS, meta.max_tokens) + number_field(_ANNOUNCE_N, meta.n)
    content += number_field(_ANNOUNCE_CHAT, meta.chat) + number_field(_ANNOUNCE_DEADLINE, meta.deadline_ns)
    content += text_field(_ANNOUNCE_TRACEPARENT, meta.traceparent)
    content += number_field(_ANNOUNCE_SUBMITTED, meta.submitted_ns)
    content += _ANNOUNCE_PREFIX_DIGEST + meta.prefix_digest.to_bytes(8, "little")
    return content + _ANNOUNCE_LAST_ATTEMPT + TRUE if effect.last_attempt else content


def gone(effect: Gone) -> bytes:
    """Return the encoded QueueToScheduler that tells that an announced request left its line."""
    content = wrapped(_GONE_REQUEST_ID, effect.request_id.encode())
    content += _GONE_REASON + varint(effect.reason.value) + _GONE_ATTEMPT + varint(effect.attempt)
    return wrapped(_GONE, content)
