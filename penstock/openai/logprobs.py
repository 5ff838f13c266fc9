"""Log probabilities as vLLM's server writes them: per position for chats, as parallel lists for completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, TypeAlias

from penstock.openai.shape import Shape
from penstock.request.v1 import request_pb2 as pb

LEAST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON cannot say."""

Line: TypeAlias = dict[str, Any]

Rows: TypeAlias = Callable[[Iterable[Line | None]], Any]
"""What becomes of many positions that are made one after the other: a list, or what makes them when it is written."""


def chat_logprobs(entries: Iterable[pb.TokenLogprob], shape: Shape, rows: Rows = list) -> Line | None:
    """Return the `logprobs` of a chat's choice or delta; None if they were not asked for."""
    if shape.logprobs is None:
        return None
    return {"content": rows(_chat_position(entry, shape) for entry in entries)}


def message_logprobs(entries: Sequence[pb.TokenLogprob], shape: Shape, read: bool, rows: Rows = list) -> Line | None:
    """Return the `logprobs` of a chat's choice or delta, `read` if a parser made a message of it.

    None if they were not asked for, or if the worker keeps them to itself: they would tell reasoning that is hidden.
    """
    return None if read and not entries else chat_logprobs(entries, shape, rows)


def completion_logprobs(
    entries: Iterable[pb.TokenLogprob], shape: Shape, first_unknown: bool = False, start: int = 0
) -> Line | None:
    """Return the `logprobs` of a completion's choice or delta; None if they were not asked for.

    Text offsets, in characters, begin at `start`. The first token of an echoed prompt has no probability.
    """
    wanted = shape.logprobs
    if wanted is None:
        return None
    offsets: list[int] = []
    values: list[float | None] = []
    tokens: list[str] = []
    tops: list[dict[str, float] | None] = []
    position = start
    for index, entry in enumerate(entries):
        text = _shown(entry, shape)
        unknown = first_unknown and index == 0
        ranked = _ranked(entry)
        reported = ranked if wanted < 0 else ranked[: wanted + 1]
        offsets.append(position)
        tokens.append(text)
        values.append(None if unknown else _clamped(entry))
        tops.append(None if unknown else {_shown(one, shape): _clamped(one) for one in reported})
        position += len(text)
    return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}


def shown_length(entries: Iterable[pb.TokenLogprob], shape: Shape) -> int:
    """Return by how many characters these tokens move the text offset of the next."""
    return sum(len(_shown(entry, shape)) for entry in entries)


def prompt_logprobs(shape: Shape, result: pb.Result, rows: Rows = list) -> Any:
    """Return the prompt's log probabilities by token id, in `rows`; None if they were not asked for."""
    if not shape.prompt_logprobs or not result.prompt_logprobs:
        return None
    return rows(chain([None], (_position(entry) for entry in result.prompt_logprobs[1:])))


def _shown(entry: pb.TokenLogprob, shape: Shape) -> str:
    return f"token_id:{entry.token_id}" if shape.tokens_as_ids else entry.token


def _clamped(entry: pb.TokenLogprob) -> float:
    return max(entry.logprob, LEAST_LOGPROB)


def _chat_position(entry: pb.TokenLogprob, shape: Shape) -> Line:
    def described(one: pb.TokenLogprob, said: str) -> Line:
        bytes_ = list(said.encode("utf-8", "replace"))
        return {"token": _shown(one, shape), "logprob": _clamped(one), "bytes": bytes_}

    wanted = shape.logprobs or 0
    ranked = _ranked(entry)
    top = ranked if wanted < 0 else ranked[:wanted]
    # Also where tokens are shown as ids, the bytes of the chosen one are those of its text.
    return {**described(entry, entry.token), "top_logprobs": [described(one, _shown(one, shape)) for one in top]}


def _ranked(entry: pb.TokenLogprob) -> Sequence[pb.TokenLogprob]:
    """Return the reported tokens of a position as vLLM orders them: the chosen one, then the most likely others."""
    others = [one for one in entry.top if one.token_id != entry.token_id]
    return [entry, *others]


def _position(entry: pb.TokenLogprob) -> Line:
    return {
        str(one.token_id): {"logprob": _clamped(one), "rank": one.rank or None, "decoded_token": one.token}
        for one in _ranked(entry)
    }
