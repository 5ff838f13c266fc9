"""A message told in parts is the message, whatever of it comes twice, late or not at all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.openai.answers import body_of
from penstock.openai.bodies import CHAT_URL, BodyError, parse_body
from penstock.openai.chunks import Chunks
from penstock.openai.convert import to_request
from penstock.openai.message import DivergedError, Message
from penstock.openai.shape import Shape
from penstock.request.v1 import request_pb2 as pb

CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}, "strict": True}}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "tools": [CLOCK]}
SHAPE = Shape.of(parse_body(CHAT_URL, ASKED))

calls = st.builds(pb.ToolCall, id=st.text(min_size=1), name=st.sampled_from(["clock", "bell"]), arguments=st.text())
messages = st.builds(pb.ToolMessage, content=st.none() | st.text(min_size=1), tool_calls=st.lists(calls, max_size=3))


def choice_of(message: pb.ToolMessage) -> pb.Choice:
    reason = pb.FINISH_REASON_TOOL_CALLS if message.tool_calls else pb.FINISH_REASON_STOP
    return pb.Choice(text="raw", token_ids=[1, 2], finish_reason=reason, message=message)


def result_of(message: pb.ToolMessage) -> pb.Result:
    return pb.Result(request_id="r-1", outcome=pb.OUTCOME_COMPLETED, choices=[choice_of(message)])


def parts_of(message: pb.ToolMessage, size: int) -> list[pb.ToolPart]:
    """Return the message in parts of `size` characters."""
    parts = [
        pb.ToolPart(text=message.content[at : at + size], offset=at) for at in range(0, len(message.content), size)
    ]
    for index, call in enumerate(message.tool_calls):
        parts.append(pb.ToolPart(call=index, id=call.id, name=call.name))
        places = range(0, len(call.arguments), size)
        parts += [pb.ToolPart(call=index, text=call.arguments[at : at + size], offset=at) for at in places]
    return parts


def joined(lines: list[str]) -> tuple[str, list[list[str]], list[Any]]:
    """Return content, calls and finish reasons of a stream, as a client puts them together."""
    content = ""
    told: list[list[str]] = []
    ends: list[Any] = []
    for line in lines:
        for choice in json.loads(line)["choices"]:
            content += choice["delta"].get("content") or ""
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
            for call in choice["delta"].get("tool_calls", []):
                if call["index"] == len(told):
                    told.append([call["id"], call["function"]["name"], ""])
                told[call["index"]][2] += call["function"]["arguments"]
    return content, told, ends


@given(message=messages, size=st.integers(1, 5), data=st.data())
def test_any_parts_and_the_result_are_the_message(message: pb.ToolMessage, size: int, data: st.DataObject) -> None:
    parts = parts_of(message, size)
    chunks = Chunks(SHAPE, "r-1", 1, "tiny", 1, False, tools=True)
    lines = []
    position = 0
    while position < len(parts) and data.draw(st.integers(0, 4)):
        back = data.draw(st.integers(0, position))
        ahead = data.draw(st.integers(position, len(parts)))
        lines += chunks.of_delta(pb.TokenDelta(request_id="r-1", attempt=1, parts=parts[position - back : ahead]))
        position = ahead + data.draw(st.integers(0, 1))
    lines += chunks.of_result(result_of(message))
    content, told, ends = joined(lines)
    assert content == message.content
    assert told == [[call.id, call.name, call.arguments] for call in message.tool_calls]
    assert ends == ["tool_calls" if message.tool_calls else "stop"]


def test_a_later_attempt_goes_on_with_the_first_ones_calls() -> None:
    """Every attempt draws names of its own; what was told stays."""
    chunks = Chunks(SHAPE, "r-1", 1, "tiny", 1, False, tools=True)
    first, second = (
        pb.ToolMessage(content="Hm.", tool_calls=[pb.ToolCall(id=name, name="clock", arguments='{"utc": true}')])
        for name in ("a", "b")
    )
    lines = chunks.of_delta(pb.TokenDelta(attempt=1, token_ids=[1], text="x", parts=parts_of(first, 4)[:3]))
    lines += chunks.of_delta(pb.TokenDelta(attempt=2, token_ids=[1], text="x", parts=parts_of(second, 2)[:4]))
    lines += chunks.of_delta(pb.TokenDelta(attempt=2, offset=1, token_ids=[2], text="y", parts=parts_of(second, 2)[4:]))
    result = result_of(second)
    result.choices[0].text = "xy"
    lines += chunks.of_result(result)
    assert joined(lines) == ("Hm.", [["a", "clock", '{"utc": true}']], ["tool_calls"])
    other = pb.ToolMessage(content="No.", tool_calls=second.tool_calls)
    with pytest.raises(DivergedError):
        Message.of_choice(choice_of(other)).beyond(Message.of_choice(choice_of(first)))
    with pytest.raises(DivergedError):
        Message(None, Message.of_choice(choice_of(first)).calls).beyond(Message("", [*Message.of_choice(
            choice_of(pb.ToolMessage(tool_calls=[pb.ToolCall(name="bell")]))).calls]))  # fmt: skip


def test_parts_that_come_before_their_tokens_are_told_with_them() -> None:
    """A later attempt parses what its first tokens say before it has repeated all that was told."""
    chunks = Chunks(SHAPE, "r-1", 1, "tiny", 1, False, tools=True)
    message = pb.ToolMessage(content="Hm.", tool_calls=[pb.ToolCall(id="a", name="clock", arguments='{"utc": true}')])
    parts = parts_of(message, 4)
    lines = chunks.of_delta(pb.TokenDelta(attempt=1, token_ids=[1, 2], text="xy", parts=parts[:1]))
    assert chunks.of_delta(pb.TokenDelta(attempt=2, token_ids=[1], text="x", parts=parts[:3])) == []
    lines += chunks.of_delta(pb.TokenDelta(attempt=2, offset=1, token_ids=[2, 3], text="yz", parts=parts[3:4]))
    content, told, _ = joined(lines)
    assert (content, told) == ("Hm.", [["a", "clock", '{"utc": true}'[: 4 * 2]]])
    result = result_of(message)
    result.choices[0].text = "xyz"
    result.choices[0].token_ids[:] = [1, 2, 3]
    lines += chunks.of_result(result)
    assert joined(lines) == ("Hm.", [["a", "clock", '{"utc": true}']], ["tool_calls"])


def test_what_the_parser_holds_back_makes_no_chunk() -> None:
    chunks = Chunks(SHAPE, "r-1", 1, "tiny", 1, False, tools=True)
    (role,) = chunks.of_delta(pb.TokenDelta(attempt=1, token_ids=[1], text="<tool_"))
    assert json.loads(role)["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks.of_delta(pb.TokenDelta(attempt=1, offset=1, token_ids=[2], text="call>")) == []
    end = pb.Choice(text="<tool_call>", token_ids=[1, 2], finish_reason=pb.FINISH_REASON_LENGTH)
    end.message.SetInParent()
    (last,) = chunks.of_result(pb.Result(choices=[end]))
    assert json.loads(last)["choices"][0]["delta"] == {}


def test_a_whole_answer_has_its_calls() -> None:
    message = pb.ToolMessage(tool_calls=[pb.ToolCall(id="c-1", name="clock", arguments="{}")])
    (choice,) = body_of(SHAPE, result_of(message))["choices"]
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"] == [
        {"id": "c-1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    ]
    assert choice["finish_reason"] == "tool_calls"
    (plain,) = body_of(SHAPE, pb.Result(choices=[pb.Choice(text="no calls")]))["choices"]
    assert plain["message"]["content"] == "no calls"
    assert "tool_calls" not in plain["message"]


def test_what_is_said_of_tools_reaches_the_worker_as_it_was_said() -> None:
    use = to_request(parse_body(CHAT_URL, ASKED)).chat.tools
    assert (json.loads(use.tools_json), use.tool_choice_json, use.single_call, use.in_parts) == (
        [CLOCK],
        "",
        False,
        False,
    )
    named = {"type": "function", "function": {"name": "clock"}}
    body = {**ASKED, "tool_choice": named, "parallel_tool_calls": False, "stream": True}
    use = to_request(parse_body(CHAT_URL, body, streams=True)).chat.tools
    assert (json.loads(use.tool_choice_json), use.single_call, use.in_parts) == (named, True, True)
    assert (
        to_request(parse_body(CHAT_URL, {**ASKED, "tool_choice": "required"})).chat.tools.tool_choice_json
        == '"required"'
    )
    without = {"messages": ASKED["messages"], "tool_choice": "none", "parallel_tool_calls": True, "tools": None}
    assert not to_request(parse_body(CHAT_URL, without)).chat.HasField("tools")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"function": {"name": ""}}]}, "tools"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"function": {"name": "bell"}}}, "tool_choice"),
        ({"tool_choice": {"function": {"name": "clock"}}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"functions": [{}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
    ],
)
def test_wrong_tools_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BodyError) as refused:
        parse_body(CHAT_URL, {**ASKED, **fields})
    assert refused.value.param == param
