"""One granted request as the session keeps it, and the session's counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.worker.core.lifecycle import State
from services.worker.core.messages import Cause, Credits, Ending, EndingKind, Holding, Lease


@dataclass(slots=True)
class Entry:
    """A reservation, and the lease that joins it at delivery."""

    request_id: str
    channel: str
    held_blocks: int
    settles: bool
    granted_ns: int
    reserve_output_tokens: int = 0
    state: State = State.GRANTED
    seq: int = 0
    lease: Lease | None = None
    run_id: str = ""
    """Name of the lease's attempt, once there is one."""
    completions: int = 1
    prompt_tokens: int = 0
    max_tokens: int = 0
    tell_at_tokens: int = 0
    """Output length at which the engine's progress is next wanted; 0 means never."""
    watched: bool = False
    told: bool = False
    """Whether tokens came since the watcher began to watch: the next ones may wait."""
    cause: Cause = Cause.UNCLAIMED
    ending: Ending | None = None
    output_tokens: int = 0
    preemptions: int = 0
    booked_blocks: int = field(init=False)
    """What the grant booked; `held_blocks` goes on from there."""
    settled_blocks: int = 0
    """What was held when the prompt had been counted; 0 before."""
    tokenizer_acks: int = 0

    def __post_init__(self) -> None:
        """Hold what was booked."""
        self.booked_blocks = self.held_blocks

    @property
    def follows_output(self) -> bool:
        """Whether the reservation grows with the output; else all of `max_tokens` is reserved at once."""
        return self.settles and self.reserve_output_tokens > 0

    def holding(self) -> Holding:
        """Return the reservation for the inventory."""
        return Holding(self.request_id, self.channel, self.held_blocks, self.seq)

    def credits(self) -> Credits:
        """Return what became of the reservation."""
        return Credits(self.granted_ns, self.booked_blocks, self.settled_blocks, self.held_blocks, self.tokenizer_acks)

    @property
    def the_lease(self) -> Lease:
        """The lease; only for states that have one."""
        assert self.lease is not None, f"{self.request_id} has no lease in state {self.state}"
        return self.lease

    @property
    def the_ending(self) -> Ending:
        """How the attempt ended; only for finished ones."""
        return self.ending if self.ending is not None else Ending(EndingKind.COMPLETED)


@dataclass(slots=True)
class Counters:
    """What the session has counted since the start; metrics read it."""

    grants: int = 0
    releases: dict[Cause, int] = field(default_factory=lambda: dict.fromkeys(Cause, 0))
    refused_claims: int = 0
    leases_lost: int = 0
    given_back: int = 0
    over_need: int = 0
    stale_completions: int = 0
    successors: int = 0
    """Grants for a request whose earlier run was still here."""
    audit_violations: int = 0
    """Contradictions found by the audit; must stay 0."""
    ignored: int = 0
    """Messages for something that no longer exists, or refused by the lifecycle table."""

    def released(self, cause: Cause) -> None:
        """Count one release."""
        self.releases[cause] += 1
