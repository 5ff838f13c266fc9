"""What the machine is told and what it answers: every input and every effect.

What every request sends is a `Value`, cheap to make by the thousand. `epoch` names one
life of a worker's stream; blocks are KV-cache blocks of that worker's engine;
times are Unix time in nanoseconds.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from services.core.drain import NEVER_ASKED, Drain
from services.core.value import Value
from services.scheduler.core.sharing.share import Share


class ReleaseCause(enum.IntEnum):
    """Why the credits of a reservation come home; numbers as on the wire."""

    COMPLETED = 1
    REJECTED = 2
    CANCELLED = 3
    EXPIRED = 4
    FAILED = 5
    CLAIM_REFUSED = 6
    LEASE_LOST = 7
    RECALLED = 8
    UNCLAIMED = 9

    @property
    def returned(self) -> bool:
        """Whether nobody claims what the credits were for."""
        return self is ReleaseCause.RECALLED or self is ReleaseCause.UNCLAIMED


class GoneReason(enum.IntEnum):
    """Why an announced request left its line; numbers as on the wire."""

    CLAIMED = 1
    ENDED = 2


class EngineShape(Value):
    """The sizes of a worker's engine that decide how many blocks a request needs."""

    def __init__(
        self,
        capacity_blocks: int,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        lookahead_tokens: int = 0,
        byte_bounded_tokenizer: bool = False,
        special_tokens: int = 0,
        default_max_tokens: int = 0,
        ceiling_max_tokens: int = 0,
        most_blocks: int = 0,
    ) -> None:
        self.capacity_blocks, self.block_size, self.max_model_len = capacity_blocks, block_size, max_model_len
        self.max_num_seqs, self.lookahead_tokens = max_num_seqs, lookahead_tokens
        self.byte_bounded_tokenizer, self.special_tokens = byte_bounded_tokenizer, special_tokens
        self.default_max_tokens = default_max_tokens
        """Output tokens where a request asks for no number; 0 means up to the window."""
        self.ceiling_max_tokens = ceiling_max_tokens
        """Most output tokens whatever is asked for; 0 means the window."""
        self.most_blocks = most_blocks
        """Blocks that one completion holds at most, whatever its length; 0 means that its length alone says so."""


class Holding(NamedTuple):
    """One reservation as its worker sees it."""

    request_id: str
    channel: str
    held_blocks: int
    seq: int
    completions: int = 1
    guaranteed: bool = False
    """Whether its grant said so: the engine runs it before what is not."""
    last_attempt: bool = False
    """Whether its grant said so: its worker has no other such."""


# ---- inputs: from workers ----


class WorkerOpened(Value):
    """A worker opened a stream. `models` are the names it answers to, its own first."""

    def __init__(
        self,
        epoch: int,
        worker_id: str,
        instance_id: str,
        models: tuple[str, ...],
        shape: EngineShape,
        inventory: tuple[Holding, ...] = (),
        takes_standing: bool = False,
        guaranteed_first: bool = False,
        adapters: tuple[str, ...] = (),
        drain: Drain = NEVER_ASKED,
        leaving: bool = False,
    ) -> None:
        self.epoch, self.worker_id, self.instance_id, self.models = epoch, worker_id, instance_id, models
        self.adapters = adapters
        """Those of `models` that are adapters of the model."""
        self.shape, self.inventory = shape, inventory
        self.takes_standing = takes_standing
        """Whether the worker knows standing grants."""
        self.guaranteed_first = guaranteed_first
        """Whether its engine runs what is guaranteed before what is not, and preempts that first."""
        self.drain = drain
        """What it last heard that operators ask of it."""
        self.leaving = leaving
        """Whether it takes no new grants for the rest of its life."""


class WorkerClosed(NamedTuple):
    """The stream of this epoch ended."""

    epoch: int


class WorkerLeaving(Value):
    """The worker takes no new grants for the rest of its life."""

    def __init__(self, epoch: int, reason: str) -> None:
        self.epoch, self.reason = epoch, reason


class TokenizerAck(Value):
    """The prompt's length is known, or a running reservation grew with its output.

    `stream` is the epoch of the stream it came on, `epoch` the one it names. Output tokens are summed over the
    completions; `output_limit_tokens` is the most that may be generated, 0 if the worker does not say.
    """

    def __init__(
        self,
        stream: int,
        epoch: int,
        request_id: str,
        seq: int,
        held_blocks: int,
        prompt_tokens: int = 0,
        generated_tokens: int = 0,
        output_limit_tokens: int = 0,
    ) -> None:
        self.stream, self.epoch, self.request_id, self.seq = stream, epoch, request_id, seq
        self.held_blocks, self.prompt_tokens, self.generated_tokens = held_blocks, prompt_tokens, generated_tokens
        self.output_limit_tokens = output_limit_tokens


class GrantUsed(Value):
    """A standing grant has met its request. `stream` is the epoch it came on, `epoch` the one it names."""

    def __init__(self, stream: int, epoch: int, grant: str, request: Announced) -> None:
        self.stream, self.epoch, self.grant, self.request = stream, epoch, grant, request


class CompletionAck(Value):
    """The request's blocks are free. `stream` is the epoch of the stream it came on, `epoch` the one it names.

    `output_tokens` are summed over the completions.
    """

    def __init__(
        self, stream: int, epoch: int, request_id: str, seq: int, cause: ReleaseCause, output_tokens: int = 0
    ) -> None:
        self.stream, self.epoch, self.request_id, self.seq, self.cause = stream, epoch, request_id, seq, cause
        self.output_tokens = output_tokens


class EngineReport(Value):
    """What the engine says of itself; `blocks_free` is None while unknown.

    `preemptions`, the integral `kv_cache_usage_ns`, `busy_ns` (time with a running request), `prefill_ns` (time in
    prefill, summed over requests) and `prefill_tokens` (computed in it) count from the worker's start. `blocks_shared`
    are those that running requests hold together, counted for each of them but the first.
    """

    def __init__(
        self,
        stream: int,
        epoch: int,
        blocks_free: int | None = None,
        running: int = 0,
        waiting: int = 0,
        preemptions: int = 0,
        step_ns: int = 0,
        kv_cache_usage: float = 0.0,
        kv_cache_usage_ns: float = 0.0,
        busy_ns: int = 0,
        prefill_ns: int = 0,
        prefill_tokens: int = 0,
        blocks_shared: int = 0,
    ) -> None:
        self.stream, self.epoch, self.blocks_free, self.running = stream, epoch, blocks_free, running
        self.waiting, self.preemptions, self.step_ns = waiting, preemptions, step_ns
        self.kv_cache_usage, self.kv_cache_usage_ns, self.busy_ns = kv_cache_usage, kv_cache_usage_ns, busy_ns
        self.prefill_ns, self.prefill_tokens, self.blocks_shared = prefill_ns, prefill_tokens, blocks_shared


# ---- inputs: from the queue ----


class QueueOpened(NamedTuple):
    """A Backlog stream is open; `channels` are those the queue knows."""

    channels: tuple[str, ...]


class QueueChannels(NamedTuple):
    """The queue's channels are others now than when the Backlog stream was opened."""

    channels: tuple[str, ...]


class QueueClosed(NamedTuple):
    """The Backlog stream ended: what it announced may have changed since."""


class Announced(Value):
    """A request waits. Sizes in tokens and bytes; `max_tokens` 0 means up to the window, `model` "" accepts any."""

    def __init__(
        self,
        request_id: str,
        channel: str,
        priority: int,
        position: int,
        attempt: int,
        model: str,
        prompt_bytes: int,
        prompt_tokens: int,
        max_tokens: int,
        n: int,
        chat: bool,
        traceparent: str = "",
        last_attempt: bool = False,
    ) -> None:
        self.request_id, self.channel, self.priority, self.position = request_id, channel, priority, position
        self.attempt, self.model, self.prompt_bytes, self.prompt_tokens = attempt, model, prompt_bytes, prompt_tokens
        self.max_tokens, self.n, self.chat, self.traceparent = max_tokens, n, chat, traceparent
        self.last_attempt = last_attempt
        """Whether earlier ones were lost and there is none after it: no worker is to have two such."""

    @property
    def completions(self) -> int:
        """How many of its engine's sequences it takes."""
        return max(self.n, 1)


class Gone(Value):
    """An announced request no longer waits."""

    def __init__(self, request_id: str, reason: GoneReason) -> None:
        self.request_id, self.reason = request_id, reason


# ---- inputs: from operators and the clock ----


class DrainRequested(NamedTuple):
    """An operator wants a worker to finish what it has and get nothing more; or, with `undo`, to take grants again."""

    worker_id: str
    undo: bool = False


class Reconfigure(NamedTuple):
    """The configuration gives the channels these shares from now on. Nothing that is held is taken back."""

    shares: Mapping[str, Share]


class Tick(NamedTuple):
    """Time passed."""


Input: TypeAlias = (
    WorkerOpened
    | WorkerClosed
    | WorkerLeaving
    | TokenizerAck
    | GrantUsed
    | CompletionAck
    | EngineReport
    | QueueOpened
    | QueueChannels
    | QueueClosed
    | Announced
    | Gone
    | DrainRequested
    | Reconfigure
    | Tick
)


# ---- effects ----


class Grant(Value):
    """To a worker: claim this request, its credits are booked.

    `reserve_output_tokens` are kept reserved ahead of what is generated; 0 reserves all at the tokenizer ACK.
    """

    def __init__(
        self,
        epoch: int,
        worker_id: str,
        request_id: str,
        channel: str,
        booked_blocks: int,
        settles: bool,
        attempt: int,
        traceparent: str,
        announced_ns: int,
        reserve_output_tokens: int = 0,
        standing: Announced | None = None,
        completions: int = 1,
        guaranteed: bool = False,
        last_attempt: bool = False,
    ) -> None:
        self.epoch, self.worker_id, self.request_id, self.channel = epoch, worker_id, request_id, channel
        self.booked_blocks, self.settles, self.attempt, self.traceparent = booked_blocks, settles, attempt, traceparent
        self.announced_ns, self.reserve_output_tokens = announced_ns, reserve_output_tokens
        self.standing = standing
        """The largest request it is for, if it stands for one that is yet to come: `request_id` names the grant."""
        self.completions = completions
        self.guaranteed = guaranteed
        """Whether its engine runs it first: its channel's guarantee, bent so that others start, has room for it."""
        self.last_attempt = last_attempt


class Met(Value):
    """A standing grant has met its request, which has so many blocks from now on."""

    def __init__(self, epoch: int, worker_id: str, request: Announced, booked_blocks: int) -> None:
        self.epoch, self.worker_id, self.request, self.booked_blocks = epoch, worker_id, request, booked_blocks


class Recall(NamedTuple):
    """To a worker: give the grant back if it has not been claimed."""

    epoch: int
    request_id: str


class TellDrain(NamedTuple):
    """To a worker: operators ask this of you from now on."""

    epoch: int
    drain: Drain


class Opened(NamedTuple):
    """To a worker: the epoch has begun."""

    epoch: int


class NameTaken(NamedTuple):
    """To a worker: another instance of its name is connected, so no epoch has begun."""

    epoch: int


class EndStream(NamedTuple):
    """A newer stream of the same worker has replaced this epoch's."""

    epoch: int


class SetWindow(NamedTuple):
    """To the queue: at most `limit` requests of the channel for each model announced and still waiting.

    Those for the `served` models ("" stands for any) are to be announced however many wait for others.
    """

    channel: str
    limit: int
    served: tuple[str, ...] = ()


class RejectRequest(NamedTuple):
    """To the queue: no worker could ever hold the request."""

    request_id: str
    code: str
    message: str
    param: str
    traceparent: str


class Settled(Value):
    """A tokenizer ACK sent `refunded_blocks` home."""

    def __init__(self, epoch: int, request_id: str, held_blocks: int, refunded_blocks: int) -> None:
        self.epoch, self.request_id, self.held_blocks = epoch, request_id, held_blocks
        self.refunded_blocks = refunded_blocks


class Released(Value):
    """A reservation ended and `released_blocks` came home; no cause means that its epoch ended."""

    def __init__(self, epoch: int, request_id: str, cause: ReleaseCause | None, released_blocks: int) -> None:
        self.epoch, self.request_id, self.cause, self.released_blocks = epoch, request_id, cause, released_blocks


class AuditFailed(NamedTuple):
    """Totals of a worker, or of the backlog, do not add up: a defect, one sentence per violation."""

    worker_id: str
    violations: tuple[str, ...]


Effect: TypeAlias = (
    Opened
    | NameTaken
    | EndStream
    | Grant
    | Met
    | Recall
    | TellDrain
    | SetWindow
    | RejectRequest
    | Settled
    | Released
    | AuditFailed
)
