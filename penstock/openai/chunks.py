"""Turns token deltas and the result of one request into the chunks of a stream, as vLLM's OpenAI server shapes them.

The result is the truth: what of it no delta has brought is in the last chunk of each choice, so a stream is whole
whatever deltas came. A request that starts again on another worker goes on where its stream stood, if it says the same
again; a stream never holds parts of two different answers.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from json.encoder import encode_basestring
from typing import Any, NamedTuple, TypeAlias

from penstock.openai.answers import CHAT_PREFIX, COMPLETION_PREFIX, ending, usage_of
from penstock.openai.jsontext import Rows, json_parts
from penstock.openai.logprobs import Rows as AsRows
from penstock.openai.logprobs import completion_logprobs, message_logprobs, shown_length
from penstock.openai.message import DivergedError, Message
from penstock.openai.shape import Shape
from penstock.request.v1 import request_pb2 as pb

DONE = "[DONE]"
"""What follows the last chunk of every stream."""

MARK = "\0"
"""Stands for the text of a chunk whose other parts are written once."""

Entries: TypeAlias = list[pb.TokenLogprob]
Line: TypeAlias = dict[str, Any]

Parted: TypeAlias = Iterable[str]
"""A chunk in parts, of which one made at once would keep the interpreter from all other threads for long."""


class _Again:
    """Where a later attempt stands in what was told: each piece is compared once, with what was told at its place."""

    __slots__ = ("_beyond", "_characters", "_entries", "_seen", "_text", "_tokens")

    def __init__(self, tokens: list[int], text: str) -> None:
        """Nothing of this is repeated yet. It stays as it is until all of it has been."""
        self._tokens = tokens
        self._text = text
        self._seen = self._characters = self._entries = 0
        """Tokens, characters and log probabilities that the attempt has brought."""
        self._beyond = pb.TokenDelta()

    def beyond(self, said: pb.TokenDelta | pb.Choice) -> pb.TokenDelta | None:
        """Return what comes after what was told, None if that is not reached yet; raises DivergedError."""
        tokens, text = list(said.token_ids), said.text
        told = self._tokens[self._seen : self._seen + len(tokens)]
        told_text = self._text[self._characters : self._characters + len(text)]
        if tokens[: len(told)] != told or not text.startswith(told_text):
            raise DivergedError
        self._beyond.token_ids.extend(tokens[len(told) :])
        self._beyond.text += text[len(told_text) :]
        self._beyond.logprobs.extend(said.logprobs[max(0, len(self._tokens) - self._entries) :])
        self._seen += len(tokens)
        self._characters += len(text)
        self._entries += len(said.logprobs)
        reached = self._seen >= len(self._tokens) and self._characters >= len(self._text)
        return self._beyond if reached else None


class _Rest(NamedTuple):
    """What is left to be told of a choice that has ended. Nothing is copied: it may be some MiB."""

    text: str
    logprobs: Sequence[pb.TokenLogprob]


class _Choice:
    """What has been told of one completion, and what a later attempt has repeated of it."""

    __slots__ = (
        "again", "attempt", "heard", "heard_attempt", "is_message", "logged", "position", "said", "text", "tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.is_message = False
        """Whether a parser reads it as a message: what is told are parts of that, not the text."""
        self.attempt = 0
        self.tokens: list[int] = []
        self.text: list[str] = []
        self.logged = False
        """Whether log probabilities have been told, which say which tokens there were."""
        self.position = 0
        """Text offset of the next token, in characters (completions with log probabilities)."""
        self.again: _Again | None = None
        """How far the latest attempt, `attempt`, is with what was told; None where it goes on with that."""
        self.said = Message()
        """What has been told of a message."""
        self.heard = Message()
        """What the latest attempt, `heard_attempt`, has said of it."""
        self.heard_attempt = 0

    def become_message(self) -> None:
        """Tell a message from now on; what was told before, of an attempt that no parser read, is its content."""
        if not self.is_message:
            self.is_message = True
            self.said.content = "".join(self.text) or None

    def hear(self, delta: pb.TokenDelta) -> None:
        """Note what `delta` says of the message; it is told with tokens that are new."""
        if delta.attempt > self.heard_attempt:
            self.heard, self.heard_attempt = Message(), delta.attempt
        for part in delta.parts:
            self.heard.add(part)

    def parts(self) -> Line:
        """Return what was heard of the message and is to be told now; raises DivergedError."""
        rest = self.heard.beyond(self.said)
        if rest is None:
            return {}
        self.said = self.heard.copy()
        return rest

    def last_parts(self, choice: pb.Choice) -> Line:
        """Return what is left to be told of the message; raises DivergedError."""
        rest = Message.of_choice(choice).beyond(self.said)
        if rest is None:
            raise DivergedError
        return rest

    def fresh(self, delta: pb.TokenDelta) -> pb.TokenDelta | None:
        """Return what of `delta` is to be told now; raises DivergedError."""
        if delta.attempt > self.attempt:
            self.attempt = delta.attempt
            if self._told_nothing():  # which is nothing to be repeated
                self.tokens.clear()
                self.text.clear()
            self.again = _Again(self.tokens, "".join(self.text)) if self.tokens or self.text else None
        if self.again is None:
            return self._tell(delta)
        rest = self.again.beyond(delta)
        if rest is None:
            return None
        self.again = None
        return self._tell(rest)

    def last(self, choice: pb.Choice) -> _Rest:
        """Return what is left to be told of the whole choice; raises DivergedError."""
        tokens, text = len(self.tokens), "".join(self.text)
        if choice.token_ids[:tokens] != self.tokens or not choice.text.startswith(text):
            raise DivergedError
        return _Rest(choice.text[len(text) :], choice.logprobs[tokens:])

    def _told_nothing(self) -> bool:
        """Return whether what came has shown nothing yet, as of a message whose reasoning is hidden."""
        return self.is_message and self.said == Message() and not self.logged

    def _tell(self, delta: pb.TokenDelta) -> pb.TokenDelta:
        self.logged = self.logged or bool(delta.logprobs)
        self.tokens.extend(delta.token_ids)
        if delta.text:
            self.text.append(delta.text)
        return delta


class Chunks:
    """The chunks of one stream, each as the text after `data: `."""

    def __init__(
        self,
        shape: Shape,
        request_id: str,
        created_s: int,
        model: str,
        n: int,
        usage: bool,
        tools: bool = False,
        first: int = 0,
    ) -> None:
        """Write for request `request_id` with `n` completions; with `usage`, token counts come last.

        With `tools` the answers are messages that may call functions; of others the deltas say whether they are
        messages. The completions are numbered from `first`.
        """
        self._first = first
        self._shape = shape
        self._tools = tools
        self._n = n
        self._choices: defaultdict[int, _Choice] = defaultdict(_Choice)
        """Made when there is something to be told: a body may ask for more than anybody generates."""
        self._usage = usage
        self._begun = False
        self._head = _head(shape, request_id, created_s, model)
        self._around: dict[int, tuple[str, str]] = {}
        """Of each choice what stands before and after the text in a chunk that says nothing else."""

    def of_delta(self, delta: pb.TokenDelta) -> list[str]:
        """Return the chunks for new tokens; raises DivergedError."""
        if delta.index >= self._n:
            return []
        choice = self._choices[delta.index]
        if self._tools or delta.as_message:
            choice.become_message()
        if choice.is_message:
            choice.hear(delta)
        fresh = choice.fresh(delta)
        if fresh is None:
            return []
        parts = choice.parts() if choice.is_message else None
        if parts == {} and not fresh.logprobs:
            return self.opening()
        if parts is None and self._shape.logprobs is None:
            return [*self.opening(), self._plain(choice, delta.index, fresh.text)]
        return [*self.opening(), self._chunk(choice, delta.index, fresh, parts)]

    def untold(self, result: pb.Result) -> float:
        """Return what share of a result is still to be told, by the number of its tokens."""
        tokens = sum(len(whole.token_ids) for whole in result.choices)
        told = sum(len(choice.tokens) for choice in self._choices.values())
        return 1 - told / tokens if tokens else 1.0

    def ending(self, _request_id: str) -> Callable[[pb.Result], Iterator[Parted]]:
        """Return what tells a result, which does so as often as it is asked to, but for the opening."""
        return self.last_lines

    def of_result(self, result: pb.Result) -> list[str]:
        """Return the last chunks of a completed request; raises DivergedError."""
        return ["".join(line) for line in self.last_lines(result)]

    def last_lines(self, result: pb.Result) -> Iterator[Parted]:
        """Yield them in parts, each of which takes some milliseconds at most to make."""
        for line in self.opening():
            yield (line,)
        for whole in result.choices:
            if whole.index < self._n:
                choice = self._choices[whole.index]
                if self._tools or whole.HasField("message"):
                    choice.become_message()
                parts = choice.last_parts(whole) if choice.is_message else None
                yield self._last(choice, whole, parts)
        if self._usage:
            yield (self.usage_line(usage_of(result.usage)),)

    def usage_line(self, counts: Line) -> str:
        """Return the chunk that has the token counts."""
        return f'{self._head}],"usage":{_json(counts)}}}'

    def opening(self) -> list[str]:
        """Return the chunks before everything else: in a chat, the role of each choice."""
        if self._begun:
            return []
        self._begun = True
        if not self._shape.chat:
            return []
        delta = {"role": self._shape.role, "content": ""}
        choices = (
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for index in range(self._n)
        )
        return [f'{self._head}{_json(choice)}],"prompt_token_ids":null,"prompt_text":null}}' for choice in choices]

    def _plain(self, choice: _Choice, index: int, text: str) -> str:
        """Return the chunk of a text and nothing else, as `_chunk` writes it: nearly all of a stream is such."""
        if index not in self._around:
            before, _, after = self._chunk(choice, index, pb.TokenDelta(text=MARK), None).rpartition(_json(MARK))
            self._around[index] = before, after
        before, after = self._around[index]
        return f"{before}{encode_basestring(text)}{after}"

    def _chunk(self, choice: _Choice, index: int, delta: pb.TokenDelta, parts: Line | None) -> str:
        line = self._line(choice, index, delta, parts, {"finish_reason": None}, list)
        if self._shape.logprobs is not None and not self._shape.chat:
            choice.position += shown_length(delta.logprobs, self._shape)
        return f"{self._head}{_json(line)}]}}"

    def _last(self, choice: _Choice, whole: pb.Choice, parts: Line | None) -> Parted:
        yield self._head
        yield from json_parts(self._line(choice, whole.index, choice.last(whole), parts, ending(whole), Rows))
        yield "]}"

    def _line(
        self, choice: _Choice, index: int, said: pb.TokenDelta | _Rest, parts: Line | None, ends: Line, rows: AsRows
    ) -> Line:
        line: Line
        index += self._first
        if self._shape.chat:
            logprobs = message_logprobs(said.logprobs, self._shape, parts is not None, rows)
            delta = {"content": said.text} if parts is None else parts
            line = {"index": index, "delta": delta, "logprobs": logprobs, **ends, "token_ids": None}
        else:
            logprobs = completion_logprobs(said.logprobs, self._shape, start=choice.position)
            line = {"index": index, "text": said.text, "logprobs": logprobs, **ends}
            line.setdefault("stop_reason", None)
            line |= {"prompt_token_ids": None, "token_ids": None}
        return line


def _head(shape: Shape, request_id: str, created_s: int, model: str) -> str:
    """Return what every chunk of a stream begins with, up to its choices."""
    prefix, kind = (CHAT_PREFIX, "chat.completion.chunk") if shape.chat else (COMPLETION_PREFIX, "text_completion")
    fields = {"id": f"{prefix}-{request_id}", "object": kind, "created": created_s, "model": model}
    return _json(fields)[:-1] + ',"choices":['


_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
