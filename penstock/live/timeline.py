"""Where the time and the credits of one request went, part by part."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2 as pb

STATES = {
    queue_pb2.REQUEST_STATE_READY: "waiting",
    queue_pb2.REQUEST_STATE_LEASED: "running",
    queue_pb2.REQUEST_STATE_DEAD: "dead",
}
"""How a request that has no outcome of its own to tell is called."""

OUTCOMES = {
    pb.OUTCOME_COMPLETED: "completed",
    pb.OUTCOME_REJECTED: "rejected",
    pb.OUTCOME_CANCELLED: "cancelled",
    pb.OUTCOME_EXPIRED: "expired",
    pb.OUTCOME_DEAD: "dead",
}


@dataclass(frozen=True, slots=True)
class Part:
    """What the request did for a while; milliseconds since its submit was durable."""

    name: str
    """wait, grant, tokenize, prefill, decode or record."""
    from_ms: float
    to_ms: float


@dataclass(frozen=True, slots=True)
class Ack:
    """A moment at which the ledger's blocks for the request changed."""

    name: str
    """grant, tokenizer ACK, later ACKs or completion ACK."""
    at_ms: float | None
    """None if the moment is not known: between the ACK before and the one after."""
    blocks: int
    """Held from then on."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request. Of one that has not ended only the state is known."""

    request_id: str
    status: str
    channel: str
    worker: str
    model: str
    attempts: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    error: str
    submitted_unix_ms: int
    total_ms: float
    parts: tuple[Part, ...]
    """In order and without gaps, as far as the request came."""
    acks: tuple[Ack, ...]


def status_of(found: queue_pb2.GetResponse) -> str:
    """Return the state of a request in one word."""
    return STATES.get(found.state) or OUTCOMES.get(found.result.outcome, "unknown")


def timeline_of(found: queue_pb2.GetResponse) -> Timeline:
    """Return the timeline of a request."""
    result = found.result
    moments = _moments(result)
    return Timeline(
        request_id=found.request_id,
        status=status_of(found),
        channel=found.channel,
        worker=found.worker_id or result.worker_id,
        model=result.model,
        attempts=found.attempts or result.attempts,
        preemptions=result.preemptions,
        prompt_tokens=result.usage.prompt_tokens,
        cached_tokens=result.usage.cached_tokens,
        completion_tokens=result.usage.completion_tokens,
        error=result.error.message or found.last_error,
        submitted_unix_ms=result.timings.submitted_unix_ns // 1_000_000,
        total_ms=moments[-1][1] if moments else 0.0,
        parts=tuple(
            Part(name, start, end)
            for (name, end), start in zip(moments, [0.0, *(at for _, at in moments)], strict=False)
        ),
        acks=_acks(result, dict(moments)),
    )


def _moments(result: pb.Result) -> list[tuple[str, float]]:
    """Return the parts the request went through with the end of each, in milliseconds since its submit.

    The clocks of queue and worker may differ: an end before the one before is moved up to it, so no part is negative.
    """
    timings = result.timings
    if not timings.submitted_unix_ns or not timings.completed_unix_ns:
        return []
    ends = [
        ("wait", result.credits.granted_unix_ns),
        ("grant", timings.delivered_unix_ns),
        ("tokenize", timings.engine_started_unix_ns),
        ("prefill", timings.first_token_unix_ns),
        ("decode", timings.last_token_unix_ns),
    ]
    known = [(name, end) for name, end in ends if end]
    # A request that no worker ended did nothing but wait, until it was over.
    known.append(("record" if known else "wait", timings.completed_unix_ns))
    moments: list[tuple[str, float]] = []
    latest = 0.0
    for name, end in known:
        latest = max(latest, (end - timings.submitted_unix_ns) / 1e6)
        moments.append((name, latest))
    return moments


def _acks(result: pb.Result, ends_ms: dict[str, float]) -> tuple[Ack, ...]:
    if not result.HasField("credits"):
        return ()
    spent = result.credits
    acks = [Ack("grant", ends_ms.get("wait"), spent.booked_blocks)]
    if spent.tokenizer_acks:
        acks.append(Ack("tokenizer ACK", ends_ms.get("tokenize"), spent.settled_blocks))
    if spent.tokenizer_acks > 1:
        acks.append(Ack(f"{spent.tokenizer_acks - 1} later ACKs", None, spent.released_blocks))
    # The worker sends it when the engine is done, or before it records that there was nothing to run.
    last = next((ends_ms[name] for name in ("decode", "prefill", "tokenize", "grant") if name in ends_ms), None)
    acks.append(Ack("completion ACK", last, 0))
    return tuple(acks)
