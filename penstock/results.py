"""What the client hands back: results, tokens and states as typed objects, named and numbered as in the protos."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from penstock.queue.v1 import queue_pb2 as queue_pb
from penstock.request.v1 import request_pb2 as pb


class Outcome(IntEnum):
    """How a request ended."""

    COMPLETED = pb.OUTCOME_COMPLETED
    REJECTED = pb.OUTCOME_REJECTED
    CANCELLED = pb.OUTCOME_CANCELLED
    EXPIRED = pb.OUTCOME_EXPIRED
    DEAD = pb.OUTCOME_DEAD


class FinishReason(IntEnum):
    """Why one completion stopped; UNSPECIFIED also for what only a newer queue has a name for."""

    UNSPECIFIED = pb.FINISH_REASON_UNSPECIFIED
    STOP = pb.FINISH_REASON_STOP
    LENGTH = pb.FINISH_REASON_LENGTH
    ABORT = pb.FINISH_REASON_ABORT
    ERROR = pb.FINISH_REASON_ERROR
    REPETITION = pb.FINISH_REASON_REPETITION
    TOOL_CALLS = pb.FINISH_REASON_TOOL_CALLS

    @classmethod
    def _missing_(cls, value: object) -> FinishReason | None:
        return cls.UNSPECIFIED if isinstance(value, int) else None


class RequestState(IntEnum):
    """Where a request is in its life."""

    READY = queue_pb.REQUEST_STATE_READY
    LEASED = queue_pb.REQUEST_STATE_LEASED
    DONE = queue_pb.REQUEST_STATE_DONE
    DEAD = queue_pb.REQUEST_STATE_DEAD


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of one token; `top` holds the most likely ones at its position."""

    token_id: int
    token: str
    logprob: float
    rank: int
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the n completions of a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_string: str = ""
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    content: str | None = None
    """What of `text` the model says; None if it says nothing, or if no parser read the answer as a message."""
    reasoning: str | None = None
    """What of `text` the model thinks; None if it thought nothing, or if no parser told it apart."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None
    """Of the completion's; None if no reasoning parser counted them."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went, Unix time in nanoseconds; 0 where unknown."""

    submitted_unix_ns: int = 0
    delivered_unix_ns: int = 0
    engine_started_unix_ns: int = 0
    first_token_unix_ns: int = 0
    last_token_unix_ns: int = 0
    completed_unix_ns: int = 0


@dataclass(frozen=True, slots=True)
class Credits:
    """What became of a request's credits on the worker that ended it, in KV-cache blocks; all 0 if none did."""

    granted_unix_ns: int = 0
    """When the worker got the grant, Unix time in nanoseconds."""
    booked_blocks: int = 0
    settled_blocks: int = 0
    """Held after the tokenizer ACK; 0 if the prompt was never counted."""
    released_blocks: int = 0
    """Held until the completion ACK: more than settled if the reservation followed the output."""
    tokenizer_acks: int = 0


@dataclass(frozen=True, slots=True)
class RequestError:
    """What was wrong with a request, in the words of the OpenAI error object."""

    code: str
    message: str
    param: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """The durable end of a request. `cursor` resumes a watch of its batch after it (0 outside a watch)."""

    request_id: str
    outcome: Outcome
    choices: tuple[Choice, ...] = ()
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    error: RequestError | None = None
    idempotency_key: str = ""
    batch: str = ""
    channel: str = ""
    client_reference: str = ""
    attempts: int = 0
    worker_id: str = ""
    model: str = ""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    prompt_text: str = ""
    preemptions: int = 0
    cursor: int = 0
    credits: Credits = field(default_factory=Credits)

    @property
    def text(self) -> str:
        """Text of the first completion; empty if there is none."""
        return self.choices[0].text if self.choices else ""

    @property
    def reasoning(self) -> str | None:
        """Reasoning of the first completion; None if there is none, or if no parser told it apart."""
        return self.choices[0].reasoning if self.choices else None

    @property
    def completed(self) -> bool:
        """Whether the request was generated to a finish reason."""
        return self.outcome is Outcome.COMPLETED


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one completion of a running request; a higher attempt starts again from offset 0."""

    request_id: str
    attempt: int
    index: int
    offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """Requests of a watched batch that wait or run."""

    waiting: int
    running: int


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """State of one request, and its result once it has ended."""

    request_id: str
    state: RequestState
    attempts: int
    worker_id: str
    last_error: str
    channel: str
    result: Result | None


@dataclass(frozen=True, slots=True)
class Submitted:
    """The fate of one request of `submit_many`: `index` counts the requests from 0; `error` is set if refused.

    `duplicate` says that its idempotency key, which was given, was known: by an earlier submit, or by one of this very
    call whose answer was lost.
    """

    index: int
    request_id: str
    duplicate: bool = False
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class Cancelled:
    """What a cancel did: waiting requests that ended, running ones being aborted, names it did not apply to.

    Of a batch at least so many: the call is repeated while the queue is away, and the last attempt is counted.
    """

    cancelled: int
    aborting: int
    not_cancelled: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A request whose attempts are used up."""

    request_id: str
    channel: str
    batch: str
    attempts: int
    last_error: str
    died_unix_ns: int


@dataclass(frozen=True, slots=True)
class Requeued:
    """What a requeue did: how many dead letters wait again, and names that were none."""

    requeued: int
    not_dead: tuple[str, ...]


def result_from(message: pb.Result, cursor: int = 0) -> Result:
    """Return the wire message as a Result."""
    return Result(
        request_id=message.request_id,
        outcome=Outcome(message.outcome),
        choices=tuple(_choice(choice) for choice in message.choices),
        usage=_usage(message.usage),
        timings=_timings(message.timings),
        error=error_from(message.error) if message.HasField("error") else None,
        idempotency_key=message.idempotency_key,
        batch=message.batch,
        channel=message.channel,
        client_reference=message.client_reference,
        attempts=message.attempts,
        worker_id=message.worker_id,
        model=message.model,
        prompt_logprobs=_logprobs(message.prompt_logprobs),
        prompt_text=message.prompt_text,
        preemptions=message.preemptions,
        cursor=cursor,
        credits=_credits(message.credits),
    )


def tokens_from(message: pb.TokenDelta) -> TokenDelta:
    """Return the wire message as a TokenDelta."""
    return TokenDelta(
        message.request_id,
        message.attempt,
        message.index,
        message.offset,
        tuple(message.token_ids),
        message.text,
        _logprobs(message.logprobs),
    )


def info_from(message: queue_pb.GetResponse) -> RequestInfo:
    """Return the wire message as a RequestInfo."""
    return RequestInfo(
        message.request_id,
        RequestState(message.state),
        message.attempts,
        message.worker_id,
        message.last_error,
        message.channel,
        result_from(message.result) if message.HasField("result") else None,
    )


def error_from(message: pb.RequestError) -> RequestError:
    """Return the wire message as a RequestError."""
    return RequestError(message.code, message.message, message.param)


def _choice(message: pb.Choice) -> Choice:
    return Choice(
        message.index,
        message.text,
        tuple(message.token_ids),
        FinishReason(message.finish_reason),
        message.stop_string,
        message.stop_token_id if message.HasField("stop_token_id") else None,
        _logprobs(message.logprobs),
        message.message.content if message.message.HasField("content") else None,
        message.message.reasoning if message.message.HasField("reasoning") else None,
    )


def _usage(message: pb.Usage) -> Usage:
    return Usage(
        message.prompt_tokens,
        message.completion_tokens,
        message.cached_tokens,
        message.reasoning_tokens if message.HasField("reasoning_tokens") else None,
    )


def _timings(message: pb.Timings) -> Timings:
    return Timings(
        message.submitted_unix_ns,
        message.delivered_unix_ns,
        message.engine_started_unix_ns,
        message.first_token_unix_ns,
        message.last_token_unix_ns,
        message.completed_unix_ns,
    )


def _credits(message: pb.Credits) -> Credits:
    return Credits(
        message.granted_unix_ns,
        message.booked_blocks,
        message.settled_blocks,
        message.released_blocks,
        message.tokenizer_acks,
    )


def _logprobs(messages: Iterable[pb.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(m.token_id, m.token, m.logprob, m.rank, _logprobs(m.top)) for m in messages)
