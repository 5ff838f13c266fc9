"""The values that messages, effects and reservations of the session share."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from services.core.value import Value


class Lease(Value):
    """The queue's exclusive, fenced right to run one attempt."""

    def __init__(self, request_id: str, attempt: int, fencing_token: int) -> None:
        self.request_id, self.attempt, self.fencing_token = request_id, attempt, fencing_token

    @property
    def run_id(self) -> str:
        """Name of the attempt in engine and tokenizer."""
        return f"{self.request_id}.{self.fencing_token}"


class Cause(Enum):
    """Why credits come home; the scheduler's `ReleaseCause`."""

    __hash__ = object.__hash__  # as good for singletons as Enum's own, which is a call into Python at every look-up

    COMPLETED = "completed"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"
    CLAIM_REFUSED = "claim_refused"
    LEASE_LOST = "lease_lost"
    RECALLED = "recalled"
    UNCLAIMED = "unclaimed"


class EndingKind(Enum):
    """How an attempt ended; `FAILED` is for errors that another attempt might not meet."""

    __hash__ = object.__hash__  # as good for singletons as Enum's own, which is a call into Python at every look-up

    COMPLETED = "completed"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"


class Ending(Value):
    """How an attempt ended, and what was wrong if something was."""

    def __init__(self, kind: EndingKind, code: str = "", message: str = "", param: str = "") -> None:
        self.kind, self.code, self.message, self.param = kind, code, message, param


class Credits(Value):
    """What became of a reservation that ended under a lease, in blocks."""

    def __init__(
        self, granted_ns: int, booked_blocks: int, settled_blocks: int, released_blocks: int, tokenizer_acks: int
    ) -> None:
        self.granted_ns = granted_ns
        """When the grant came, Unix time."""
        self.booked_blocks = booked_blocks
        self.settled_blocks = settled_blocks
        """Held after the prompt was counted; 0 if it never was."""
        self.released_blocks = released_blocks
        """Held until the end: more than settled if the reservation followed the output."""
        self.tokenizer_acks = tokenizer_acks


class CancelCause(Enum):
    """Why the queue stops a run."""

    CLIENT = "client"
    DEADLINE = "deadline"
    LEASE_LOST = "lease_lost"


class Holding(NamedTuple):
    """One reservation as this worker sees it, in blocks."""

    request_id: str
    channel: str
    held_blocks: int
    seq: int
    completions: int = 1
    guaranteed: bool = False
    last_attempt: bool = False


class EngineReported(Value):
    """What the engine said of itself after a step; `blocks_free` in blocks, `kv_cache_usage` 0 to 1.

    `preemptions`, `prefill_ns` (time in prefill, summed over requests) and `prefill_tokens` (prompt tokens computed in
    it) count from the start. `blocks_shared` is by how much the blocks of all that run, each counted on its own, exceed
    those that are taken: what several hold together. An engine that cannot tell says less, and never more.
    """

    def __init__(
        self,
        blocks_free: int,
        running: int,
        waiting: int,
        preemptions: int,
        step_ns: int,
        kv_cache_usage: float,
        prefill_ns: int = 0,
        prefill_tokens: int = 0,
        blocks_shared: int = 0,
    ) -> None:
        self.blocks_free, self.running, self.waiting, self.preemptions = blocks_free, running, waiting, preemptions
        self.step_ns, self.kv_cache_usage, self.prefill_ns = step_ns, kv_cache_usage, prefill_ns
        self.prefill_tokens, self.blocks_shared = prefill_tokens, blocks_shared
