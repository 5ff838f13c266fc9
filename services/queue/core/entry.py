"""A live request as the machine keeps it in memory: its unchanging metadata and where it is in its life."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from services.queue.core.lifecycle import Outcome, State

DEFAULT_TENANT = "default"
"""Whose everything is that names no other tenant."""

BatchKey: TypeAlias = tuple[str, str]
"""(tenant, batch): batches of two tenants are two, whatever they are called."""

SEQ_END = 1 << 64
"""After the largest sequence number that a key of the store can hold."""

NO_SEQ = -1
"""What `parse_request_id` returns for a name that is not this store's."""


class RequestMeta(NamedTuple):
    """What the queue knows of a request besides its payload; fixed at submit."""

    tenant: str
    idempotency_key: str
    channel: str
    model: str
    batch: str
    priority: int
    deadline_ns: int
    """Unix time; 0 means never."""
    traceparent: str
    client_reference: str
    prompt_bytes: int
    """Size of a text prompt in UTF-8; 0 if given as token ids."""
    prompt_tokens: int
    """Exact number of prompt tokens; 0 if unknown."""
    max_tokens: int
    """Per completion; 0 means up to the window."""
    n: int
    chat: bool
    prefix_digest: int
    payload_bytes: int = 0
    """Size of the encoded request, which is what it takes of its tenant's quota while it waits."""
    submitted_ns: int = 0
    """Last, so that it can be put in when the request is stored."""

    @property
    def batch_key(self) -> BatchKey:
        """The batch it belongs to."""
        return (self.tenant, self.batch)


class Failure(NamedTuple):
    """What went wrong, in the words of the OpenAI error object."""

    code: str
    message: str
    param: str = ""


class LeaseRef(NamedTuple):
    """Names one lease."""

    request_id: str
    attempt: int
    fencing_token: int


class Entry:
    """A ready, leased, stopping or dead request."""

    __slots__ = (
        "attempts", "completion_seq", "died_ns", "fencing_token", "instance_id", "last_error", "leased_ns", "meta",
        "name", "seq", "state", "stop_outcome", "worker_id",
    )  # fmt: skip

    def __init__(self, seq: int, meta: RequestMeta, state: State = State.READY) -> None:
        """Begin with no attempt."""
        self.seq = seq
        self.meta = meta
        self.state = state
        self.attempts = 0
        self.last_error = ""
        self.fencing_token = 0
        self.worker_id = ""
        self.instance_id = ""
        self.leased_ns = 0
        self.stop_outcome: Outcome | None = None
        self.completion_seq = 0
        """Position of a dead letter in the completion log."""
        self.died_ns = 0
        self.name = ""
        """Its request_id; set by the book."""


@dataclass(slots=True)
class Counters:
    """Numbers that only grow, and the count of results; kept in the store so that a restart goes on from them."""

    seq: int = 0
    fencing_token: int = 0
    completion_seq: int = 0
    results: int = 0

    def go_on_from(self, given: Counters) -> None:
        """Give no name and no fencing token that was given before; both were told before they were written."""
        self.seq = max(self.seq, given.seq)
        self.fencing_token = max(self.fencing_token, given.fencing_token)


@dataclass(slots=True)
class Recovered:
    """What a store holds of live requests, read at start-up."""

    counters: Counters = field(default_factory=Counters)
    entries: list[Entry] = field(default_factory=list)


def request_id_of(store_id: str, seq: int) -> str:
    """Return the name of request `seq` of store `store_id`."""
    return f"{store_id}-{seq:012x}"


def parse_request_id(store_id: str, request_id: str) -> int:
    """Return the sequence number in `request_id`, or NO_SEQ if it is not a name this store gave."""
    prefix, dash, digits = request_id.partition("-")
    if not dash or prefix != store_id or len(digits) < 12 or not set(digits) <= set("0123456789abcdef"):
        return NO_SEQ
    seq = int(digits, 16)
    return seq if seq < SEQ_END and request_id == request_id_of(store_id, seq) else NO_SEQ
