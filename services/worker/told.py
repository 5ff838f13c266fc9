"""What has been told of an answer that is read as a message, piece by piece.

Texts are kept in pieces and joined once: a message of protobuf's keeps every text that a field of it ever had.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.request.v1 import request_pb2 as pb
from services.worker.engine import Part


class Text:
    """A text that grows."""

    __slots__ = ("characters", "pieces")

    def __init__(self) -> None:
        """Begin with nothing."""
        self.pieces: list[str] = []
        self.characters = 0

    def add(self, piece: str) -> int:
        """Add a piece; return how many characters were there before it."""
        before = self.characters
        if piece:
            self.pieces.append(piece)
            self.characters += len(piece)
        return before

    def __str__(self) -> str:
        """Return all of it."""
        return "".join(self.pieces)


class Call:
    """A call of a function, as far as it has come."""

    __slots__ = ("arguments", "call_id", "name")

    def __init__(self) -> None:
        """Begin without a name, with which it is told first."""
        self.call_id = self.name = ""
        self.arguments = Text()


class Told:
    """One message that grows."""

    __slots__ = ("calls", "content", "reasoning")

    def __init__(self) -> None:
        """Begin with nothing."""
        self.reasoning, self.content = Text(), Text()
        self.calls: list[Call] = []

    def think(self, text: str) -> Part:
        """Add to the reasoning; return the part to be told."""
        return Part(None, "", "", text, self.reasoning.add(text), True)

    def say(self, text: str) -> Part:
        """Add to the content; return the part to be told."""
        return Part(None, "", "", text, self.content.add(text), False)

    def call(self, index: int, call_id: str, name: str, arguments: str) -> Part | None:
        """Add to a call; return the part to be told, None while its name is not known."""
        while len(self.calls) <= index:
            self.calls.append(Call())
        known = self.calls[index]
        begun = bool(known.name)
        known.call_id = known.call_id or call_id
        known.name = known.name or name
        offset = known.arguments.add(arguments)
        if begun:
            return Part(index, "", "", arguments, offset, False)
        if not known.name:
            return None
        return Part(index, known.call_id, known.name, str(known.arguments), 0, False)

    def message(self) -> pb.ToolMessage:
        """Return all that was told."""
        message = pb.ToolMessage()
        if self.reasoning.characters:
            message.reasoning = str(self.reasoning)
        if self.content.characters:
            message.content = str(self.content)
        for call in self.calls:
            message.tool_calls.add(id=call.call_id, name=call.name, arguments=str(call.arguments))
        return message


def joined(parts: Iterable[Part]) -> list[pb.ToolPart]:
    """Return the parts as they go over the wire: neighbours that go on with the same text as one."""
    found: list[pb.ToolPart] = []
    texts: list[str] = []
    last: Part | None = None
    for part in parts:
        if last is not None and part.goes_on(last):
            texts.append(part.text)
            continue
        if found:
            found[-1].text = "".join(texts)
        last, texts = part, [part.text]
        found.append(_wire(part))
    if found:
        found[-1].text = "".join(texts)
    return found


def _wire(part: Part) -> pb.ToolPart:
    """Return the part without its text."""
    made = pb.ToolPart(id=part.call_id, name=part.name, offset=part.offset, reasoning=part.reasoning)
    if part.call is not None:
        made.call = part.call
    return made
