"""Turns a result into a response body, shaped as vLLM's OpenAI server writes it."""

from __future__ import annotations

from typing import Any, TypeAlias

from penstock.openai.logprobs import Rows, completion_logprobs, message_logprobs, prompt_logprobs
from penstock.openai.message import Message
from penstock.openai.shape import Shape
from penstock.openai.spelling import as_spelt
from penstock.request.v1 import request_pb2 as pb

FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
    pb.FINISH_REASON_ERROR: "error",
    pb.FINISH_REASON_REPETITION: "repetition",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}

STATUS_CODES = {
    pb.OUTCOME_REJECTED: 400,
    pb.OUTCOME_CANCELLED: 499,
    pb.OUTCOME_EXPIRED: 408,
    pb.OUTCOME_DEAD: 500,
}
"""HTTP status that stands for an outcome."""

CODES = {
    pb.OUTCOME_REJECTED: "invalid_request",
    pb.OUTCOME_CANCELLED: "request_cancelled",
    pb.OUTCOME_EXPIRED: "request_expired",
    pb.OUTCOME_DEAD: "attempts_exhausted",
}
"""Error code of an outcome whose result names none."""

SAID_AS = {"cancelled": "request_cancelled"}
"""Codes of queue and worker that have another name here."""

NOT_FOUND_CODES = ("model_not_found",)

CHAT_PREFIX = "chatcmpl"
COMPLETION_PREFIX = "cmpl"

Line: TypeAlias = dict[str, Any]


def body_of(shape: Shape, result: pb.Result, rows: Rows = list) -> Line:
    """Return the response body of a completed request, fields and values as vLLM's server writes them.

    Positions with log probabilities, of which there may be very many, are put in `rows`.
    """
    return _chat(shape, result, rows) if shape.chat else _completion(shape, result, rows)


def failure_of(result: pb.Result, shape: Shape | None = None) -> tuple[int, Line]:
    """Return the HTTP status and the error object of a request that ended without an answer.

    It names fields as the body of `shape` does, by default that of the request's reference.
    """
    code = result.error.code or CODES.get(result.outcome, "internal_error")
    code = SAID_AS.get(code, code)
    message = result.error.message or f"the request ended as {pb.Outcome.Name(result.outcome)}"
    status = 404 if code in NOT_FOUND_CODES else STATUS_CODES.get(result.outcome, 500)
    asked = shape or Shape.from_reference(result.client_reference)
    message, param = as_spelt(message, result.error.param, asked.spellings)
    return status, error_object(status, message, param, code)


def error_object(status: int, message: str, param: str, code: str) -> Line:
    """Return OpenAI's error object for an answer with this HTTP status."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": message, "type": kind, "param": param or None, "code": code}


def usage_of(*usages: pb.Usage) -> Line:
    """Return the token counts of one body's results as a stream tells them: details only if there are any."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages)
    counts: Line = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    if cached:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    if any(usage.HasField("reasoning_tokens") for usage in usages):
        reasoning = sum(usage.reasoning_tokens for usage in usages)
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return counts


def whole_usage(*usages: pb.Usage) -> Line:
    """Return the token counts of one body's results as a whole answer tells them."""
    counts = usage_of(*usages)
    details = {name: counts.pop(name, None) for name in ("prompt_tokens_details", "completion_tokens_details")}
    return {**counts, **details}


def ending(choice: pb.Choice) -> Line:
    """Return why a choice ended: `finish_reason` and `stop_reason`."""
    stop: str | int | None = choice.stop_string or None
    if choice.HasField("stop_token_id"):
        stop = choice.stop_token_id
    return {"finish_reason": FINISH_REASONS.get(choice.finish_reason), "stop_reason": stop}


def _common(prefix: str, kind: str, choices: list[Line], result: pb.Result) -> Line:
    return {
        "id": f"{prefix}-{result.request_id}",
        "object": kind,
        "created": result.timings.submitted_unix_ns // 1_000_000_000,
        "model": result.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": None,
        "usage": whole_usage(result.usage),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def _chat(shape: Shape, result: pb.Result, rows: Rows) -> Line:
    choices = []
    for choice in result.choices:
        told = Message.of_choice(choice)
        message = {
            "role": shape.role,
            "content": told.content,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            **({"tool_calls": told.to_list()} if told.calls else {}),
            "reasoning": told.reasoning,
        }
        choices.append(
            {
                "index": choice.index,
                "message": message,
                "logprobs": message_logprobs(choice.logprobs, shape, choice.HasField("message"), rows),
                **ending(choice),
                "token_ids": None,
                "routed_experts": None,
            }
        )
    return {
        **_common(CHAT_PREFIX, "chat.completion", choices, result),
        "prompt_logprobs": prompt_logprobs(shape, result, rows),
        "prompt_token_ids": None,
        "prompt_text": None,
    }


def _completion(shape: Shape, result: pb.Result, rows: Rows) -> Line:
    choices = []
    for choice in result.choices:
        entries = [*result.prompt_logprobs, *choice.logprobs] if shape.echo else choice.logprobs
        first_unknown = bool(shape.echo and result.prompt_logprobs)
        choices.append(
            {
                "index": choice.index,
                "text": result.prompt_text + choice.text if shape.echo else choice.text,
                "logprobs": completion_logprobs(entries, shape, first_unknown),
                **ending(choice),
                "prompt_logprobs": prompt_logprobs(shape, result, rows),
                "token_ids": None,
                "prompt_token_ids": None,
                "routed_experts": None,
            }
        )
    return _common(COMPLETION_PREFIX, "text_completion", choices, result)
