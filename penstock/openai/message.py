"""An answer as a message: what it thinks, says and which functions it calls, whole or while it is being told."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from penstock.request.v1 import request_pb2 as pb


class DivergedError(Exception):
    """A later attempt says something else than what the stream has told already."""


@dataclass(slots=True)
class Call:
    """One call of a function."""

    call_id: str
    name: str
    arguments: str = ""

    def to_object(self) -> dict[str, Any]:
        """Return the call as OpenAI's API shows it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


@dataclass(slots=True)
class Message:
    """What is known of an answer."""

    content: str | None = None
    """None if nothing is said beside the calls."""
    calls: list[Call] = field(default_factory=list)
    reasoning: str | None = None
    """None if nothing was thought, or nobody tells."""

    @classmethod
    def of_choice(cls, choice: pb.Choice) -> Message:
        """Return the message of a whole answer; where no parser made one, it says the text."""
        if not choice.HasField("message"):
            return cls(choice.text)
        message = choice.message
        calls = [Call(call.id, call.name, call.arguments) for call in message.tool_calls]
        content = message.content if message.HasField("content") else None
        return cls(content, calls, message.reasoning if message.HasField("reasoning") else None)

    def copy(self) -> Message:
        """Return a message that does not change with this one."""
        return Message(self.content, [replace(call) for call in self.calls], self.reasoning)

    def add(self, part: pb.ToolPart) -> None:
        """Add a piece; what is known already of it is skipped, what leaves a gap is left to the result."""
        if part.reasoning:
            self.reasoning = _joined(self.reasoning or "", part) or self.reasoning
            return
        if not part.HasField("call"):
            self.content = _joined(self.content or "", part) or self.content
            return
        if part.call == len(self.calls) and part.name:  # its first piece
            self.calls.append(Call(part.id, part.name))
        if part.call < len(self.calls):
            call = self.calls[part.call]
            call.arguments = _joined(call.arguments, part)

    def beyond(self, told: Message) -> dict[str, Any] | None:
        """Return the `delta` that makes `told` this message; None if this one is not as long yet.

        Names of calls are drawn anew by every attempt: those that were told stay. Raises DivergedError if `told` is no
        beginning of this message.
        """
        content = _rest(self.content or "", told.content or "")
        reasoning = _rest(self.reasoning or "", told.reasoning or "")
        pairs = zip(self.calls, told.calls, strict=False)
        if any(mine.name != other.name for mine, other in pairs):
            raise DivergedError
        pairs = zip(self.calls, told.calls, strict=False)
        rests = [_rest(mine.arguments, other.arguments) for mine, other in pairs]
        if content is None or reasoning is None or None in rests or len(self.calls) < len(told.calls):
            return None
        more: list[dict[str, Any]] = [
            {"index": index, "function": {"arguments": rest}} for index, rest in enumerate(rests) if rest
        ]
        for index in range(len(told.calls), len(self.calls)):
            shown = self.calls[index].to_object()
            more.append({"id": shown["id"], "type": "function", "index": index, "function": shown["function"]})
        rest = {"content": content, "reasoning": reasoning, "tool_calls": more}
        return {name: value for name, value in rest.items() if value}

    def to_list(self) -> list[dict[str, Any]]:
        """Return the calls as OpenAI's API shows them."""
        return [call.to_object() for call in self.calls]


def _joined(known: str, part: pb.ToolPart) -> str:
    if part.offset > len(known):
        return known
    return known + part.text[len(known) - part.offset :]


def _rest(text: str, told: str) -> str | None:
    """Return what `text` has after `told`; None if it is not that long. Raises DivergedError if they differ."""
    common = min(len(text), len(told))
    if text[:common] != told[:common]:
        raise DivergedError
    return text[common:] if len(text) >= len(told) else None
