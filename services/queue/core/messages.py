"""What the machine is told. Streams and tickets are numbers the shell gave out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from services.core.value import Value
from services.queue.core.entry import DEFAULT_TENANT, BatchKey, Entry, Failure, LeaseRef, RequestMeta
from services.queue.core.lifecycle import Outcome
from services.queue.core.quotas import Quota

NO_BATCH: BatchKey = (DEFAULT_TENANT, "")
"""Stands where requests are named."""

ANY_PLACE: Final = (1 << 64) - 1
"""No place in the completion log is after it."""

ANY_TIME: Final = (1 << 63) - 1
"""No clock says more."""


class NewRequest(Value):
    """One request to store."""

    def __init__(self, meta: RequestMeta, payload: bytes, known_seq: int | None = None) -> None:
        self.meta, self.payload = meta, payload
        self.known_seq = known_seq
        """Request that has this idempotency key in the store already."""


class Submit(Value):
    """Requests of one frame, all valid; one answer for all."""

    def __init__(self, ticket: int, requests: tuple[NewRequest, ...], together: bool = False) -> None:
        self.ticket, self.requests = ticket, requests
        self.together = together
        """Whether none is to be stored unless all are."""


class SetQuotas(NamedTuple):
    """What may wait of each tenant from now on; of one that is not named, anything."""

    quotas: Mapping[str, Quota]


class WorkerOpened(NamedTuple):
    """A worker opened a Work stream."""

    stream: int
    worker_id: str
    instance_id: str
    held: tuple[LeaseRef, ...]


class WorkerClosed(NamedTuple):
    """A Work stream ended."""

    stream: int


class Claim(Value):
    """A worker asks for a granted request."""

    def __init__(self, stream: int, request_id: str) -> None:
        self.stream, self.request_id = stream, request_id


class Offer(NamedTuple):
    """A worker has credits for one request that is yet to come: of this channel and model, and no larger than this."""

    stream: int
    grant: str
    channel: str
    model: str
    chat: bool
    most_prompt_bytes: int
    most_prompt_tokens: int
    """0 is for prompts that are not counted yet, and those alone."""
    most_output_tokens: int
    """0 is for requests that ask for no number, and those alone."""


class Withdraw(NamedTuple):
    """A worker takes an offer back."""

    stream: int
    grant: str


class Complete(Value):
    """An attempt ended with a result (`outcome` set) or with a failure."""

    def __init__(
        self, stream: int, lease: LeaseRef, outcome: Outcome | None, failure: Failure | None, body: Any
    ) -> None:
        self.stream, self.lease, self.outcome, self.failure = stream, lease, outcome, failure
        self.body = body
        """The worker's result, opaque to the machine."""


class Renew(Value):
    """Leases that are still being worked on."""

    def __init__(self, stream: int, leases: tuple[LeaseRef, ...]) -> None:
        self.stream, self.leases = stream, leases


class GiveBack(NamedTuple):
    """Leases handed back unharmed."""

    stream: int
    leases: tuple[LeaseRef, ...]


class BacklogOpened(NamedTuple):
    """A scheduler opened a Backlog stream; it replaces the one before, but not that of another instance that serves."""

    stream: int
    instance_id: str = ""
    """Empty from versions that do not say."""
    workers: int = 0
    """How many are connected to it; 0 from versions that do not say."""


class BacklogClosed(NamedTuple):
    """A Backlog stream ended."""

    stream: int


class SetWindow(NamedTuple):
    """Absolute window of one channel, in requests for each model; `served` are the models that somebody serves."""

    stream: int
    channel: str
    limit: int
    served: tuple[str, ...] = ()


class Reject(NamedTuple):
    """The scheduler found that no worker could ever hold the request."""

    stream: int
    request_id: str
    failure: Failure


class Reconfigure(NamedTuple):
    """The configuration has these channels from now on."""

    channels: tuple[str, ...]


class Cancel(NamedTuple):
    """Cancel requests by name, or all of a batch if `request_ids` is None."""

    ticket: int
    request_ids: tuple[str, ...] | None
    batch: BatchKey = NO_BATCH
    sees: str | None = None
    """Tenant beside whose requests there are none for the caller; None: everybody's are."""


class EndedRow(NamedTuple):
    """A stored result as deleting it needs it."""

    seq: int
    completion_seq: int
    completed_ns: int
    tenant: str
    idempotency_key: str
    batch: str


class Delete(NamedTuple):
    """Delete results that the shell found in the store."""

    ticket: int
    rows: tuple[EndedRow, ...]


class RequeueDead(NamedTuple):
    """Revive dead letters by name, or all if `request_ids` is None."""

    ticket: int
    request_ids: tuple[str, ...] | None
    up_to: int = ANY_PLACE
    """Place in the completion log after which none of them died."""


class Inspect(NamedTuple):
    """Ask where requests are."""

    ticket: int
    request_ids: tuple[str, ...]
    sees: str | None = None
    """As for Cancel."""


class InspectQueue(NamedTuple):
    """Ask for the counts of the queue."""

    ticket: int


class WatchTokens(NamedTuple):
    """A watcher of token deltas came (`on`) or went, for requests or for a batch (`seqs` None).

    To hear twice that it came changes nothing: a rebuilt machine is told of all there are, and some are on their way.
    """

    on: bool
    watcher: int
    seqs: tuple[int, ...] | None
    batch: BatchKey = NO_BATCH


class Adopt(NamedTuple):
    """Live requests that the store holds, read since the start; until the last of them only Submit may come as well."""

    entries: tuple[Entry, ...]


class Tick(NamedTuple):
    """Time passes: deadlines, leases, workers that did not return."""

    said_ns: int = ANY_TIME
    """When that was said. What is over only since then is left to the next: the queue may have stood still, and what
    its workers said meanwhile is heard after this one."""


class StoodStill(NamedTuple):
    """The queue has heard nobody for so long, and goes on: its process was stopped, or starved."""

    for_ns: int


Message: TypeAlias = (
    Submit
    | SetQuotas
    | WorkerOpened
    | WorkerClosed
    | Claim
    | Offer
    | Withdraw
    | Complete
    | Renew
    | GiveBack
    | BacklogOpened
    | BacklogClosed
    | SetWindow
    | Reject
    | Reconfigure
    | Cancel
    | Delete
    | RequeueDead
    | Inspect
    | InspectQueue
    | WatchTokens
    | Adopt
    | Tick
    | StoodStill
)
