"""Turns token deltas and the result of one request into the chunks of a stream, as vLLM's OpenAI server shapes them.

The result is the truth: what of it no delta has brought is in the last chunk of each choice, so a stream is whole
whatever deltas came. A request that starts again on another worker goes on where its stream stood, if it says the same
again; a stream never holds parts of two different answers.
"""

from __future__ import annotations

import json
from typing import Any, TypeAlias

from penstock.openai.answers import CHAT_PREFIX, COMPLETION_PREFIX, ending, usage_of
from penstock.openai.logprobs import chat_logprobs, completion_logprobs, shown_length
from penstock.openai.shape import Shape
from penstock.request.v1 import request_pb2 as pb

DONE = "[DONE]"
"""What follows the last chunk of every stream."""

Entries: TypeAlias = list[pb.TokenLogprob]


class DivergedError(Exception):
    """A later attempt says something else than what the stream has told already."""


class _Choice:
    """What has been told of one completion, and what a later attempt has repeated of it."""

    __slots__ = ("again", "attempt", "position", "text", "tokens")

    def __init__(self) -> None:
        self.attempt = 0
        self.tokens: list[int] = []
        self.text: list[str] = []
        self.position = 0
        """Text offset of the next token, in characters (completions with log probabilities)."""
        self.again: pb.TokenDelta | None = None

    def fresh(self, delta: pb.TokenDelta) -> pb.TokenDelta | None:
        """Return what of `delta` is to be told now; raises DivergedError."""
        if delta.attempt > self.attempt:
            self.attempt = delta.attempt
            # Nothing told yet is nothing to be repeated.
            self.again = pb.TokenDelta() if self.tokens or self.text else None
        if self.again is None:
            return self._tell(delta)
        self.again.MergeFrom(pb.TokenDelta(token_ids=delta.token_ids, logprobs=delta.logprobs))
        self.again.text += delta.text
        rest = self._rest(list(self.again.token_ids), self.again.text, list(self.again.logprobs))
        if rest is None:
            return None
        self.again = None
        return self._tell(rest)

    def last(self, choice: pb.Choice) -> pb.TokenDelta:
        """Return what is left to be told of the whole choice; raises DivergedError."""
        rest = self._rest(list(choice.token_ids), choice.text, list(choice.logprobs))
        if rest is None:
            raise DivergedError
        return rest

    def _tell(self, delta: pb.TokenDelta) -> pb.TokenDelta:
        self.tokens.extend(delta.token_ids)
        if delta.text:
            self.text.append(delta.text)
        return delta

    def _rest(self, tokens: list[int], text: str, logprobs: Entries) -> pb.TokenDelta | None:
        """Return what comes after what was told, None if that is not reached yet; raises DivergedError."""
        told = "".join(self.text)
        both = min(len(tokens), len(self.tokens))
        common = min(len(text), len(told))
        if tokens[:both] != self.tokens[:both] or text[:common] != told[:common]:
            raise DivergedError
        if len(tokens) < len(self.tokens) or len(text) < len(told):
            return None
        return pb.TokenDelta(token_ids=tokens[both:], text=text[common:], logprobs=logprobs[both:])


class Chunks:
    """The chunks of one stream, each as the text after `data: `."""

    def __init__(self, shape: Shape, request_id: str, created_s: int, model: str, n: int, usage: bool) -> None:
        """Write for request `request_id` with `n` completions; with `usage`, token counts come last."""
        self._shape = shape
        self._choices = [_Choice() for _ in range(n)]
        self._usage = usage
        self._begun = False
        self._head = _head(shape, request_id, created_s, model)

    def of_delta(self, delta: pb.TokenDelta) -> list[str]:
        """Return the chunks for new tokens; raises DivergedError."""
        if delta.index >= len(self._choices):
            return []
        choice = self._choices[delta.index]
        fresh = choice.fresh(delta)
        if fresh is None:
            return []
        return [*self._opening(), self._chunk(choice, delta.index, fresh, None)]

    def of_result(self, result: pb.Result) -> list[str]:
        """Return the last chunks of a completed request; raises DivergedError."""
        lines = self._opening()
        for whole in result.choices:
            if whole.index < len(self._choices):
                choice = self._choices[whole.index]
                lines.append(self._chunk(choice, whole.index, choice.last(whole), whole))
        if self._usage:
            lines.append(f'{self._head}],"usage":{_json(usage_of(result))}}}')
        return lines

    def _opening(self) -> list[str]:
        """Return the chunks before everything else: in a chat, the role of each choice."""
        if self._begun:
            return []
        self._begun = True
        if not self._shape.chat:
            return []
        delta = {"role": self._shape.role, "content": ""}
        choices = (
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for index in range(len(self._choices))
        )
        return [f'{self._head}{_json(choice)}],"prompt_token_ids":null,"prompt_text":null}}' for choice in choices]

    def _chunk(self, choice: _Choice, index: int, delta: pb.TokenDelta, whole: pb.Choice | None) -> str:
        ends: dict[str, Any] = {"finish_reason": None} if whole is None else ending(whole)
        line: dict[str, Any]
        if self._shape.chat:
            logprobs = chat_logprobs(delta.logprobs, self._shape)
            line = {"index": index, "delta": {"content": delta.text}, "logprobs": logprobs, **ends, "token_ids": None}
        else:
            logprobs = completion_logprobs(delta.logprobs, self._shape, start=choice.position)
            if logprobs is not None:
                choice.position += shown_length(delta.logprobs, self._shape)
            line = {"index": index, "text": delta.text, "logprobs": logprobs, **ends}
            line.setdefault("stop_reason", None)
            line |= {"prompt_token_ids": None, "token_ids": None}
        return f"{self._head}{_json(line)}]}}"


def _head(shape: Shape, request_id: str, created_s: int, model: str) -> str:
    """Return what every chunk of a stream begins with, up to its choices."""
    prefix, kind = (CHAT_PREFIX, "chat.completion.chunk") if shape.chat else (COMPLETION_PREFIX, "text_completion")
    fields = {"id": f"{prefix}-{request_id}", "object": kind, "created": created_s, "model": model}
    return _json(fields)[:-1] + ',"choices":['


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
