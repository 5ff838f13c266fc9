"""Turns a result into an output line, shaped as `vllm run-batch` writes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.batch.bodies import ChatBody, CompletionBody
from penstock.request.v1 import request_pb2 as pb

FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
    pb.FINISH_REASON_ERROR: "error",
    pb.FINISH_REASON_REPETITION: "repetition",
}

LEAST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON cannot say."""

STATUS_CODES = {
    pb.OUTCOME_REJECTED: 400,
    pb.OUTCOME_CANCELLED: 499,
    pb.OUTCOME_EXPIRED: 408,
    pb.OUTCOME_DEAD: 500,
}
"""HTTP status that stands for an outcome in the output file."""

CODES = {
    pb.OUTCOME_REJECTED: "invalid_request",
    pb.OUTCOME_CANCELLED: "request_cancelled",
    pb.OUTCOME_EXPIRED: "request_expired",
    pb.OUTCOME_DEAD: "attempts_exhausted",
}
"""Error code of an outcome whose result names none."""

NOT_FOUND_CODES = ("model_not_found",)

Line = dict[str, Any]


def answer(custom_id: str, line: int, body: ChatBody | CompletionBody, result: pb.Result) -> Line:
    """Return the output line for a request that has ended, however it ended."""
    if result.outcome != pb.OUTCOME_COMPLETED:
        return _failure(custom_id, line, result)
    made = _chat(body, result) if isinstance(body, ChatBody) else _completion(body, result)
    return {
        "id": f"vllm-{result.request_id}",
        "custom_id": custom_id,
        "response": {"status_code": 200, "request_id": f"vllm-batch-{result.request_id}", "body": made},
        "error": None,
    }


def error_line(name: str, custom_id: str | None, line: int, code: str, message: str, param: str) -> Line:
    """Return the output line for input line `line` that never became a request."""
    return {
        "id": f"vllm-{name}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message, "param": param or None, "line": line},
    }


def _failure(custom_id: str, line: int, result: pb.Result) -> Line:
    code = result.error.code or CODES.get(result.outcome, "internal_error")
    message = result.error.message or f"the request ended as {pb.Outcome.Name(result.outcome)}"
    status = 404 if code in NOT_FOUND_CODES else STATUS_CODES.get(result.outcome, 500)
    param = result.error.param or None
    kind = "invalid_request_error" if status < 500 else "server_error"
    inner = {"message": message, "type": kind, "param": param, "code": code}
    return {
        "id": f"vllm-{result.request_id}",
        "custom_id": custom_id,
        "response": {
            "status_code": status,
            "request_id": f"vllm-batch-{result.request_id}",
            "body": {"error": inner},
        },
        "error": {"code": code, "message": message, "param": param, "line": line},
    }


def _common(prefix: str, kind: str, choices: list[Line], result: pb.Result) -> Line:
    usage = result.usage
    return {
        "id": f"{prefix}-{result.request_id}",
        "object": kind,
        "created": result.timings.submitted_unix_ns // 1_000_000_000,
        "model": result.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "completion_tokens": usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens} if usage.cached_tokens else None,
        },
    }


def _chat(body: ChatBody, result: pb.Result) -> Line:
    choices = []
    for choice in result.choices:
        message = {
            "role": body.answer_role,
            "content": choice.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        logprobs = {"content": [_chat_logprob(p, body) for p in choice.logprobs]} if body.logprobs else None
        choices.append(
            {"index": choice.index, "message": message, "logprobs": logprobs, **_ending(choice), "token_ids": None}
        )
    return {
        **_common("chatcmpl", "chat.completion", choices, result),
        "prompt_logprobs": _prompt_logprobs(body, result),
        "prompt_token_ids": None,
        "kv_transfer_params": None,
    }


def _completion(body: CompletionBody, result: pb.Result) -> Line:
    choices = []
    for choice in result.choices:
        entries = [*result.prompt_logprobs, *choice.logprobs] if body.echo else choice.logprobs
        first_unknown = bool(body.echo and result.prompt_logprobs)
        choices.append(
            {
                "index": choice.index,
                "text": result.prompt_text + choice.text if body.echo else choice.text,
                "logprobs": _completion_logprobs(entries, body, first_unknown) if body.logprobs is not None else None,
                **_ending(choice),
                "prompt_logprobs": _prompt_logprobs(body, result),
                "token_ids": None,
                "prompt_token_ids": None,
            }
        )
    return {**_common("cmpl", "text_completion", choices, result), "kv_transfer_params": None}


def _ending(choice: pb.Choice) -> Line:
    stop: str | int | None = choice.stop_string or None
    if choice.HasField("stop_token_id"):
        stop = choice.stop_token_id
    return {"finish_reason": FINISH_REASONS.get(choice.finish_reason), "stop_reason": stop}


def _shown(entry: pb.TokenLogprob, body: ChatBody | CompletionBody) -> str:
    return f"token_id:{entry.token_id}" if body.return_tokens_as_token_ids else entry.token


def _clamped(entry: pb.TokenLogprob) -> float:
    return max(entry.logprob, LEAST_LOGPROB)


def _chat_logprob(entry: pb.TokenLogprob, body: ChatBody) -> Line:
    def described(one: pb.TokenLogprob) -> Line:
        text = _shown(one, body)
        return {"token": text, "logprob": _clamped(one), "bytes": list(text.encode("utf-8", "replace"))}

    wanted = body.top_logprobs or 0
    top = entry.top if wanted < 0 else _ranked(entry)[:wanted]
    return {**described(entry), "top_logprobs": [described(one) for one in top]}


def _ranked(entry: pb.TokenLogprob) -> Sequence[pb.TokenLogprob]:
    """Return the reported tokens of a position as vLLM orders them: the chosen one, then the most likely others."""
    others = [one for one in entry.top if one.token_id != entry.token_id]
    return [entry, *others]


def _completion_logprobs(entries: Iterable[pb.TokenLogprob], body: CompletionBody, first_unknown: bool) -> Line:
    offsets: list[int] = []
    values: list[float | None] = []
    tokens: list[str] = []
    tops: list[dict[str, float] | None] = []
    position = 0
    wanted = body.logprobs or 0
    for index, entry in enumerate(entries):
        text = _shown(entry, body)
        unknown = first_unknown and index == 0
        ranked = _ranked(entry)
        reported = ranked if wanted < 0 else ranked[: wanted + 1]
        offsets.append(position)
        tokens.append(text)
        values.append(None if unknown else _clamped(entry))
        tops.append(None if unknown else {_shown(one, body): _clamped(one) for one in reported})
        position += len(text)
    return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}


def _prompt_logprobs(body: ChatBody | CompletionBody, result: pb.Result) -> list[Line | None] | None:
    asked = body.prompt_logprobs is not None or (isinstance(body, CompletionBody) and body.echo)
    if not asked or not result.prompt_logprobs:
        return None
    return [None, *(_position(entry) for entry in result.prompt_logprobs[1:])]


def _position(entry: pb.TokenLogprob) -> Line:
    return {
        str(one.token_id): {"logprob": _clamped(one), "rank": one.rank or None, "decoded_token": one.token}
        for one in _ranked(entry)
    }
