"""The values that messages, effects and reservations of the session share."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Lease(NamedTuple):
    """The queue's exclusive, fenced right to run one attempt."""

    request_id: str
    attempt: int
    fencing_token: int

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


class Ending(NamedTuple):
    """How an attempt ended, and what was wrong if something was."""

    kind: EndingKind
    code: str = ""
    message: str = ""
    param: str = ""


class Credits(NamedTuple):
    """What became of a reservation that ended under a lease, in blocks."""

    granted_ns: int
    """When the grant came, Unix time."""
    booked_blocks: int
    settled_blocks: int
    """Held after the prompt was counted; 0 if it never was."""
    released_blocks: int
    """Held until the end: more than settled if the reservation followed the output."""
    tokenizer_acks: int


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
