"""A live request as the machine keeps it in memory: its unchanging metadata and where it is in its life."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from services.core.value import Value
from services.queue.core.lifecycle import Outcome, State

DEFAULT_TENANT = "default"
"""Whose everything is that names no other tenant."""

BatchKey: TypeAlias = tuple[str, str]
"""(tenant, batch): batches of two tenants are two, whatever they are called."""

SEQ_END = 1 << 64
"""After the largest sequence number that a key of the store can hold."""

NO_SEQ = -1
"""What `parse_request_id` returns for a name that is not this store's."""


class RequestMeta(Value):
    """What the queue knows of a request besides its payload; fixed at submit."""

    __slots__ = (
        "batch", "channel", "chat", "client_reference", "deadline_ns", "idempotency_key", "max_tokens", "model", "n",
        "payload_bytes", "prefix_digest", "priority", "prompt_bytes", "prompt_tokens", "submitted_ns", "tenant",
        "traceparent",
    )  # fmt: skip

    def __init__(
        self,
        tenant: str,
        idempotency_key: str,
        channel: str,
        model: str,
        batch: str,
        priority: int,
        deadline_ns: int,
        traceparent: str,
        client_reference: str,
        prompt_bytes: int,
        prompt_tokens: int,
        max_tokens: int,
        n: int,
        chat: bool,
        prefix_digest: int,
        payload_bytes: int = 0,
        submitted_ns: int = 0,
    ) -> None:
        self.tenant, self.idempotency_key, self.channel, self.model = tenant, idempotency_key, channel, model
        self.batch, self.priority = batch, priority
        self.deadline_ns = deadline_ns
        """Unix time; 0 means never."""
        self.traceparent, self.client_reference = traceparent, client_reference
        self.prompt_bytes = prompt_bytes
        """Size of a text prompt in UTF-8; 0 if given as token ids."""
        self.prompt_tokens = prompt_tokens
        """Exact number of prompt tokens; 0 if unknown."""
        self.max_tokens = max_tokens
        """Per completion; 0 means up to the window."""
        self.n, self.chat, self.prefix_digest = n, chat, prefix_digest
        self.payload_bytes = payload_bytes
        """Size of the encoded request, which is what it takes of its tenant's quota while it waits."""
        self.submitted_ns = submitted_ns
        """Last, so that it can be put in when the request is stored."""

    @property
    def batch_key(self) -> BatchKey:
        """The batch it belongs to."""
        return (self.tenant, self.batch)

    def submitted(self, now_ns: int) -> RequestMeta:
        """Return the same with the moment at which it was stored."""
        return RequestMeta(
            tenant=self.tenant, idempotency_key=self.idempotency_key, channel=self.channel, model=self.model,
            batch=self.batch, priority=self.priority, deadline_ns=self.deadline_ns, traceparent=self.traceparent,
            client_reference=self.client_reference, prompt_bytes=self.prompt_bytes, prompt_tokens=self.prompt_tokens,
            max_tokens=self.max_tokens, n=self.n, chat=self.chat, prefix_digest=self.prefix_digest,
            payload_bytes=self.payload_bytes, submitted_ns=now_ns,
        )  # fmt: skip


EMPTY_META: Final = RequestMeta(
    tenant="",
    idempotency_key="",
    channel="",
    model="",
    batch="",
    priority=0,
    deadline_ns=0,
    traceparent="",
    client_reference="",
    prompt_bytes=0,
    prompt_tokens=0,
    max_tokens=0,
    n=1,
    chat=False,
    prefix_digest=0,
)
"""Stands for metadata that is not read yet; every field has a value of its type."""


class Failure(NamedTuple):
    """What went wrong, in the words of the OpenAI error object."""

    code: str
    message: str
    param: str = ""


class LeaseRef(Value):
    """Names one lease."""

    def __init__(self, request_id: str, attempt: int, fencing_token: int) -> None:
        self.request_id, self.attempt, self.fencing_token = request_id, attempt, fencing_token


class Entry:
    """A ready, leased, stopping or dead request."""

    __slots__ = (
        "attempts", "completion_seq", "died_ns", "engine_died", "fencing_token", "instance_id", "last_error",
        "leased_ns", "meta", "name", "seq", "state", "stop_outcome", "uncounted", "worker_id",
    )  # fmt: skip

    def __init__(self, seq: int, meta: RequestMeta, state: State = State.READY) -> None:
        """Begin with no attempt."""
        self.seq = seq
        self.meta = meta
        self.state = state
        self.attempts = 0
        """Those that count towards the most there may be, the present one included."""
        self.uncounted = 0
        """Those that do not: handed back, lost with the queue, or while it stood still, or made before a dead letter
        was requeued."""
        self.last_error = ""
        self.engine_died = False
        """Whether an engine died of what it ran, this one among that, as far as is known since the queue started."""
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

    @property
    def attempt(self) -> int:
        """Number of the present or latest attempt: tokens are told by it, and no other that is on disk has it."""
        return self.attempts + self.uncounted


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
