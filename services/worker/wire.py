"""Between the protobuf messages of the two streams and the session's plain values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from penstock.openai.speakable import spelt
from penstock.queue.v1 import queue_pb2 as q
from penstock.request.v1 import request_pb2 as pb
from penstock.scheduler.v1 import scheduler_pb2 as s
from services.rpc.encoding import length_tag, number_field, number_tag, text_field, varint, wrapped
from services.worker.core import messages as m
from services.worker.core.messages import Cause, EndingKind
from services.worker.engine import EngineShape, PromptSpec
from services.worker.forms import form_of

CAUSES: Final = {
    Cause.COMPLETED: s.RELEASE_CAUSE_COMPLETED,
    Cause.REJECTED: s.RELEASE_CAUSE_REJECTED,
    Cause.CANCELLED: s.RELEASE_CAUSE_CANCELLED,
    Cause.EXPIRED: s.RELEASE_CAUSE_EXPIRED,
    Cause.FAILED: s.RELEASE_CAUSE_FAILED,
    Cause.CLAIM_REFUSED: s.RELEASE_CAUSE_CLAIM_REFUSED,
    Cause.LEASE_LOST: s.RELEASE_CAUSE_LEASE_LOST,
    Cause.RECALLED: s.RELEASE_CAUSE_RECALLED,
    Cause.UNCLAIMED: s.RELEASE_CAUSE_UNCLAIMED,
}

OUTCOMES: Final = {
    EndingKind.COMPLETED: pb.OUTCOME_COMPLETED,
    EndingKind.REJECTED: pb.OUTCOME_REJECTED,
    EndingKind.CANCELLED: pb.OUTCOME_CANCELLED,
    EndingKind.EXPIRED: pb.OUTCOME_EXPIRED,
}

CANCEL_CAUSES: Final = {
    q.CANCEL_REASON_CLIENT: m.CancelCause.CLIENT,
    q.CANCEL_REASON_DEADLINE: m.CancelCause.DEADLINE,
    q.CANCEL_REASON_LEASE_LOST: m.CancelCause.LEASE_LOST,
}

MAX_TOLD_CHARACTERS = 4096
"""Of the text of an error: it may quote a prompt, a template or an output, and is stored and kept in memory."""


_TOKENIZER_ACK: Final = length_tag(s.WorkerToScheduler, "tokenizer_ack")
_SETTLED_EPOCH: Final = number_tag(s.TokenizerAck, "epoch")
_SETTLED_REQUEST_ID: Final = length_tag(s.TokenizerAck, "request_id")
_SETTLED_SEQ: Final = number_tag(s.TokenizerAck, "seq")
_SETTLED_HELD: Final = number_tag(s.TokenizerAck, "held_blocks")
_SETTLED_PROMPT: Final = number_tag(s.TokenizerAck, "prompt_tokens")
_SETTLED_RESERVED: Final = number_tag(s.TokenizerAck, "reserved_output_tokens")
_SETTLED_GENERATED: Final = number_tag(s.TokenizerAck, "generated_tokens")
_SETTLED_LIMIT: Final = number_tag(s.TokenizerAck, "output_limit_tokens")

_COMPLETION_ACK: Final = length_tag(s.WorkerToScheduler, "completion_ack")
_RELEASED_EPOCH: Final = number_tag(s.CompletionAck, "epoch")
_RELEASED_REQUEST_ID: Final = length_tag(s.CompletionAck, "request_id")
_RELEASED_SEQ: Final = number_tag(s.CompletionAck, "seq")
_RELEASED_CAUSE: Final = number_tag(s.CompletionAck, "cause")
_RELEASED_OUTPUT: Final = number_tag(s.CompletionAck, "output_tokens")
_RELEASED_PREEMPTIONS: Final = number_tag(s.CompletionAck, "preemptions")

_CLAIM: Final = length_tag(q.WorkerToQueue, "claim")
_CLAIM_REQUEST_ID: Final = length_tag(q.Claim, "request_id")
_TOKENS: Final = length_tag(q.WorkerToQueue, "tokens")

_COMPLETE: Final = length_tag(q.WorkerToQueue, "complete")
_COMPLETE_LEASE: Final = length_tag(q.Complete, "lease")
_COMPLETE_RESULT: Final = length_tag(q.Complete, "result")
_COMPLETE_FAILURE: Final = length_tag(q.Complete, "failure")
_LEASE_REQUEST_ID: Final = length_tag(q.LeaseRef, "request_id")
_LEASE_ATTEMPT: Final = number_tag(q.LeaseRef, "attempt")
_LEASE_TOKEN: Final = number_tag(q.LeaseRef, "fencing_token")


def told(text: str) -> str:
    """Return a text of any origin as a message can carry it: so short, and half surrogate pairs written out."""
    return spelt(text[:MAX_TOLD_CHARACTERS])


# ---- scheduler ----


def credits_open(
    worker_id: str, instance_id: str, shape: EngineShape, capacity_blocks: int, opening: m.OpenCredits
) -> s.WorkerToScheduler:
    """Return the first message of a Credits stream."""
    return s.WorkerToScheduler(
        open=s.CreditsOpen(
            worker_id=worker_id,
            instance_id=instance_id,
            capacity_blocks=capacity_blocks,
            block_size=shape.block_size,
            max_model_len=shape.max_model_len,
            model=shape.model,
            role=s.WORKER_ROLE_UNIFIED,
            inventory=[
                s.Holding(
                    request_id=h.request_id,
                    channel=h.channel,
                    held_blocks=h.held_blocks,
                    seq=h.seq,
                    completions=h.completions,
                    guaranteed=h.guaranteed,
                    last_attempt=h.last_attempt,
                )
                for h in opening.inventory
            ],
            max_num_seqs=shape.max_num_seqs,
            lookahead_tokens=shape.lookahead_tokens,
            byte_bounded_tokenizer=shape.byte_bounded_tokenizer,
            special_tokens=shape.special_tokens,
            model_aliases=shape.model_aliases,
            adapters=shape.adapters,
            default_max_tokens=_within_window(shape.default_max_tokens, shape),
            ceiling_max_tokens=_within_window(shape.ceiling_max_tokens, shape),
            takes_standing_grants=True,
            runs_guaranteed_first=shape.guaranteed_first,
            most_blocks=shape.most_blocks,
            drain=s.Drain(version=opening.drain.version, wanted=opening.drain.wanted),
            leaving=opening.leaving,
        )
    )


def reported_model(shape: EngineShape, asked: str) -> str:
    """Return the name that answers a request for the model `asked`: an adapter's own, else that of the model."""
    return asked if asked in shape.adapters else shape.model


def _within_window(tokens: int | None, shape: EngineShape) -> int:
    """Return a number of the model's configuration, which may be any, as the scheduler takes it; 0 for none."""
    return min(max(tokens or 0, 0), shape.max_model_len)


def tokenizer_ack(ack: m.SendTokenizerAck) -> bytes:
    """Return the encoded WorkerToScheduler with a TokenizerAck."""
    content = text_field(_SETTLED_REQUEST_ID, ack.request_id) + number_field(_SETTLED_EPOCH, ack.epoch)
    content += number_field(_SETTLED_SEQ, ack.seq) + number_field(_SETTLED_HELD, ack.held_blocks)
    content += number_field(_SETTLED_PROMPT, ack.prompt_tokens)
    content += number_field(_SETTLED_RESERVED, ack.reserved_output_tokens)
    content += number_field(_SETTLED_GENERATED, ack.generated_tokens)
    return wrapped(_TOKENIZER_ACK, content + number_field(_SETTLED_LIMIT, ack.output_limit_tokens))


def completion_ack(ack: m.SendCompletionAck) -> bytes:
    """Return the encoded WorkerToScheduler with a CompletionAck."""
    content = text_field(_RELEASED_REQUEST_ID, ack.request_id) + number_field(_RELEASED_EPOCH, ack.epoch)
    content += number_field(_RELEASED_SEQ, ack.seq) + number_field(_RELEASED_CAUSE, CAUSES[ack.cause])
    content += number_field(_RELEASED_OUTPUT, ack.output_tokens)
    return wrapped(_COMPLETION_ACK, content + number_field(_RELEASED_PREEMPTIONS, ack.preemptions))


def grant_used(used: m.SendGrantUsed) -> s.WorkerToScheduler:
    """Return a GrantUsed."""
    return s.WorkerToScheduler(grant_used=s.GrantUsed(epoch=used.epoch, grant=used.grant, announced=used.announced))


def engine_report(report: m.SendReport) -> s.WorkerToScheduler:
    """Return an EngineReport."""
    return s.WorkerToScheduler(
        engine_report=s.EngineReport(
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
    )


def leaving(reason: str) -> s.WorkerToScheduler:
    """Return a Leaving."""
    return s.WorkerToScheduler(leaving=s.Leaving(reason=told(reason)))


def granted(grant: s.Grant) -> m.Granted:
    """Read a Grant."""
    return m.Granted(
        request_id=grant.request_id,
        channel=grant.channel,
        booked_blocks=grant.booked_blocks,
        settles=grant.settles,
        attempt=grant.attempt,
        reserve_output_tokens=grant.reserve_output_tokens,
        standing=_standing(grant.standing) if grant.HasField("standing") else None,
        completions=max(grant.completions, 1),
        guaranteed=grant.guaranteed,
        last_attempt=grant.last_attempt,
    )


def _standing(standing: s.Standing) -> m.Standing:
    return m.Standing(
        standing.model,
        standing.chat,
        standing.most_prompt_bytes,
        standing.most_prompt_tokens,
        standing.most_output_tokens,
    )


# ---- queue ----


def lease_of(ref: q.LeaseRef) -> m.Lease:
    """Read a lease."""
    return m.Lease(ref.request_id, ref.attempt, ref.fencing_token)


def lease_ref(lease: m.Lease) -> q.LeaseRef:
    """Write a lease."""
    return q.LeaseRef(request_id=lease.request_id, attempt=lease.attempt, fencing_token=lease.fencing_token)


def work_open(worker_id: str, instance_id: str, held: Iterable[m.Lease]) -> q.WorkerToQueue:
    """Return the first message of a Work stream."""
    refs = [lease_ref(lease) for lease in held]
    return q.WorkerToQueue(open=q.WorkOpen(worker_id=worker_id, instance_id=instance_id, held=refs))


def claim(request_id: str) -> bytes:
    """Return the encoded WorkerToQueue with a Claim."""
    return wrapped(_CLAIM, wrapped(_CLAIM_REQUEST_ID, request_id.encode()))


def offer(effect: m.SendOffer) -> q.WorkerToQueue:
    """Return an Offer."""
    standing = effect.standing
    return q.WorkerToQueue(
        offer=q.Offer(
            grant=effect.grant,
            channel=effect.channel,
            model=standing.model,
            chat=standing.chat,
            most_prompt_bytes=standing.most_prompt_bytes,
            most_prompt_tokens=standing.most_prompt_tokens,
            most_output_tokens=standing.most_output_tokens,
        )
    )


def withdraw(grant: str) -> q.WorkerToQueue:
    """Return a Withdraw."""
    return q.WorkerToQueue(withdraw=q.Withdraw(grant=grant))


def completed(lease: m.Lease, result: pb.Result, more: Sequence[bytes] = ()) -> bytes:
    """Return the encoded WorkerToQueue with a Complete that has a result, and encoded fields of it behind, in parts.

    They may be megabytes, and are copied once.
    """
    of_lease, head = _lease_field(lease), result.SerializeToString()
    size = len(head) + sum(map(len, more))
    of_result = _COMPLETE_RESULT + varint(size)
    before = _COMPLETE + varint(len(of_lease) + len(of_result) + size) + of_lease + of_result
    return b"".join([before, head, *more])


def failed(lease: m.Lease, ending: m.Ending) -> bytes:
    """Return the encoded WorkerToQueue with a Complete that has an error."""
    return wrapped(_COMPLETE, _lease_field(lease) + wrapped(_COMPLETE_FAILURE, error_of(ending).SerializeToString()))


def _lease_field(lease: m.Lease) -> bytes:
    content = text_field(_LEASE_REQUEST_ID, lease.request_id) + number_field(_LEASE_ATTEMPT, lease.attempt)
    return wrapped(_COMPLETE_LEASE, content + number_field(_LEASE_TOKEN, lease.fencing_token))


def error_of(ending: m.Ending) -> pb.RequestError:
    """Return why an attempt ended."""
    return pb.RequestError(code=told(ending.code), message=told(ending.message), param=told(ending.param))


def tokens(delta: pb.TokenDelta, more: bytes = b"") -> bytes:
    """Return the encoded WorkerToQueue with a TokenDelta, and `more` encoded fields of it behind."""
    return wrapped(_TOKENS, delta.SerializeToString() + more)


def renew(leases: Iterable[m.Lease]) -> q.WorkerToQueue:
    """Return a Renew."""
    return q.WorkerToQueue(renew=q.Renew(leases=[lease_ref(lease) for lease in leases]))


def give_back(leases: Iterable[m.Lease], reason: str) -> q.WorkerToQueue:
    """Return a GiveBack."""
    refs = [lease_ref(lease) for lease in leases]
    return q.WorkerToQueue(give_back=q.GiveBack(leases=refs, reason=told(reason)))


def delivered(deliver: q.Deliver) -> m.Delivered:
    """Read what the session needs of a Deliver."""
    sampling = deliver.request.sampling
    completions = sampling.n if sampling.HasField("n") else 1
    met = m.Met(deliver.grant, deliver.announced) if deliver.grant else None
    return m.Delivered(lease_of(deliver.lease), completions, sampling.max_tokens, deliver.watched, met)


def queue_message(message: q.QueueToWorker) -> m.Message | None:
    """Read a message of the Work stream other than Deliver; None if it is of a kind this worker does not know."""
    kind = message.WhichOneof("message")
    if kind == "open":
        return m.QueueUp(message.open.lease_ns, message.open.max_inflight, message.open.takes_offers)
    if kind == "refused":
        still_waits = message.refused.reason == q.REFUSED_REASON_TOO_MANY
        return m.Refused(message.refused.request_id, still_waits)
    if kind == "cancel":
        cause = CANCEL_CAUSES.get(message.cancel.reason, m.CancelCause.LEASE_LOST)
        return m.CancelRun(lease_of(message.cancel.lease), cause)
    if kind == "recorded":
        recorded = message.recorded
        return m.Recorded(lease_of(recorded.lease), recorded.accepted)
    if kind == "watched":
        return m.Watched(message.watched.request_id, message.watched.watched)
    return None


def prompt_spec(request: pb.Request) -> PromptSpec:
    """Return what the renderer needs of a request."""
    sampling = request.sampling
    truncate = sampling.truncate_prompt_tokens if sampling.HasField("truncate_prompt_tokens") else None
    special = sampling.add_special_tokens if sampling.HasField("add_special_tokens") else None
    kind = request.WhichOneof("prompt")
    if kind == "chat":
        return _chat_spec(request, sampling, truncate)
    return PromptSpec(
        None if kind == "token_ids" else request.text,
        tuple(request.token_ids.ids) if kind == "token_ids" else None,
        add_special_tokens=special,
        truncate_prompt_tokens=truncate,
        max_tokens=sampling.max_tokens,
        want_text=request.echo,
        form=form_of(sampling),
    )


def _chat_spec(request: pb.Request, sampling: pb.SamplingParams, truncate: int | None) -> PromptSpec:
    chat = request.chat
    return PromptSpec(
        messages_json=chat.messages_json,
        chat_template=chat.chat_template,
        chat_template_kwargs_json=chat.chat_template_kwargs_json,
        add_generation_prompt=not chat.HasField("add_generation_prompt") or chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        # A template writes its special tokens itself.
        add_special_tokens=chat.add_special_tokens,
        truncate_prompt_tokens=truncate,
        max_tokens=sampling.max_tokens,
        want_text=request.echo,
        tools_json=chat.tools.tools_json,
        tool_choice_json=chat.tools.tool_choice_json,
        form=form_of(sampling, chat),
    )
