"""A message that is told in pieces: what goes over the wire, what is kept, and what it takes."""

from __future__ import annotations

import resource
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from penstock.request.v1 import request_pb2 as pb
from services.worker.engine import ChoiceStep, EngineStep, Part
from services.worker.outputs import RunOutput
from services.worker.told import Told, joined


def test_a_call_is_told_from_when_its_name_is_known() -> None:
    told = Told()
    assert told.call(0, "c", "", '{"a":') is None
    first, rest = told.call(0, "", "clock", " 1"), told.call(0, "", "", "}")
    assert first == Part(0, "c", "clock", '{"a": 1', 0, False)
    assert rest == Part(0, "", "", "}", 7, False)
    assert told.message() == pb.ToolMessage(tool_calls=[pb.ToolCall(id="c", name="clock", arguments='{"a": 1}')])


def test_an_offset_counts_code_points() -> None:
    """An emoji is one: in JavaScript and Java it has a length of two, in Go of four."""
    told = Told()
    assert [told.say(text).offset for text in ("Sure 👍", "🎉", "! e\u0301", ".")] == [0, 6, 7, 11]
    told.call(0, "c", "clock", '{"zone": "🌍')
    part = told.call(0, "", "", '"}')
    assert part is not None
    assert part.offset == 11


pieces = st.lists(st.tuples(st.sampled_from(["think", "say", "call 0", "call 1"]), st.text(min_size=1, max_size=3)))


@given(pieces)
def test_joined_parts_say_what_the_message_has(pieces: list[tuple[str, str]]) -> None:
    told = Told()
    parts = []
    for what, text in pieces:
        if what.startswith("call"):
            parts.append(told.call(int(what[-1]), "c", "clock", text))
        else:
            parts.append(told.think(text) if what == "think" else told.say(text))
    wire = joined(part for part in parts if part is not None)
    message = told.message()
    assert "".join(part.text for part in wire if part.reasoning) == message.reasoning
    assert "".join(part.text for part in wire if not part.HasField("call") and not part.reasoning) == message.content
    for index, call in enumerate(message.tool_calls):
        assert "".join(part.text for part in wire if part.HasField("call") and part.call == index) == call.arguments
    said = {"": 0}
    for part in wire:
        key = f"{part.call if part.HasField('call') else 'text'} {part.reasoning}"
        assert part.offset == said.get(key, 0)
        said[key] = part.offset + len(part.text)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_long_answer_takes_memory_by_its_length() -> None:
    """A message of protobuf's that grew like that would have every text it ever had: 600 MiB."""
    told, output = Told(), RunOutput(as_message=True)
    before = resident_bytes()
    for _ in range(16_000):
        output.take(EngineStep([ChoiceStep(0, (1,), " word", parts=[told.think(" word")])], False))
        output.deltas("r-1", 1)
    assert resident_bytes() - before < 64 << 20
    assert len(told.message().reasoning) == 16_000 * len(" word")
