"""One granted request as the session keeps it, and the session's counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.worker.core.lifecycle import State
from services.worker.core.messages import Cause, Credits, Ending, EndingKind, Holding, Lease, Standing


class Entry:
    """A reservation, and the lease that joins it at delivery."""

    __slots__ = (
        "booked_blocks", "cause", "channel", "completions", "ending", "granted_ns", "guaranteed", "held_blocks",
        "last_attempt", "lease", "max_tokens", "output_tokens", "preemptions", "prompt_tokens", "request_id",
        "reserve_output_tokens", "run_id", "seq", "settled_blocks", "settles", "standing", "state", "tell_at_tokens",
        "tokenizer_acks", "told", "watched",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        channel: str,
        booked_blocks: int,
        settles: bool,
        granted_ns: int,
        reserve_output_tokens: int = 0,
        standing: Standing | None = None,
        completions: int = 1,
        guaranteed: bool = False,
        last_attempt: bool = False,
    ) -> None:
        """Begin with a grant, not claimed yet, that holds what was booked."""
        self.request_id = request_id
        self.channel = channel
        self.booked_blocks = booked_blocks
        self.held_blocks = booked_blocks
        self.settles = settles
        self.granted_ns = granted_ns
        self.reserve_output_tokens = reserve_output_tokens
        self.standing = standing
        """What the grant is for; None once it has its request."""
        self.state = State.GRANTED
        self.seq = 0
        self.lease: Lease | None = None
        self.run_id = ""
        """Name of the lease's attempt, once there is one."""
        self.completions = completions
        self.guaranteed = guaranteed
        """Whether the engine runs it before what is not."""
        self.last_attempt = last_attempt
        """Whether a scheduler is to give this worker no other such."""
        self.prompt_tokens = 0
        self.max_tokens = 0
        self.tell_at_tokens = 0
        """Output length at which the engine's progress is next wanted; 0 means never."""
        self.watched = False
        self.told = False
        """Whether tokens came since the watcher began to watch: the next ones may wait."""
        self.cause = Cause.UNCLAIMED
        self.ending: Ending | None = None
        self.output_tokens = 0
        self.preemptions = 0
        self.settled_blocks = 0
        """What was held when the prompt had been counted; 0 before."""
        self.tokenizer_acks = 0

    @property
    def follows_output(self) -> bool:
        """Whether the reservation grows with the output; else all of `max_tokens` is reserved at once."""
        return self.settles and self.reserve_output_tokens > 0

    def holding(self) -> Holding:
        """Return the reservation for the inventory."""
        return Holding(
            self.request_id,
            self.channel,
            self.held_blocks,
            self.seq,
            self.completions,
            self.guaranteed,
            self.last_attempt,
        )

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
