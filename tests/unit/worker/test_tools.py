"""Chats whose calls nobody could read are refused as vLLM's server refuses them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.request.v1 import request_pb2 as pb
from services.worker.engine import ChoiceStep, EngineStep, Part, PromptSpec, RequestRefusedError
from services.worker.outputs import RunOutput
from services.worker.tools import refuse_calls

TOOLS = json.dumps([{"type": "function", "function": {"name": "clock"}}])


@pytest.mark.parametrize(
    ("choice", "what"),
    [
        (None, '"auto" tool choice'),
        ("auto", '"auto" tool choice'),
        ("required", 'tool_choice="required"'),
        ({"function": {"name": "clock"}}, 'tool_choice=function "clock"'),
    ],
)
def test_without_a_parser_calls_are_refused(choice: Any, what: str) -> None:
    said = "" if choice is None else json.dumps(choice)
    with pytest.raises(RequestRefusedError) as refused:
        refuse_calls(PromptSpec(messages_json="[]", tools_json=TOOLS, tool_choice_json=said))
    remedy = "requires --tool-call-parser to be set where the worker is started"
    assert refused.value.message == f"{what} {remedy} (--tool-call-parser hermes, for example)"
    assert refused.value.param == "tool_choice"


def test_what_needs_no_parser_passes() -> None:
    refuse_calls(PromptSpec(messages_json="[]", tools_json=TOOLS, tool_choice_json='"none"'))
    refuse_calls(PromptSpec(messages_json="[]"))


def test_a_new_watcher_gets_every_part_again_and_the_result_the_message() -> None:
    output = RunOutput()
    part = Part(0, "c", "clock", "{", 0, False)
    output.take(EngineStep([ChoiceStep(0, (1,), "a", parts=[part])], False))
    ((told, _),) = output.deltas("r-1", 1)
    assert list(told.parts) == [pb.ToolPart(call=0, id="c", name="clock", text="{")]
    message = pb.ToolMessage(tool_calls=[pb.ToolCall(id="c", name="clock", arguments="{}")])
    rest = Part(0, "", "", "}", 1, False)
    last = ChoiceStep(0, (2,), "b", finish_reason="tool_calls", parts=[rest], message=message)
    output.take(EngineStep([last], True))
    ((told, _),) = output.deltas("r-1", 1)
    assert list(told.parts) == [pb.ToolPart(call=0, text="}", offset=1)]
    output.untell()
    ((told, _),) = output.deltas("r-1", 1)
    assert list(told.parts) == [pb.ToolPart(call=0, id="c", name="clock", text="{}")]
    result = pb.Result()
    output.fill(result, None)
    assert result.choices[0].message == message
    assert result.choices[0].finish_reason == pb.FINISH_REASON_TOOL_CALLS
