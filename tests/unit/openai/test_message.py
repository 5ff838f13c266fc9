"""A message told in parts is the message, whatever of it comes twice, late or not at all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.openai.answers import body_of
from penstock.openai.bodies import CHAT_URL, COMPLETIONS_URL, BodyError, parse_body
from penstock.openai.chunks import Chunks
from penstock.openai.convert import to_request
from penstock.openai.message import DivergedError, Message
from penstock.openai.shape import Shape
from penstock.request.v1 import request_pb2 as pb

CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}, "strict": True}}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "tools": [CLOCK]}
SHAPE = Shape.of(parse_body(CHAT_URL, ASKED))

calls = st.builds(pb.ToolCall, id=st.text(min_size=1), name=st.sampled_from(["clock", "bell"]), arguments=st.text())
texts = st.none() | st.text(min_size=1)
messages = st.builds(pb.ToolMessage, content=texts, tool_calls=st.lists(calls, max_size=3), reasoning=texts)


def choice_of(message: pb.ToolMessage) -> pb.Choice:
    reason = pb.FINISH_REASON_TOOL_CALLS if message.tool_calls else pb.FINISH_REASON_STOP
    return pb.Choice(text="raw", token_ids=[1, 2], finish_reason=reason, message=message)


def result_of(message: pb.ToolMessage) -> pb.Result:
    return pb.Result(request_id="r-1", outcome=pb.OUTCOME_COMPLETED, choices=[choice_of(message)])


def parts_of(message: pb.ToolMessage, size: int) -> list[pb.ToolPart]:
    """Return the message in parts of `size` characters."""
    parts = [
        pb.ToolPart(text=text[at : at + size], offset=at, reasoning=reasoning)
        for reasoning, text in ((True, message.reasoning), (False, message.content))
        for at in range(0, len(text), size)
    ]
    for index, call in enumerate(message.tool_calls):
        parts.append(pb.ToolPart(call=index, id=call.id, name=call.name))
        places = range(0, len(call.arguments), size)
        parts += [pb.ToolPart(call=index, text=call.arguments[at : at + size], offset=at) for at in places]
    return parts


def thought(lines: list[str]) -> str:
    """Return the reasoning of a stream."""
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    return "".join(delta.get("reasoning") or "" for delta in deltas)


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
    assert (content, thought(lines)) == (message.content, message.reasoning)
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


PLAIN = Shape.of(parse_body(CHAT_URL, {"messages": ASKED["messages"]}))
THOUGHT = pb.ToolMessage(content="Seven.", reasoning="Hm.")


def plain_chunks(shape: Shape = PLAIN, usage: bool = False) -> Chunks:
    """Return the writer of a chat that offers no functions."""
    return Chunks(shape, "r-1", 1, "tiny", 1, usage)


def deltas_of(lines: list[str]) -> list[dict[str, Any]]:
    return [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]


def said(attempt: int, offset: int, text: str, *parts: pb.ToolPart, read: bool = True) -> pb.TokenDelta:
    """Return a delta of one token, of a worker that has a reasoning parser if it is `read`."""
    ids = [ord(text[0]) if text else 0]
    return pb.TokenDelta(attempt=attempt, offset=offset, token_ids=ids, text=text, parts=parts, as_message=read)


def test_what_is_thought_comes_before_what_is_said_and_the_text_never() -> None:
    chunks = plain_chunks()
    lines = chunks.of_delta(said(1, 0, "<think>"))
    lines += chunks.of_delta(said(1, 1, "Hm.", pb.ToolPart(text="Hm.", reasoning=True)))
    lines += chunks.of_delta(said(1, 2, "</think>"))
    lines += chunks.of_delta(said(1, 3, "Seven.", pb.ToolPart(text="Seven.")))
    result = pb.Result(choices=[pb.Choice(text="<think>Hm.</think>Seven.", token_ids=b"<H<S", message=THOUGHT)])
    lines += chunks.of_result(result)
    opening = {"role": "assistant", "content": ""}
    assert deltas_of(lines) == [opening, {"reasoning": "Hm."}, {"content": "Seven."}, {}]


def test_a_worker_without_a_parser_is_shown_as_it_speaks() -> None:
    chunks = plain_chunks()
    lines = chunks.of_delta(said(1, 0, "<think>", read=False)) + chunks.of_delta(said(1, 1, "Hm.", read=False))
    lines += chunks.of_result(pb.Result(choices=[pb.Choice(text="<think>Hm.", token_ids=b"<H")]))
    assert [delta.get("content") for delta in deltas_of(lines)] == ["", "<think>", "Hm.", ""]


def test_what_was_not_read_as_it_came_is_told_with_the_result() -> None:
    """As of a request whose first asker wanted it whole, and whose second, by the same key, streams."""
    chunks = plain_chunks()
    lines = chunks.of_delta(said(1, 0, "<think>")) + chunks.of_delta(said(1, 1, "Hm."))
    assert deltas_of(lines) == [{"role": "assistant", "content": ""}]
    whole = pb.Choice(text="<think>Hm.</think>Seven.", token_ids=b"<H<S", message=THOUGHT)
    (last,) = deltas_of(chunks.of_result(pb.Result(choices=[whole])))
    assert last == {"content": "Seven.", "reasoning": "Hm."}
    (_, alone) = deltas_of(plain_chunks().of_result(pb.Result(choices=[whole])))
    assert alone == last, "also where no delta came at all"


def test_an_attempt_on_a_worker_with_another_parser_never_mixes_two_answers() -> None:
    whole = pb.Choice(text="<think>Hm.</think>Seven.", token_ids=b"<H<S", message=THOUGHT)
    thought_part = pb.ToolPart(text="Hm.", reasoning=True)
    chunks = plain_chunks()
    chunks.of_delta(said(1, 0, "<think>", read=False))
    assert chunks.of_delta(said(2, 0, "<think>")) == []
    with pytest.raises(DivergedError):
        chunks.of_result(pb.Result(choices=[whole]))
    chunks = plain_chunks()
    chunks.of_delta(said(1, 0, "<think>", thought_part))
    assert chunks.of_delta(said(2, 0, "<think>", read=False)) == []
    with pytest.raises(DivergedError):
        chunks.of_result(pb.Result(choices=[pb.Choice(text="<think>Hm.</think>Seven.", token_ids=b"<H<S")]))


def test_a_later_attempt_that_thinks_the_same_goes_on() -> None:
    chunks = plain_chunks()
    first, rest = pb.ToolPart(text="H", reasoning=True), pb.ToolPart(text="m.", offset=1, reasoning=True)
    lines = chunks.of_delta(said(1, 0, "H", first))
    lines += chunks.of_delta(said(2, 0, "H", first)) + chunks.of_delta(said(2, 1, "m.", rest))
    assert thought(lines) == "Hm."
    other = pb.ToolMessage(content="Seven.", reasoning="Ha.")
    with pytest.raises(DivergedError):
        chunks.of_result(pb.Result(choices=[pb.Choice(text="Hm.", token_ids=b"Hm", message=other)]))


def test_log_probabilities_that_the_worker_keeps_to_itself_are_not_shown() -> None:
    """Neither are they an empty list, as of an answer that has none."""
    shape = Shape.of(parse_body(CHAT_URL, {"messages": ASKED["messages"], "logprobs": True}))
    entry = pb.TokenLogprob(token="S")
    hidden = pb.Choice(text="Seven.", token_ids=[1], message=pb.ToolMessage(content="Seven."))
    last = json.loads(plain_chunks(shape).of_result(pb.Result(choices=[hidden]))[-1])["choices"][0]
    (whole,) = body_of(shape, pb.Result(choices=[hidden]))["choices"]
    assert (last["logprobs"], whole["logprobs"]) == (None, None)
    hidden.logprobs.append(entry)
    (whole,) = body_of(shape, pb.Result(choices=[hidden]))["choices"]
    assert [entry["token"] for entry in whole["logprobs"]["content"]] == ["S"]
    (delta,) = plain_chunks(shape).of_delta(pb.TokenDelta(token_ids=[1], logprobs=[entry], as_message=True))[1:]
    assert json.loads(delta)["choices"][0]["delta"] == {}, "a step that is held back has its log probabilities"


def test_a_whole_answer_has_what_was_thought_and_how_many_tokens_that_took() -> None:
    result = pb.Result(choices=[pb.Choice(text="raw", token_ids=[1], message=THOUGHT)])
    result.usage.completion_tokens = 9
    message = body_of(PLAIN, result)["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("Seven.", "Hm.")
    assert "tool_calls" not in message
    assert body_of(PLAIN, result)["usage"]["completion_tokens_details"] is None
    assert "completion_tokens_details" not in json.loads(plain_chunks(usage=True).of_result(result)[-1])["usage"]
    result.usage.reasoning_tokens = 0
    usage = body_of(PLAIN, result)["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert list(usage) == [
        "prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details", "completion_tokens_details",
    ]  # fmt: skip
    streamed = json.loads(plain_chunks(usage=True).of_result(result)[-1])["usage"]
    assert streamed["completion_tokens_details"] == {"reasoning_tokens": 0}
    silent = pb.Result(choices=[pb.Choice(text="<think>", message=pb.ToolMessage(reasoning=""))])
    message = body_of(PLAIN, silent)["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == (None, "")


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, pb.AsMessage()),
        ({"stream": True}, pb.AsMessage(in_parts=True)),
        ({"include_reasoning": False}, pb.AsMessage(hides_reasoning=True)),
        ({"include_reasoning": True, "tools": [CLOCK], "stream": True}, pb.AsMessage(in_parts=True)),
        ({"include_reasoning": None, "stream": False}, pb.AsMessage()),
    ],
)
def test_every_chat_is_wanted_as_a_message(fields: dict[str, Any], wanted: pb.AsMessage) -> None:
    body = {"messages": ASKED["messages"], **fields}
    chat = to_request(parse_body(CHAT_URL, body, streams=True)).chat
    assert chat.HasField("as_message")
    assert chat.as_message == wanted


def test_completions_have_no_reasoning_to_be_left_out() -> None:
    with pytest.raises(BodyError) as refused:
        parse_body(COMPLETIONS_URL, {"prompt": "a", "include_reasoning": False})
    assert refused.value.param == "include_reasoning"
    assert parse_body(COMPLETIONS_URL, {"prompt": "a", "include_reasoning": True})
    with pytest.raises(BodyError):
        parse_body(CHAT_URL, {"messages": ASKED["messages"], "include_reasoning": 1})


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


def test_what_is_hidden_may_be_thought_anew_by_another_attempt() -> None:
    """Nothing but the role was told."""
    chunks = plain_chunks()
    lines = chunks.of_delta(said(1, 0, "Maybe six"))
    lines += chunks.of_delta(said(2, 0, "No, seven"))
    lines += chunks.of_delta(said(2, 1, "Seven.", pb.ToolPart(text="Seven.")))
    assert deltas_of(lines) == [{"role": "assistant", "content": ""}, {"content": "Seven."}]


def test_what_log_probabilities_have_told_is_not_thought_anew() -> None:
    chunks = plain_chunks()
    shown = said(1, 0, "Hm")
    shown.logprobs.extend(pb.TokenLogprob(token_id=token) for token in shown.token_ids)
    chunks.of_delta(shown)
    with pytest.raises(DivergedError):
        chunks.of_delta(said(2, 0, "So"))
