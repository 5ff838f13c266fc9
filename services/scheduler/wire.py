"""Protobuf to core messages and back. Everything a peer can get wrong is refused here, by field name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import Final

from penstock.limits import MAX_NAME_BYTES
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2
from penstock.scheduler.v1 import scheduler_pb2
from services.core.drain import Drain
from services.rpc.encoding import length_tag, number_field, number_tag, text_field, wrapped
from services.scheduler.core import messages as m
from services.scheduler.core.snapshot import ChannelView, Snapshot, WorkerView

MAX_MODEL_NAMES = 64
"""Names one worker may answer to; they are searched for every head that asks for a model."""

MAX_BLOCKS: Final = 1 << 40
"""Most blocks a worker may say to have or to hold: beyond any memory, and sums over a fleet still fit the wire."""

MAX_TOKENS: Final = 1 << 40
"""Most tokens of one request, likewise."""

MAX_DRAIN_VERSION: Final = 1 << 40
"""Most times that a worker may say that operators changed their mind: the next one still fits the wire."""

SHAPE_MOST = {
    "capacity_blocks": MAX_BLOCKS,
    "block_size": 1 << 20,
    "max_model_len": 1 << 31,
    "max_num_seqs": 1 << 20,
    "lookahead_tokens": 1 << 20,
    "special_tokens": 1 << 20,
    "default_max_tokens": 1 << 31,
    "ceiling_max_tokens": 1 << 31,
    "most_blocks": MAX_BLOCKS,
}
"""Largest numbers of a worker's shape; what is larger is a mistake or a lie, and windows are computed from it."""

_GRANT: Final = length_tag(scheduler_pb2.SchedulerToWorker, "grant")
_GRANT_REQUEST_ID: Final = length_tag(scheduler_pb2.Grant, "request_id")
_GRANT_CHANNEL: Final = length_tag(scheduler_pb2.Grant, "channel")
_GRANT_BOOKED_BLOCKS: Final = number_tag(scheduler_pb2.Grant, "booked_blocks")
_GRANT_SETTLES: Final = number_tag(scheduler_pb2.Grant, "settles")
_GRANT_ATTEMPT: Final = number_tag(scheduler_pb2.Grant, "attempt")
_GRANT_TRACEPARENT: Final = length_tag(scheduler_pb2.Grant, "traceparent")
_GRANT_COMPLETIONS: Final = number_tag(scheduler_pb2.Grant, "completions")
_GRANT_RESERVE_OUTPUT_TOKENS: Final = number_tag(scheduler_pb2.Grant, "reserve_output_tokens")
_GRANT_STANDING: Final = length_tag(scheduler_pb2.Grant, "standing")
_GRANT_GUARANTEED: Final = number_tag(scheduler_pb2.Grant, "guaranteed")
_GRANT_LAST_ATTEMPT: Final = number_tag(scheduler_pb2.Grant, "last_attempt")


class InvalidFieldError(ValueError):
    """A message carries a value that cannot be meant; the text names the field."""


# ---- from workers ----


def worker_opened(message: scheduler_pb2.WorkerToScheduler, epoch: int) -> m.WorkerOpened:
    """Decode the first message of a Credits stream; raises InvalidFieldError naming the field."""
    if message.WhichOneof("message") != "open":
        found = message.WhichOneof("message") or "nothing"
        raise InvalidFieldError(f"open: the first message must be `open`, got {found}")
    opened = message.open
    for name in ("worker_id", "instance_id", "model"):
        _check_name(f"open.{name}", getattr(opened, name))
    for name in ("capacity_blocks", "block_size", "max_model_len", "max_num_seqs"):
        if getattr(opened, name) < 1:
            raise InvalidFieldError(f"open.{name}: must be at least 1")
    for name, most in SHAPE_MOST.items():
        _check_most(f"open.{name}", getattr(opened, name), most)
    if opened.role != scheduler_pb2.WORKER_ROLE_UNIFIED:
        raise InvalidFieldError(f"open.role: must be WORKER_ROLE_UNIFIED, got {opened.role}")
    _check_aliases(opened)
    _check_most("open.drain.version", opened.drain.version, MAX_DRAIN_VERSION)
    return m.WorkerOpened(
        epoch,
        opened.worker_id,
        opened.instance_id,
        (opened.model, *opened.model_aliases),
        m.EngineShape(
            opened.capacity_blocks,
            opened.block_size,
            opened.max_model_len,
            opened.max_num_seqs,
            opened.lookahead_tokens,
            opened.byte_bounded_tokenizer,
            opened.special_tokens,
            opened.default_max_tokens,
            opened.ceiling_max_tokens,
            opened.most_blocks,
        ),
        _inventory(opened.inventory),
        opened.takes_standing_grants,
        opened.runs_guaranteed_first,
        tuple(opened.adapters),
        Drain(opened.drain.version, opened.drain.wanted),
        opened.leaving,
    )


def _check_aliases(opened: scheduler_pb2.CreditsOpen) -> None:
    if len(opened.model_aliases) >= MAX_MODEL_NAMES:
        raise InvalidFieldError(f"open.model_aliases: at most {MAX_MODEL_NAMES - 1}, got {len(opened.model_aliases)}")
    for index, alias in enumerate(opened.model_aliases):
        _check_name(f"open.model_aliases[{index}]", alias)
    aliases = set(opened.model_aliases)
    for index, adapter in enumerate(opened.adapters):
        if adapter not in aliases:
            raise InvalidFieldError(f"open.adapters[{index}]: {adapter[:200]!r} is none of model_aliases")


def _inventory(inventory: Iterable[scheduler_pb2.Holding]) -> tuple[m.Holding, ...]:
    holdings: dict[str, m.Holding] = {}
    for index, holding in enumerate(inventory):
        where = f"open.inventory[{index}]"
        _check_name(f"{where}.request_id", holding.request_id)
        _check_name(f"{where}.channel", holding.channel)
        _check_most(f"{where}.held_blocks", holding.held_blocks, MAX_BLOCKS)
        if holding.request_id in holdings:
            raise InvalidFieldError(f"{where}.request_id: {holding.request_id!r} is listed twice")
        _check_most(f"{where}.completions", holding.completions, SHAPE_MOST["max_num_seqs"])
        holdings[holding.request_id] = m.Holding(
            holding.request_id,
            holding.channel,
            holding.held_blocks,
            holding.seq,
            max(holding.completions, 1),
            holding.guaranteed,
            holding.last_attempt,
        )
    return tuple(holdings.values())


def from_worker(message: scheduler_pb2.WorkerToScheduler, stream: int) -> m.Input:
    """Decode a later message of the Credits stream with epoch `stream`; raises InvalidFieldError naming the field."""
    kind = message.WhichOneof("message")
    if kind == "tokenizer_ack":
        return _tokenizer_ack(message.tokenizer_ack, stream)
    if kind == "completion_ack":
        return _completion_ack(message.completion_ack, stream)
    if kind == "grant_used":
        return _grant_used(message.grant_used, stream)
    if kind == "engine_report":
        return _engine_report(message.engine_report, stream)
    if kind == "leaving":
        return m.WorkerLeaving(stream, message.leaving.reason)
    if kind == "open":
        raise InvalidFieldError("open: only the first message may be `open`")
    raise InvalidFieldError("message: not set, or of a kind this scheduler does not know")


# Reading a field of a message takes as long as making a tuple: each is read once.
def _tokenizer_ack(ack: scheduler_pb2.TokenizerAck, stream: int) -> m.TokenizerAck:
    request_id, held_blocks = ack.request_id, ack.held_blocks
    prompt, generated, limit = ack.prompt_tokens, ack.generated_tokens, ack.output_limit_tokens
    _check_name("tokenizer_ack.request_id", request_id)
    _check_most("tokenizer_ack.held_blocks", held_blocks, MAX_BLOCKS)
    if prompt > MAX_TOKENS or generated > MAX_TOKENS or limit > MAX_TOKENS:
        raise InvalidFieldError(f"tokenizer_ack.prompt_tokens: no request has more than {MAX_TOKENS} tokens")
    return m.TokenizerAck(stream, ack.epoch, request_id, ack.seq, held_blocks, prompt, generated, limit)


def _grant_used(used: scheduler_pb2.GrantUsed, stream: int) -> m.GrantUsed:
    _check_name("grant_used.grant", used.grant)
    _check_name("grant_used.announced.request_id", used.announced.request_id)
    for field in ("prompt_bytes", "prompt_tokens", "max_tokens"):
        _check_most(f"grant_used.announced.{field}", getattr(used.announced, field), MAX_TOKENS)
    return m.GrantUsed(stream, used.epoch, used.grant, _announced(used.announced))


def _completion_ack(ack: scheduler_pb2.CompletionAck, stream: int) -> m.CompletionAck:
    request_id, output_tokens = ack.request_id, ack.output_tokens
    _check_name("completion_ack.request_id", request_id)
    _check_most("completion_ack.output_tokens", output_tokens, MAX_TOKENS)
    return m.CompletionAck(stream, ack.epoch, request_id, ack.seq, _cause(ack.cause), output_tokens)


_CAUSES: Final = {int(cause): cause for cause in m.ReleaseCause}
_GONE_REASONS: Final = {reason.value: reason for reason in m.GoneReason}


def _cause(number: int) -> m.ReleaseCause:
    cause = _CAUSES.get(number)
    if cause is None:
        raise InvalidFieldError(f"completion_ack.cause: {number} is not a release cause")
    return cause


def _engine_report(report: scheduler_pb2.EngineReport, stream: int) -> m.EngineReport:
    _check_most("engine_report.blocks_free", report.blocks_free, MAX_BLOCKS)
    _check_most("engine_report.blocks_shared", report.blocks_shared, MAX_BLOCKS)
    usage, usage_ns = report.kv_cache_usage, report.kv_cache_usage_ns
    _check_finite("engine_report.kv_cache_usage", usage)
    _check_finite("engine_report.kv_cache_usage_ns", usage_ns)
    return m.EngineReport(
        stream=stream,
        epoch=report.epoch,
        blocks_free=report.blocks_free if report.HasField("blocks_free") else None,
        running=report.running,
        waiting=report.waiting,
        preemptions=report.preemptions,
        step_ns=report.step_ns,
        kv_cache_usage=usage,
        kv_cache_usage_ns=usage_ns,
        busy_ns=report.busy_ns,
        prefill_ns=report.prefill_ns,
        prefill_tokens=report.prefill_tokens,
        blocks_shared=report.blocks_shared,
    )


def _check_finite(field: str, value: float) -> None:
    # Whoever asks for the fleet's status is told it, and neither JSON nor a bar has a place for what is no number.
    if not 0 <= value < inf:
        raise InvalidFieldError(f"{field}: must be a finite number and not below 0, got {value}")


def _check_most(field: str, value: int, most: int) -> None:
    if value > most:
        raise InvalidFieldError(f"{field}: at most {most}, got {value}")


def _check_name(field: str, value: str) -> None:
    if not value:
        raise InvalidFieldError(f"{field}: must not be empty")
    # A character takes at most four bytes: short names need no encoding to know.
    if 4 * len(value) > MAX_NAME_BYTES and len(value.encode()) > MAX_NAME_BYTES:
        raise InvalidFieldError(f"{field}: at most {MAX_NAME_BYTES} bytes, got {len(value.encode())}")


# ---- to workers ----


def credits_opened(epoch: int, policy: str, report_interval_ns: int) -> scheduler_pb2.SchedulerToWorker:
    """Encode the first message to a worker."""
    return scheduler_pb2.SchedulerToWorker(
        open=scheduler_pb2.CreditsOpened(epoch=epoch, policy=policy, report_interval_ns=report_interval_ns)
    )


def grant(effect: m.Grant, traceparent: str) -> bytes:
    """Encode a grant, with the trace context of its span, as the SchedulerToWorker it travels in."""
    content = text_field(_GRANT_REQUEST_ID, effect.request_id) + text_field(_GRANT_CHANNEL, effect.channel)
    content += number_field(_GRANT_BOOKED_BLOCKS, effect.booked_blocks) + number_field(_GRANT_SETTLES, effect.settles)
    content += number_field(_GRANT_ATTEMPT, effect.attempt) + text_field(_GRANT_TRACEPARENT, traceparent)
    content += number_field(_GRANT_RESERVE_OUTPUT_TOKENS, effect.reserve_output_tokens)
    if effect.completions > 1:
        content += number_field(_GRANT_COMPLETIONS, effect.completions)
    if effect.standing is not None:
        content += wrapped(_GRANT_STANDING, _standing(effect.standing).SerializeToString())
    if effect.guaranteed:
        content += number_field(_GRANT_GUARANTEED, 1)
    if effect.last_attempt:
        content += number_field(_GRANT_LAST_ATTEMPT, 1)
    return wrapped(_GRANT, content)


def _standing(most: m.Announced) -> scheduler_pb2.Standing:
    return scheduler_pb2.Standing(
        model=most.model,
        chat=most.chat,
        most_prompt_bytes=most.prompt_bytes,
        most_prompt_tokens=most.prompt_tokens,
        most_output_tokens=most.max_tokens,
    )


def recall(effect: m.Recall) -> scheduler_pb2.SchedulerToWorker:
    """Encode a recall."""
    return scheduler_pb2.SchedulerToWorker(recall=scheduler_pb2.Recall(request_id=effect.request_id))


def drain(asked: Drain) -> scheduler_pb2.SchedulerToWorker:
    """Encode what operators ask of a worker."""
    return scheduler_pb2.SchedulerToWorker(drain=scheduler_pb2.Drain(version=asked.version, wanted=asked.wanted))


# ---- the queue ----


def backlog_open(name: str, instance_id: str, workers: int) -> queue_pb2.SchedulerToQueue:
    """Encode the first message to the queue, by a scheduler to which `workers` are connected."""
    opening = queue_pb2.BacklogOpen(name=name, instance_id=instance_id, workers=workers)
    return queue_pb2.SchedulerToQueue(open=opening)


def window(effect: m.SetWindow) -> queue_pb2.SchedulerToQueue:
    """Encode a channel's window."""
    told = queue_pb2.Window(channel=effect.channel, limit=effect.limit, served_models=effect.served)
    return queue_pb2.SchedulerToQueue(window=told)


def reject(effect: m.RejectRequest) -> queue_pb2.SchedulerToQueue:
    """Encode a rejection."""
    error = request_pb2.RequestError(code=effect.code, message=effect.message, param=effect.param)
    return queue_pb2.SchedulerToQueue(reject=queue_pb2.Reject(request_id=effect.request_id, error=error))


def from_queue(message: queue_pb2.QueueToScheduler) -> m.Input:
    """Decode one message of a Backlog stream; raises InvalidFieldError naming the field."""
    kind = message.WhichOneof("message")
    if kind == "announce":
        return _announced(message.announce)
    if kind == "gone":
        gone = message.gone
        number = gone.reason
        reason = _GONE_REASONS.get(number)
        if reason is None:
            raise InvalidFieldError(f"gone.reason: {number} is not a reason")
        return m.Gone(gone.request_id, reason)
    if kind == "channels":
        return m.QueueChannels(tuple(message.channels.channels))
    if kind == "open":
        return m.QueueOpened(tuple(message.open.channels))
    raise InvalidFieldError("message: not set, or of a kind this scheduler does not know")


def _announced(a: queue_pb2.Announce) -> m.Announced:
    return m.Announced(
        request_id=a.request_id,
        channel=a.channel,
        priority=a.priority,
        position=a.position,
        attempt=a.attempt,
        model=a.model,
        prompt_bytes=a.prompt_bytes,
        prompt_tokens=a.prompt_tokens,
        max_tokens=a.max_tokens,
        n=max(a.n, 1),
        chat=a.chat,
        traceparent=a.traceparent,
        last_attempt=a.last_attempt,
    )


# ---- status ----


def status(
    snapshot: Snapshot,
    unserved: Mapping[str, int],
    instance_id: str = "",
    instances: Mapping[int, str] | None = None,
    up_ns: int = 0,
) -> scheduler_pb2.StatusResponse:
    """Encode the state of the scheduler `instance_id`, up for `up_ns`.

    `unserved` counts who waits for each model that nobody serves, `instances` names the process of each epoch.
    """
    processes = instances or {}
    tokenizer_ack = "tokenizer_ack"
    causes = [cause.name.lower() for cause in m.ReleaseCause]
    return scheduler_pb2.StatusResponse(
        policy=snapshot.policy,
        workers=[_worker(view, processes.get(view.epoch, "")) for view in snapshot.workers],
        channels=[_channel(view) for view in snapshot.channels],
        queue_connected=snapshot.queue_connected,
        audit_violations=snapshot.audit_violations,
        stale_messages=sum(snapshot.stale.values()),
        duplicate_acks=sum(snapshot.duplicates.values()),
        tokenizer_refund_blocks=snapshot.refunded_blocks.get(tokenizer_ack, 0),
        completion_refund_blocks=sum(snapshot.refunded_blocks.get(cause, 0) for cause in causes),
        tokenizer_refunds=snapshot.refunds.get(tokenizer_ack, 0),
        completion_refunds=sum(snapshot.refunds.get(cause, 0) for cause in causes),
        grants=sum(snapshot.grants.values()),
        unserved_models=[
            scheduler_pb2.UnservedModel(model=model, waiting=count) for model, count in sorted(unserved.items())
        ],
        instance_id=instance_id,
        up_ns=up_ns,
    )


def names(snapshot: Snapshot, up_ns: int) -> scheduler_pb2.StatusResponse:
    """Encode what the models are called, whether all who serve one drain, for how long this is up, and nothing else."""
    # Each model once, whoever serves it. One whose stream broke a moment ago counts: it takes grants when it is back.
    models = sorted({view.models for view in snapshot.workers})
    taking = {view.models for view in snapshot.workers if not view.draining}
    workers = (
        scheduler_pb2.WorkerStatus(model=called[0], model_aliases=called[1:], draining=called not in taking)
        for called in models
    )
    return scheduler_pb2.StatusResponse(workers=workers, up_ns=up_ns)


def _worker(view: WorkerView, instance_id: str) -> scheduler_pb2.WorkerStatus:
    return scheduler_pb2.WorkerStatus(
        worker_id=view.worker_id,
        epoch=view.epoch,
        model=view.models[0],
        model_aliases=view.models[1:],
        adapters=view.adapters,
        capacity_blocks=view.capacity_blocks,
        free_blocks=view.free_blocks,
        held_blocks=view.held_blocks,
        reservations=view.reservations,
        drift_blocks=view.drift_blocks,
        engine=None if view.report is None else _report(view.report),
        draining=view.draining,
        block_size=view.block_size,
        max_model_len=view.max_model_len,
        connected=view.connected,
        instance_id=instance_id,
    )


def _report(report: m.EngineReport) -> scheduler_pb2.EngineReport:
    return scheduler_pb2.EngineReport(
        epoch=report.epoch,
        blocks_free=report.blocks_free,
        running=report.running,
        waiting=report.waiting,
        preemptions=report.preemptions,
        step_ns=report.step_ns,
        kv_cache_usage=report.kv_cache_usage,
        kv_cache_usage_ns=report.kv_cache_usage_ns,
        busy_ns=report.busy_ns,
        prefill_ns=report.prefill_ns,
        prefill_tokens=report.prefill_tokens,
        blocks_shared=report.blocks_shared,
    )


def _channel(view: ChannelView) -> scheduler_pb2.ChannelStatus:
    return scheduler_pb2.ChannelStatus(
        channel=view.channel,
        weight=view.share.weight,
        guaranteed_share=view.share.guaranteed_share,
        ceiling_share=view.share.ceiling_share,
        waiting=view.waiting,
        running=view.running,
        held_blocks=view.held_blocks,
        grants=view.grants,
    )
