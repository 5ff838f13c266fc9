"""What crosses to the tokenizer's process of a request whose output is to have a form."""

from __future__ import annotations

import pytest

from penstock.request.v1 import request_pb2 as pb
from services.worker.engine import PromptSpec
from services.worker.forms import request_of
from services.worker.wire import prompt_spec

SHAPE = pb.StructuredOutputs(json_schema='{"type": "integer"}')
SAMPLING = pb.SamplingParams(structured_outputs=SHAPE, logprobs=2, max_tokens=9, skip_special_tokens=False)
MESSAGES = '[{"role": "user", "content": "' + "x" * 10_000 + '"}]'
TOOLS = '[{"type": "function", "function": {"name": "' + "y" * 10_000 + '"}}]'
OFFERING = pb.ToolUse(tools_json=TOOLS, tool_choice_json='"required"', single_call=True, in_parts=True)


@pytest.mark.parametrize(
    "request_",
    [
        pb.Request(text="hello", sampling=pb.SamplingParams(max_tokens=9, stop=["."])),
        pb.Request(token_ids=pb.TokenIds(ids=[1])),
        pb.Request(chat=pb.ChatPrompt(messages_json=MESSAGES, as_message=pb.AsMessage(in_parts=True))),
    ],
)
def test_of_most_requests_nothing_does(request_: pb.Request) -> None:
    assert prompt_spec(request_).form == b""


@pytest.mark.parametrize("asked", [{"text": "hello"}, {"token_ids": pb.TokenIds(ids=[1, 2])}])
def test_of_a_completion_it_is_all_that_says_how_it_is_run(asked: dict[str, object]) -> None:
    request = pb.Request(sampling=SAMPLING, echo=True, **asked)  # type: ignore[arg-type]
    assert request_of(prompt_spec(request)) == pb.Request(sampling=SAMPLING, echo=True)


@pytest.mark.parametrize(
    "chat",
    [
        pb.ChatPrompt(messages_json=MESSAGES, add_generation_prompt=True),
        pb.ChatPrompt(messages_json=MESSAGES, add_generation_prompt=False, continue_final_message=True),
        pb.ChatPrompt(
            messages_json=MESSAGES,
            chat_template_kwargs_json="{}",
            add_generation_prompt=True,
            as_message=pb.AsMessage(in_parts=True, hides_reasoning=True),
        ),
        pb.ChatPrompt(messages_json=MESSAGES, add_generation_prompt=True, tools=OFFERING),
        pb.ChatPrompt(messages_json=MESSAGES, add_generation_prompt=True, tools=pb.ToolUse(tools_json=TOOLS)),
    ],
)
def test_of_a_chat_it_is_that_too_and_messages_and_tools_cross_once(chat: pb.ChatPrompt) -> None:
    spec = prompt_spec(pb.Request(chat=chat, sampling=SAMPLING))
    assert request_of(spec) == pb.Request(chat=chat, sampling=SAMPLING)
    assert len(spec.form) < 100


def test_functions_are_enough() -> None:
    """A parser may write a grammar of them, as where one must be called."""
    chat = pb.ChatPrompt(messages_json="[]", tools=OFFERING, add_generation_prompt=True)
    request = pb.Request(chat=chat, sampling=pb.SamplingParams(max_tokens=9))
    assert request_of(prompt_spec(request)) == request


def test_it_crosses_with_the_prompt_and_counts_as_what_there_is_to_deal_with() -> None:
    spec = PromptSpec(text="hello", form=b"12345")
    assert PromptSpec(*spec.packed()) == spec
    assert spec.characters == 10
