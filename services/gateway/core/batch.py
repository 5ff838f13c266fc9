"""A batch: its states as a table, the record that outlives every gateway, and the object clients see.

Times are Unix seconds, as in OpenAI's API.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

MOST_LEASE_S = 300.0
"""Longest lease of a batch that a gateway may be told to take."""


class Status(StrEnum):
    """Where a batch is; OpenAI's words."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


class Event(StrEnum):
    """What moves a batch."""

    VALID = "every line is good"
    REFUSED = "a line is wrong"
    ENDED = "every line has ended in time"
    LATE = "the window is over, and what was submitted has ended"
    CANCEL = "a client cancels"
    WRITTEN = "the output and error files are there"


TABLE: dict[tuple[Status, Event], Status] = {
    (Status.VALIDATING, Event.VALID): Status.IN_PROGRESS,
    (Status.VALIDATING, Event.REFUSED): Status.FAILED,
    (Status.VALIDATING, Event.LATE): Status.EXPIRED,
    (Status.VALIDATING, Event.CANCEL): Status.CANCELLING,
    # The input is gone, or the queue refuses one line after the other: what was submitted is cancelled first.
    (Status.IN_PROGRESS, Event.REFUSED): Status.FAILED,
    (Status.IN_PROGRESS, Event.ENDED): Status.FINALIZING,
    (Status.IN_PROGRESS, Event.LATE): Status.EXPIRED,
    (Status.IN_PROGRESS, Event.CANCEL): Status.CANCELLING,
    (Status.FINALIZING, Event.WRITTEN): Status.COMPLETED,
    (Status.CANCELLING, Event.WRITTEN): Status.CANCELLED,
}
"""Every move there is."""

ENDS = frozenset({Status.FAILED, Status.COMPLETED, Status.EXPIRED, Status.CANCELLED})
"""Nothing leads out of these."""

STAMPS: dict[Status, str] = {status: f"{status}_at" for status in Status if status is not Status.VALIDATING}
"""Field of the object that says when a status was reached."""


class MoveError(Exception):
    """The table has no such move."""


@dataclass(frozen=True, slots=True)
class LineError:
    """What is wrong with the input, or with one line of it (from 1)."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A line that the queue would not take, though the gateway had found nothing wrong with it."""

    line: int
    custom_id: str
    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """Which gateway drives the batch, and until when nobody else may."""

    owner: str = ""
    until: float = 0.0


@dataclass(frozen=True, slots=True)
class Counts:
    """Lines of a batch, and the size of what they have in the output and error files."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    expired: int = 0
    """Of those that failed, the ones whose time was over."""
    output_bytes: int = 0
    error_bytes: int = 0
    """UNCOUNTED once requeued lines have changed the file."""
    dead: int = 0
    """Of those that failed, at most so many are dead letters, which may be requeued also when the batch has ended."""

    @property
    def failed_lines(self) -> int:
        """How many lines failed, as people are told.

        A dead letter that is requeued while the batch runs ends twice, and is counted twice until the batch ends.
        """
        return min(self.failed, self.total - self.completed)


UNCOUNTED = -1
"""Size of a file that nobody has asked for since it changed."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a batch is: where to go on after a crash."""

    line: int = 0
    """Last input line that was submitted; 0 if none was."""
    offset: int = 0
    """Where the line after it begins in the input file."""
    submitted: bool = False
    """Whether every line that will be has been submitted."""
    cut: bool = False
    """Whether the time was over before all of them were."""
    cursor: int = 0
    """Place in the batch's results up to which they are counted."""


PARTS: dict[str, type[Counts] | type[Progress] | type[Lease]] = {
    "counts": Counts,
    "progress": Progress,
    "lease": Lease,
}
"""Fields of a batch that have fields of their own."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch."""

    batch_id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    channel: str
    priority: int | None = None
    metadata: dict[str, str] | None = None
    output_expires_after_s: int = 0
    status: Status = Status.VALIDATING
    stamps: dict[str, int] = field(default_factory=dict)
    errors: list[LineError] = field(default_factory=list)
    counts: Counts = Counts()
    progress: Progress = Progress()
    lease: Lease = Lease()
    output_file_id: str | None = None
    error_file_id: str | None = None
    tenant: str = "default"
    """Whose batch it is: its lines are submitted, and its results read, for this tenant."""
    refusals: list[Refusal] = field(default_factory=list)
    """Lines without a request; they are in the error file."""
    scattered: list[int] = field(default_factory=list)
    """Of a batch that has ended, the lines behind `progress.line` that were submitted all the same: of its last window
    a quota let in a part. The queue knows them only as long as it has their results."""
    unknown: dict[str, Any] = field(default_factory=dict)
    """Fields of a newer gateway's, which gets them back; those inside of a part under the part's name."""

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.status in ENDS

    def moved(self, event: Event, now_s: float) -> Batch:
        """Return the batch after `event`; raises MoveError if it cannot happen now."""
        status = TABLE.get((self.status, event))
        if status is None:
            raise MoveError(f"a batch that is {self.status} does not move when {event}")
        return replace(self, status=status, stamps={**self.stamps, STAMPS[status]: int(now_s)})

    def leased(self, owner: str, until_s: float) -> Batch:
        """Return the batch with another lease."""
        return replace(self, lease=Lease(owner, until_s))

    def free_for(self, owner: str, now_s: float) -> bool:
        """Whether `owner` may drive it."""
        return not self.ended and (self.lease.owner in {"", owner} or self.lease.until <= now_s)

    @property
    def output_file_name(self) -> str:
        """Id of the output file, whether there is one or not."""
        return f"file-{self.batch_id.removeprefix('batch_')}-output"

    @property
    def error_file_name(self) -> str:
        """Id of the error file, whether there is one or not."""
        return f"file-{self.batch_id.removeprefix('batch_')}-errors"

    def to_row(self) -> bytes:
        """Return the batch as the value of a record."""
        row = asdict(self)
        for name, value in row.pop("unknown").items():
            row[name] = row[name] | value if name in PARTS else value
        for name in ("refusals", "scattered"):
            if not row[name]:
                del row[name]  # so that gateways that know nothing of them can drive the batch
        return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")

    @classmethod
    def from_row(cls, row: bytes) -> Batch:
        """Read what `to_row` wrote; fields it does not have take their defaults."""
        values = json.loads(row)
        names = {one.name for one in fields(cls)}
        values["unknown"] = {name: values.pop(name) for name in values.keys() - names}
        values["status"] = Status(values["status"])
        values["errors"] = [LineError(**error) for error in values["errors"]]
        values["refusals"] = [Refusal(**refusal) for refusal in values.get("refusals", [])]
        # An older gateway's did not say how many of the lines that failed are dead letters.
        values["counts"].setdefault("dead", values["counts"].get("failed", 0))
        for name, kind in PARTS.items():
            part, known = values[name], {one.name for one in fields(kind)}
            if newer := {key: part.pop(key) for key in part.keys() - known}:
                values["unknown"][name] = newer
            values[name] = kind(**part)
        # What a newer gateway says of its lease is not true of another's.
        values["unknown"].pop("lease", None)
        return cls(**values)

    def to_object(self) -> dict[str, Any]:
        """Return the batch as OpenAI's API shows it."""
        shown: dict[str, Any] = {
            "id": self.batch_id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": [asdict(error) for error in self.errors]} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": str(self.status),
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "metadata": self.metadata,
        }
        shown.update({stamp: self.stamps.get(stamp) for stamp in STAMPS.values()})
        counts = self.counts
        shown["request_counts"] = {
            "total": counts.total,
            "completed": counts.completed,
            "failed": counts.failed_lines,
        }
        return shown
