"""What the machine answers: writes for the store, and what to say once they are durable, some of it before.

Streams and tickets are numbers the shell gave out.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from services.core.value import Value
from services.queue.core.entry import Entry, Failure, LeaseRef, RequestMeta
from services.queue.core.lifecycle import Outcome, State


class Write(Value):
    """Put a row, or delete it if `value` is None."""

    def __init__(self, family: str, key: bytes, value: bytes | None) -> None:
        self.family, self.key, self.value = family, key, value


class PutResult(Value):
    """Put a result; the shell encodes it."""

    def __init__(
        self,
        request_id: str,
        seq: int,
        meta: RequestMeta,
        outcome: Outcome,
        failure: Failure | None,
        attempts: int,
        worker_id: str,
        delivered_ns: int,
        completed_ns: int,
        completion_seq: int,
        body: Any,
    ) -> None:
        self.request_id, self.seq, self.meta, self.outcome, self.failure = request_id, seq, meta, outcome, failure
        self.attempts, self.worker_id, self.delivered_ns = attempts, worker_id, delivered_ns
        self.completed_ns, self.completion_seq, self.body = completed_ns, completion_seq, body


class Submitted(Value):
    """Answer to Submit: (request_id, was new) for each, in order; what a quota does not let in has no name."""

    def __init__(
        self, ticket: int, acks: tuple[tuple[str, bool], ...], refused: Mapping[int, Failure] = MappingProxyType({})
    ) -> None:
        self.ticket, self.acks = ticket, acks
        self.refused = refused
        """Why, by the place in `acks`."""


class Accepted(Value):
    """A new request is stored."""

    def __init__(self, request_id: str, meta: RequestMeta) -> None:
        self.request_id, self.meta = request_id, meta


class Cancelled(NamedTuple):
    """Answer to Cancel."""

    ticket: int
    cancelled: int
    aborting: int
    not_cancelled: tuple[str, ...]
    left: tuple[int, ...] = ()
    """Requests of the batch that are still to be cancelled, by name."""


class Deleted(NamedTuple):
    """Answer to Delete."""

    ticket: int
    deleted: int


class Requeued(NamedTuple):
    """Answer to RequeueDead."""

    ticket: int
    requeued: int
    not_dead: tuple[str, ...]
    left: tuple[int, ...] = ()
    """Of all there are, those still to be revived, by name."""


class View(NamedTuple):
    """Where a live request is."""

    request_id: str
    seq: int
    state: State
    attempts: int
    worker_id: str
    last_error: str
    channel: str
    client_reference: str


class Inspected(NamedTuple):
    """Answer to Inspect: a view of each, None if it is not live (ended or unknown)."""

    ticket: int
    views: tuple[View | None, ...]


class LineView(NamedTuple):
    """Counts of one channel."""

    channel: str
    ready: int
    leased: int
    oldest_submitted_ns: int
    """0 if none waits."""
    oldest_servable_ns: int
    """When the oldest was submitted of those whose model somebody serves; 0 if none waits."""


class QueueView(NamedTuple):
    """Answer to InspectQueue."""

    ticket: int
    lines: tuple[LineView, ...]
    dead: int
    results: int
    workers: int
    scheduler_connected: bool
    completion_seq: int
    """Place in the completion log of what ended last."""


class RefusedReason(Enum):
    """Why a claim was refused; the values are the wire's numbers."""

    LEASED = 1
    ENDED = 2
    UNKNOWN = 3
    TOO_MANY = 4
    WITHDRAWN = 5


class StopReason(Enum):
    """Why a run must stop; the values are the wire's numbers."""

    CLIENT = 1
    DEADLINE = 2
    LEASE_LOST = 3


class WorkOpened(NamedTuple):
    """Answer to WorkerOpened."""

    stream: int


class Deliver(Value):
    """The request, with its lease."""

    def __init__(
        self,
        stream: int,
        seq: int,
        lease: LeaseRef,
        watched: bool,
        submitted_ns: int,
        leased_ns: int,
        meta: RequestMeta,
        grant: str = "",
        payload: bytes | None = None,
    ) -> None:
        self.stream, self.seq, self.lease, self.watched, self.submitted_ns = stream, seq, lease, watched, submitted_ns
        self.leased_ns, self.meta = leased_ns, meta
        self.grant = grant
        """The offer it is delivered for; empty if it was claimed."""
        self.payload = payload
        """The encoded request, of one that is not in the store yet."""

    @property
    def asked_as(self) -> str:
        """Name under which the worker knows of it until it is delivered."""
        return self.grant or self.lease.request_id


class Refused(NamedTuple):
    """The claim or the offer got nothing; `request_id` names either."""

    stream: int
    request_id: str
    reason: RefusedReason


class StopRun(NamedTuple):
    """Stop working on a lease."""

    stream: int
    lease: LeaseRef
    reason: StopReason


class Recorded(Value):
    """Answer to Complete."""

    def __init__(self, stream: int, lease: LeaseRef, accepted: bool) -> None:
        self.stream, self.lease, self.accepted = stream, lease, accepted


class TokensWatched(NamedTuple):
    """Whether the tokens of a running request are wanted."""

    stream: int
    request_id: str
    watched: bool


class BacklogReady(NamedTuple):
    """Answer to BacklogOpened; `channels` are those that requests may wait in."""

    stream: int
    channels: tuple[str, ...]


class ChannelsChanged(NamedTuple):
    """Requests may wait in these channels from now on, for the scheduler on a Backlog stream."""

    stream: int
    channels: tuple[str, ...]


class Announce(Value):
    """A request waits."""

    def __init__(
        self, stream: int, request_id: str, seq: int, attempt: int, meta: RequestMeta, last_attempt: bool = False
    ) -> None:
        self.stream, self.request_id, self.seq, self.attempt, self.meta = stream, request_id, seq, attempt, meta
        self.last_attempt = last_attempt
        """Whether it is that, and another was lost before."""


class GoneReason(Enum):
    """Why an announced request no longer waits; the values are the wire's numbers."""

    CLAIMED = 1
    ENDED = 2


class Gone(Value):
    """An announced request left its line."""

    def __init__(self, stream: int, request_id: str, reason: GoneReason, attempt: int) -> None:
        self.stream, self.request_id, self.reason, self.attempt = stream, request_id, reason, attempt


class EndStream(NamedTuple):
    """End a stream: a newer one replaced it."""

    stream: int
    reason: str


class NameTaken(NamedTuple):
    """End the stream of a worker whose name another instance has, which is connected."""

    stream: int
    worker_id: str


class SchedulerTaken(NamedTuple):
    """End the stream of a scheduler, as another one is connected, or is from now on."""

    stream: int


class Ended(Value):
    """A request ended, durably; `failure` says of what, unless `body`, the worker's result, does."""

    def __init__(
        self,
        seq: int,
        request_id: str,
        meta: RequestMeta,
        outcome: Outcome,
        attempts: int,
        completed_ns: int,
        completion_seq: int,
        body: Any,
        failure: Failure | None = None,
        waited_for: int = 0,
        attempt: int = 0,
    ) -> None:
        self.seq, self.request_id, self.meta, self.outcome, self.attempts = seq, request_id, meta, outcome, attempts
        self.completed_ns, self.completion_seq, self.body = completed_ns, completion_seq, body
        self.failure = failure
        self.waited_for = waited_for
        """Number of the attempt that it was in line for; 0 of one that ran."""
        self.attempt = attempt
        """Number of its latest attempt, as leases have it, 0 if there was none: `attempts` are those that count."""


class LeaseEnded(Value):
    """An attempt is over, however it ended; `cause` is what ended its lease, `body` the result if it has one.

    One that was lost has the `failure` that it was lost with, and was the `last` if no attempt was left.
    """

    def __init__(
        self,
        request_id: str,
        meta: RequestMeta,
        attempt: int,
        worker_id: str,
        leased_ns: int,
        ended_ns: int,
        cause: str,
        body: Any,
        failure: Failure | None,
        last: bool,
    ) -> None:
        self.request_id, self.meta, self.attempt, self.worker_id = request_id, meta, attempt, worker_id
        self.leased_ns, self.ended_ns, self.cause, self.body = leased_ns, ended_ns, cause, body
        self.failure, self.last = failure, last


class WentBack(NamedTuple):
    """A leased or dead request waits again."""

    channel: str
    cause: str


class StaleCompletion(NamedTuple):
    """A completion under a lease that is no longer valid was dropped."""


class AuditFailed(NamedTuple):
    """The indexes of the book contradict each other: a defect, one sentence per violation."""

    violations: tuple[str, ...]


Effect: TypeAlias = (
    Write
    | PutResult
    | Submitted
    | Accepted
    | Cancelled
    | Deleted
    | Requeued
    | Inspected
    | QueueView
    | WorkOpened
    | Deliver
    | Refused
    | StopRun
    | Recorded
    | TokensWatched
    | BacklogReady
    | ChannelsChanged
    | Announce
    | Gone
    | EndStream
    | NameTaken
    | SchedulerTaken
    | Ended
    | LeaseEnded
    | WentBack
    | StaleCompletion
    | AuditFailed
)


def view_of(entry: Entry, request_id: str) -> View:
    """Return what Get shows of a live request."""
    meta = entry.meta
    return View(
        request_id,
        entry.seq,
        entry.state,
        entry.attempts,
        entry.worker_id,
        entry.last_error,
        meta.channel,
        meta.client_reference,
    )
