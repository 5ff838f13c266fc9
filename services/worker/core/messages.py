"""What the session is told and what it asks for.

Messages and effects are plain values. A `run_id` names one attempt on this
worker (`RunId` below); it is unique for the life of the queue's store, so a
late answer to an earlier attempt can never be taken for an answer to this one.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from services.worker.core.standing import Met, SendGrantUsed, SendOffer, SendWithdraw, Standing
from services.worker.core.values import CancelCause, Cause, Credits, Ending, EndingKind, Holding, Lease

__all__ = [
    "CancelCause", "Cause", "Credits", "Ending", "EndingKind", "Holding", "Lease", "Met", "SendGrantUsed", "SendOffer",
    "SendWithdraw", "Standing",
]  # fmt: skip
"""The values are part of this vocabulary: whoever speaks it needs no second module."""

# ---- messages: scheduler ----


class SchedulerReached(NamedTuple):
    """A connection to the scheduler exists; the stream can be opened."""


class SchedulerUp(NamedTuple):
    """The scheduler answered the open: a new epoch."""

    epoch: int
    report_interval_ns: int


class SchedulerDown(NamedTuple):
    """The Credits stream ended."""


class Granted(NamedTuple):
    """Credits are booked for a request; claim it.

    `reserve_output_tokens` are to be kept reserved ahead of what each completion has generated; 0 reserves all of
    `max_tokens` when the prompt is tokenized.
    """

    request_id: str
    channel: str
    booked_blocks: int
    settles: bool
    attempt: int
    reserve_output_tokens: int = 0
    standing: Standing | None = None
    """Set if the request is yet to come; `request_id` names the grant until then."""


class Recalled(NamedTuple):
    """Give a grant back if it has not been claimed."""

    request_id: str


class DrainAsked(NamedTuple):
    """Take no new grants; finish what is here."""

    reason: str


# ---- messages: queue ----


class UndrainAsked(NamedTuple):
    """Take grants again, unless the worker is ending."""


class QueueReached(NamedTuple):
    """A connection to the queue exists; the stream can be opened."""


class QueueUp(NamedTuple):
    """The queue answered the open."""

    lease_ns: int
    max_inflight: int
    takes_offers: bool = False


class QueueDown(NamedTuple):
    """The Work stream ended."""


class Delivered(NamedTuple):
    """The claimed request, with its lease; `max_tokens` 0 means up to the window."""

    lease: Lease
    completions: int
    max_tokens: int
    watched: bool
    met: Met | None = None


class Refused(NamedTuple):
    """The claim, or the offer, got nothing; `still_waits` if the request may be claimed again."""

    request_id: str
    still_waits: bool


class CancelRun(NamedTuple):
    """Stop working under a lease."""

    lease: Lease
    cause: CancelCause


class Recorded(NamedTuple):
    """The completion is on disk, or was stale and will never be wanted."""

    lease: Lease
    accepted: bool


class Watched(NamedTuple):
    """Someone watches a running request's tokens, or no longer does."""

    request_id: str
    watched: bool


# ---- messages: tokenizer and engine ----


class Tokenized(NamedTuple):
    """The prompt's length in tokens."""

    run_id: str
    prompt_tokens: int


class TokenizeFailed(NamedTuple):
    """The prompt cannot be rendered; never retried."""

    run_id: str
    code: str
    message: str
    param: str


class EngineTokens(NamedTuple):
    """New tokens of a run whose tokens are watched."""

    run_id: str


class EngineProgress(NamedTuple):
    """The longest completion of a run has as many tokens as the session wanted to hear of."""

    run_id: str
    tokens: int


class EngineFinished(NamedTuple):
    """The engine's last output of a run; its blocks are free.

    `step_follows` is False when the blocks came free outside an engine step (a
    stop string found by the detokenizer), so that no report shows them yet.
    """

    run_id: str
    output_tokens: int
    preemptions: int
    step_follows: bool = True


class EngineFailed(NamedTuple):
    """The engine refused or gave up a run."""

    run_id: str
    rejected: bool
    code: str
    message: str
    param: str = ""
    output_tokens: int = 0


class EngineAborted(NamedTuple):
    """The abort is on its way to the engine core, ahead of any later request."""

    run_id: str
    output_tokens: int
    preemptions: int


class EngineReported(NamedTuple):
    """What the engine said of itself after a step; `blocks_free` in blocks, `kv_cache_usage` 0 to 1.

    `preemptions`, `prefill_ns` (time in prefill, summed over requests) and `prefill_tokens` (prompt tokens computed in
    it) count from the start.
    """

    blocks_free: int
    running: int
    waiting: int
    preemptions: int
    step_ns: int
    kv_cache_usage: float
    prefill_ns: int = 0
    prefill_tokens: int = 0


class EngineDied(NamedTuple):
    """The engine or the tokenizer is dead; every run in it is lost."""

    reason: str


# ---- messages: the shell ----


class ShutdownAsked(NamedTuple):
    """Finish what the engine runs, hand the rest back, take nothing new."""

    reason: str


class GraceOver(NamedTuple):
    """Hand back what still runs."""


class Tick(NamedTuple):
    """End of a wake-up, and whenever `due_ns` has come."""


Message: TypeAlias = (
    SchedulerReached
    | SchedulerUp
    | SchedulerDown
    | Granted
    | Recalled
    | DrainAsked
    | UndrainAsked
    | QueueReached
    | QueueUp
    | QueueDown
    | Delivered
    | Refused
    | CancelRun
    | Recorded
    | Watched
    | Tokenized
    | TokenizeFailed
    | EngineTokens
    | EngineProgress
    | EngineFinished
    | EngineFailed
    | EngineAborted
    | EngineReported
    | EngineDied
    | ShutdownAsked
    | GraceOver
    | Tick
)


# ---- effects: scheduler ----


class OpenCredits(NamedTuple):
    """Open the Credits stream with everything still held."""

    inventory: tuple[Holding, ...]


class SendTokenizerAck(NamedTuple):
    """Settle, or follow the output: the blocks the request holds from now on.

    Output tokens are summed over the completions: reserved by these blocks, generated so far, and at most.
    """

    epoch: int
    request_id: str
    seq: int
    held_blocks: int
    prompt_tokens: int
    reserved_output_tokens: int
    generated_tokens: int = 0
    output_limit_tokens: int = 0


class SendCompletionAck(NamedTuple):
    """Release: the blocks are free."""

    epoch: int
    request_id: str
    seq: int
    cause: Cause
    output_tokens: int
    preemptions: int


class SendReport(NamedTuple):
    """The engine as of now; `blocks_free` None while unknown."""

    epoch: int
    blocks_free: int | None
    running: int
    waiting: int
    preemptions: int
    step_ns: int
    kv_cache_usage: float
    kv_cache_usage_ns: float
    busy_ns: int
    prefill_ns: int = 0
    prefill_tokens: int = 0


class SendDraining(NamedTuple):
    """Tell the scheduler that no new grants are taken."""

    reason: str


# ---- effects: queue ----


class OpenWork(NamedTuple):
    """Open the Work stream with every lease still held."""

    held: tuple[Lease, ...]


class SendClaim(NamedTuple):
    """Ask for a granted request."""

    request_id: str


class WatchTokens(NamedTuple):
    """Report a run's tokens from now on (from offset 0 again), or no longer."""

    run_id: str
    watched: bool


class SendTokens(NamedTuple):
    """Send what a run generated since the last time."""

    run_id: str


class SendComplete(NamedTuple):
    """Send how the attempt ended; the shell keeps the message until `Forget`."""

    run_id: str
    ending: Ending
    credits: Credits


class KeepComplete(NamedTuple):
    """Make the message of how the attempt ended, and keep it: a later `SendComplete` will ask for it."""

    run_id: str
    ending: Ending
    credits: Credits


class SendRenew(NamedTuple):
    """Keep these leases alive."""

    leases: tuple[Lease, ...]


class SendGiveBack(NamedTuple):
    """Hand these leases back."""

    leases: tuple[Lease, ...]
    reason: str


# ---- effects: tokenizer, engine, shell ----


class Tokenize(NamedTuple):
    """Render and count the prompt of a run."""

    run_id: str


class StartEngine(NamedTuple):
    """Give a tokenized run to the engine, with at most `max_tokens` per completion and `held_blocks` in all.

    `tell_at_tokens`: as `TellAt`.
    """

    run_id: str
    max_tokens: int
    held_blocks: int
    tell_at_tokens: int = 0


class TellAt(NamedTuple):
    """Answer with `EngineProgress` when a completion of the run has this many tokens; 0 means never."""

    run_id: str
    tokens: int


class AbortEngine(NamedTuple):
    """Abort a run; answered by `EngineAborted`."""

    run_id: str


class Forget(NamedTuple):
    """Drop everything kept for a run."""

    run_id: str


class AuditFailed(NamedTuple):
    """The session contradicts itself or its engine: a defect, one sentence per violation."""

    violations: tuple[str, ...]


Effect: TypeAlias = (
    OpenCredits
    | SendTokenizerAck
    | SendCompletionAck
    | SendGrantUsed
    | SendReport
    | SendDraining
    | OpenWork
    | SendClaim
    | SendOffer
    | SendWithdraw
    | WatchTokens
    | SendTokens
    | SendComplete
    | KeepComplete
    | SendRenew
    | SendGiveBack
    | Tokenize
    | StartEngine
    | TellAt
    | AbortEngine
    | Forget
    | AuditFailed
)
