"""What the session is told and what it asks for.

Messages and effects are plain values. A `run_id` names one attempt on this
worker; it is unique for the life of the queue's store, so a
late answer to an earlier attempt can never be taken for an answer to this one.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from services.core.drain import NEVER_ASKED, Drain
from services.core.value import Value
from services.worker.core.standing import Met, SendGrantUsed, SendOffer, SendWithdraw, Standing
from services.worker.core.tokenizing import DropPrompt, Tokenize, Tokenized, TokenizeFailed, TokenizerDied
from services.worker.core.values import CancelCause, Cause, Credits, Ending, EndingKind, EngineReported, Holding, Lease

__all__ = [
    "CancelCause", "Cause", "Credits", "DropPrompt", "Ending", "EndingKind", "EngineReported", "Holding", "Lease",
    "Met", "SendGrantUsed", "SendOffer", "SendWithdraw", "Standing", "Tokenize", "TokenizeFailed", "Tokenized",
    "TokenizerDied",
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


class Granted(Value):
    """Credits are booked for a request; claim it. `reserve_output_tokens` are to be kept reserved ahead of what each
    completion has generated; 0 reserves all of `max_tokens` when the prompt is tokenized. `guaranteed`: within its
    channel's guarantee, and to go before what is not. `last_attempt`: for the inventory."""

    def __init__(
        self,
        request_id: str,
        channel: str,
        booked_blocks: int,
        settles: bool,
        attempt: int,
        reserve_output_tokens: int = 0,
        standing: Standing | None = None,
        completions: int = 1,
        guaranteed: bool = False,
        last_attempt: bool = False,
    ) -> None:
        self.request_id, self.channel, self.booked_blocks, self.settles = request_id, channel, booked_blocks, settles
        self.attempt, self.reserve_output_tokens = attempt, reserve_output_tokens
        self.standing = standing
        """Set if the request is yet to come; `request_id` names the grant until then."""
        self.completions, self.guaranteed, self.last_attempt = completions, guaranteed, last_attempt


class Recalled(NamedTuple):
    """Give a grant back if it has not been claimed."""

    request_id: str


class DrainHeard(NamedTuple):
    """Operators ask for this, or asked for it before something that is known."""

    drain: Drain


# ---- messages: queue ----


class QueueReached(NamedTuple):
    """A connection to the queue exists; the stream can be opened."""


class QueueUp(NamedTuple):
    """The queue answered the open."""

    lease_ns: int
    max_inflight: int
    takes_offers: bool = False


class QueueDown(NamedTuple):
    """The Work stream ended."""


class Delivered(Value):
    """The claimed request, with its lease; `max_tokens` 0 means up to the window."""

    def __init__(self, lease: Lease, completions: int, max_tokens: int, watched: bool, met: Met | None = None) -> None:
        self.lease, self.completions, self.max_tokens, self.watched = lease, completions, max_tokens, watched
        self.met = met


class Refused(Value):
    """The claim, or the offer, got nothing; `still_waits` if the request may be claimed again."""

    def __init__(self, request_id: str, still_waits: bool) -> None:
        self.request_id, self.still_waits = request_id, still_waits


class CancelRun(NamedTuple):
    """Stop working under a lease."""

    lease: Lease
    cause: CancelCause


class Recorded(Value):
    """The completion is on disk, or was stale and will never be wanted."""

    def __init__(self, lease: Lease, accepted: bool) -> None:
        self.lease, self.accepted = lease, accepted


class Watched(NamedTuple):
    """Someone watches a running request's tokens, or no longer does."""

    request_id: str
    watched: bool


# ---- messages: engine ----


class EngineTokens(Value):
    """New tokens of a run whose tokens are watched."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id


class EngineProgress(Value):
    """The longest completion of a run has as many tokens as the session wanted to hear of."""

    def __init__(self, run_id: str, tokens: int) -> None:
        self.run_id, self.tokens = run_id, tokens


class EngineFinished(Value):
    """The engine's last output of a run; its blocks are free.

    `step_follows` is False when the blocks came free outside an engine step (a
    stop string found by the detokenizer), so that no report shows them yet.
    """

    def __init__(self, run_id: str, output_tokens: int, preemptions: int, step_follows: bool = True) -> None:
        self.run_id, self.output_tokens, self.preemptions = run_id, output_tokens, preemptions
        self.step_follows = step_follows


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


class EngineDied(NamedTuple):
    """The engine is dead; every run in it is lost."""

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
    | DrainHeard
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
    | TokenizerDied
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
    """Open the Credits stream with everything still held, and why grants may not be taken."""

    inventory: tuple[Holding, ...]
    drain: Drain = NEVER_ASKED
    leaving: bool = False


class SendTokenizerAck(Value):
    """Settle, or follow the output: the blocks the request holds from now on.

    Output tokens are summed over the completions: reserved by these blocks, generated so far, and at most.
    """

    def __init__(
        self,
        epoch: int,
        request_id: str,
        seq: int,
        held_blocks: int,
        prompt_tokens: int,
        reserved_output_tokens: int,
        generated_tokens: int = 0,
        output_limit_tokens: int = 0,
    ) -> None:
        self.epoch, self.request_id, self.seq, self.held_blocks = epoch, request_id, seq, held_blocks
        self.prompt_tokens, self.reserved_output_tokens = prompt_tokens, reserved_output_tokens
        self.generated_tokens, self.output_limit_tokens = generated_tokens, output_limit_tokens


class SendCompletionAck(Value):
    """Release: the blocks are free."""

    def __init__(
        self, epoch: int, request_id: str, seq: int, cause: Cause, output_tokens: int, preemptions: int
    ) -> None:
        self.epoch, self.request_id, self.seq, self.cause = epoch, request_id, seq, cause
        self.output_tokens, self.preemptions = output_tokens, preemptions


class SendReport(Value):
    """The engine as of now; `blocks_free` None while unknown."""

    def __init__(
        self,
        epoch: int,
        blocks_free: int | None,
        running: int,
        waiting: int,
        preemptions: int,
        step_ns: int,
        kv_cache_usage: float,
        kv_cache_usage_ns: float,
        busy_ns: int,
        prefill_ns: int = 0,
        prefill_tokens: int = 0,
        blocks_shared: int = 0,
    ) -> None:
        self.epoch, self.blocks_free, self.running, self.waiting = epoch, blocks_free, running, waiting
        self.preemptions, self.step_ns, self.kv_cache_usage = preemptions, step_ns, kv_cache_usage
        self.kv_cache_usage_ns, self.busy_ns, self.prefill_ns = kv_cache_usage_ns, busy_ns, prefill_ns
        self.prefill_tokens, self.blocks_shared = prefill_tokens, blocks_shared


class SendLeaving(NamedTuple):
    """Tell the scheduler that no new grants are taken for the rest of this life."""

    reason: str


# ---- effects: queue ----


class OpenWork(NamedTuple):
    """Open the Work stream with every lease still held."""

    held: tuple[Lease, ...]


class SendClaim(Value):
    """Ask for a granted request."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id


class WatchTokens(Value):
    """Report a run's tokens from now on (from offset 0 again), or no longer."""

    def __init__(self, run_id: str, watched: bool) -> None:
        self.run_id, self.watched = run_id, watched


class SendTokens(Value):
    """Send what a run generated since the last time."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id


class SendComplete(Value):
    """Send how the attempt ended; the shell keeps the message until `Forget`."""

    def __init__(self, run_id: str, ending: Ending, credits: Credits) -> None:  # noqa: A002 (only shells have that one)
        self.run_id, self.ending, self.credits = run_id, ending, credits


class KeepComplete(Value):
    """Make the message of how the attempt ended, and keep it: a later `SendComplete` will ask for it."""

    def __init__(self, run_id: str, ending: Ending, credits: Credits) -> None:  # noqa: A002 (only shells have that one)
        self.run_id, self.ending, self.credits = run_id, ending, credits


class SendRenew(Value):
    """Keep these leases alive."""

    def __init__(self, leases: tuple[Lease, ...]) -> None:
        self.leases = leases


class SendGiveBack(NamedTuple):
    """Hand these leases back."""

    leases: tuple[Lease, ...]
    reason: str


# ---- effects: engine, shell ----


class StartEngine(Value):
    """Give a tokenized run to the engine, with at most `max_tokens` per completion and `held_blocks` in all; what is
    `guaranteed` before what is not. `tell_at_tokens`: as `TellAt`."""

    def __init__(self, run_id: str, max_tokens: int, held_blocks: int, tell_at_tokens: int, guaranteed: bool) -> None:
        self.run_id, self.max_tokens, self.held_blocks = run_id, max_tokens, held_blocks
        self.tell_at_tokens, self.guaranteed = tell_at_tokens, guaranteed


class TellAt(Value):
    """Answer with `EngineProgress` when a completion of the run has this many tokens; 0 means never."""

    def __init__(self, run_id: str, tokens: int) -> None:
        self.run_id, self.tokens = run_id, tokens


class AbortEngine(NamedTuple):
    """Abort a run; answered by `EngineAborted`."""

    run_id: str


class GiveUpEngine(NamedTuple):
    """Take the engine for dead; answered by `EngineDied`."""

    reason: str


class Forget(Value):
    """Drop everything kept for a run."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id


class AuditFailed(NamedTuple):
    """The session contradicts itself or its engine: a defect, one sentence per violation."""

    violations: tuple[str, ...]


Effect: TypeAlias = (
    OpenCredits
    | SendTokenizerAck
    | SendCompletionAck
    | SendGrantUsed
    | SendReport
    | SendLeaving
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
    | DropPrompt
    | StartEngine
    | TellAt
    | AbortEngine
    | GiveUpEngine
    | Forget
    | AuditFailed
)
