"""What a model thinks, says and calls is told apart as vLLM's own chat server does it, whole and in parts."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.request.v1 import request_pb2 as pb
from services.worker.engine import ChoiceStep, EngineRequest, EngineStep, Part, RequestRefusedError
from services.worker.vllm.checks import Parsers
from tests.support.effort import long
from tests.support.thinking_model import make_thinking_model

pytestmark = pytest.mark.vllm

CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {"utc": {"type": "boolean"}}}},
}
CALL = '<tool_call>\n{"name": "clock", "arguments": {"utc": true}}\n</tool_call>'
JSON_CALL = '[{"name": "clock", "parameters": {"utc": true}}]'
SCRIPTS = {
    "it thinks and answers": ("<think>Hm, so.</think>\n\nSeven.", "stop"),
    "the first mark is the prompt's": ("Hm, so.\n</think>\n\nSeven.", "stop"),
    "it does not come to an end": ("<think>Hm, so and", "length"),
    "no mark at all": ("Seven.", "stop"),
    "it thinks nothing": ("<think>\n\n</think>\n\nSeven.", "stop"),
    "it says nothing": ("<think>Hm.</think>", "stop"),
    "it ends at once": ("", "stop"),
    "it thinks again": ("<think>Hm.</think>Seven.<think>Or?</think>Eight.", "stop"),
    "it calls": (f"<think>Hm, so.</think>\n\nI look. {CALL}", "stop"),
    "it calls twice": (f"Hm.</think>{CALL}\n{CALL}", "stop"),
    "it thinks of a call": (f"<think>like {CALL}?</think>Seven.", "stop"),
    "it calls without a thought": (CALL, "stop"),
    "a call is cut": (f"<think>Hm.</think>{CALL[:40]}", "length"),
    "the call that was forced": (f"<think>Hm.</think>{JSON_CALL}", "stop"),
}
OFFERED = {"tools": [CLOCK]}
BODIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "hidden": {"include_reasoning": False},
    "log probabilities": {"logprobs": True, "top_logprobs": 1},
    "log probabilities, hidden": {"logprobs": True, "top_logprobs": 1, "include_reasoning": False},
    "not to think": {"chat_template_kwargs": {"enable_thinking": False}},
    "the prompt begins the reasoning": {"chat_template_kwargs": {"begun": True}},
    "offered tools": OFFERED,
    "offered tools, hidden": {**OFFERED, "include_reasoning": False},
    "one call at most": {**OFFERED, "parallel_tool_calls": False},
    "tools, none to be called": {**OFFERED, "tool_choice": "none"},
    "a tool is required": {**OFFERED, "tool_choice": "required"},
    "one tool is named": {**OFFERED, "tool_choice": {"type": "function", "function": {"name": "clock"}}},
}
PARSERS = {
    "qwen3": Parsers("", "qwen3"),
    "deepseek_r1": Parsers("", "deepseek_r1"),
    "qwen3 with hermes": Parsers("hermes", "qwen3"),
    "deepseek_r1 with hermes": Parsers("hermes", "deepseek_r1"),
    "qwen3 with qwen3_coder": Parsers("qwen3_coder", "qwen3"),
    "granite, by texts": Parsers("", "granite"),
    "hermes alone": Parsers("hermes"),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """vLLM's configuration of a model that knows the marks of thinking."""
    from services.worker.vllm.engine import prepare

    model = make_thinking_model(tmp_path_factory.mktemp("model") / "thinking")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_HUB_OFFLINE", "1")
        arguments = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
        return prepare(str(model), ("tiny",), arguments)._config


def told(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without what is the server's own, and without the names of calls, which are drawn."""
    if isinstance(answer["choices"], dict):
        return answer
    (choice,) = answer["choices"]
    calls = [call["function"] for call in choice["message"].pop("tool_calls", [])]
    return {**choice, "calls": calls, "usage": answer["usage"]}


def answered(parsers: Parsers, fields: dict[str, Any]) -> bool:
    """Whether such a chat is read by a parser of a worker, which refuses what it has none for."""
    if not parsers.reasoning and "tools" not in fields:
        return False
    return bool(parsers.tools) or "tools" not in fields or fields.get("tool_choice") == "none"


@pytest.mark.grid
@pytest.mark.parametrize("tokens_a_step", [1, long(4)])
@pytest.mark.parametrize("names", PARSERS)
def test_it_is_told_as_vllms_server_tells_it(config: Any, names: str, tokens_a_step: int) -> None:
    from tests.support.scripted_chat import Both, Script

    parsers = PARSERS[names]
    both = Both(config, parsers)
    for body, fields in BODIES.items():
        for name, (text, finish) in SCRIPTS.items():
            if not answered(parsers, fields):
                continue
            script = Script(text, finish, tokens_a_step)
            for stream in (False, True):
                asked = {**fields, "stream": stream}
                (their_engine, theirs), (our_engine, ours) = both.theirs(asked, script), both.ours(asked, script)
                assert told(ours) == told(theirs), (body, name, stream)
                assert our_engine == their_engine, (body, name)


@pytest.mark.parametrize("names", ["qwen3", "qwen3 with hermes"])
@pytest.mark.parametrize("variables", [{"enable_thinking": False}, {"begun": True}])
def test_parsers_are_told_the_variables_that_templates_have_by_default(
    config: Any, names: str, variables: dict[str, Any]
) -> None:
    from tests.support.scripted_chat import Both, Script

    both, without = Both(config, PARSERS[names], variables), Both(config, PARSERS[names])
    differs = False
    for fields in ({}, {"chat_template_kwargs": {"enable_thinking": True}}):
        for text, finish in SCRIPTS.values():
            script = Script(text, finish)
            (their_engine, theirs), (our_engine, ours) = both.theirs(fields, script), both.ours(fields, script)
            assert told(ours) == told(theirs)
            assert our_engine == their_engine
            differs = differs or our_engine != without.ours(fields, script)[0]
    assert differs


def test_there_is_something_to_be_told(config: Any) -> None:
    """What the comparisons compare is not nothing."""
    from tests.support.scripted_chat import Both, Script

    both = Both(config, Parsers("hermes", "qwen3"))
    script = Script(f"<think>Hm, so.</think>I look. {CALL}")
    _, whole = both.ours(OFFERED, script)
    message = whole["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm, so.", "I look. ")
    assert message["tool_calls"][0]["function"] == {"name": "clock", "arguments": '{"utc": true}'}
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    _, stream = both.ours({**OFFERED, "stream": True}, script)
    said = stream["choices"][0]
    assert said["order"] == ["reasoning", "content"]
    assert (said["reasoning"], said["content"]) == ("Hm, so.", "I look. ")
    _, hidden = both.ours({"stream": True, "include_reasoning": False, "logprobs": True}, script)
    assert (hidden["choices"][0]["order"], hidden["choices"][0]["logprobs"]) == (["content"], [])
    _, shown = both.ours({"stream": True, "logprobs": True}, script)
    assert len(shown["choices"][0]["logprobs"]) == shown["usage"]["completion_tokens"]


def read_by(config: Any, parsers: Parsers, chat: pb.ChatPrompt, *texts: str) -> list[ChoiceStep]:
    """Return the steps of a run whose output is these texts, as its worker hands them on."""
    from vllm.tokenizers import cached_tokenizer_from_config

    from services.worker.vllm.parsing import MessageRun, parser_class

    tokenizer = cached_tokenizer_from_config(config.model_config)
    asked = EngineRequest("r-1", [0, 3, 70], 64, pb.SamplingParams(), chat=chat)
    run = MessageRun(parser_class(*parsers, tokenizer), tokenizer, config.model_config, asked)
    steps: list[ChoiceStep] = []
    for position, text in enumerate(texts):
        last = position == len(texts) - 1
        choice = ChoiceStep(0, tokenizer.encode(text, add_special_tokens=False), text)
        choice.finish_reason = "stop" if last else None
        steps += run.read(EngineStep([choice], last)).choices
    return steps


THOUGHT = ("<think>Hm.", "</think>Seven.")
BOTH = Parsers("hermes", "qwen3")
TOOLS = pb.ToolUse(tools_json='[{"type": "function", "function": {"name": "clock"}}]')


def test_who_offers_tools_and_asks_for_no_message_is_not_shown_the_reasoning(config: Any) -> None:
    """As an older gateway, which would take the parts for content."""
    for in_parts in (False, True):
        chat = pb.ChatPrompt(messages_json="[]", tools=TOOLS)
        chat.tools.in_parts = in_parts
        steps = read_by(config, BOTH, chat, *THOUGHT)
        assert steps[-1].message == pb.ToolMessage(content="Seven.")
        assert [part.text for step in steps for part in step.parts] == (["Seven."] if in_parts else [])


def test_parts_say_where_they_belong(config: Any) -> None:
    chat = pb.ChatPrompt(messages_json="[]", as_message=pb.AsMessage(in_parts=True))
    steps = read_by(config, BOTH, chat, "<think>H", "m.</think>Sev", "en.")
    assert [part for step in steps for part in step.parts] == [
        Part(None, "", "", "H", 0, True),
        Part(None, "", "", "m.", 1, True),
        Part(None, "", "", "Sev", 0, False),
        Part(None, "", "", "en.", 3, False),
    ]
    assert [step.reasoning_tokens for step in steps[:-1]] == [None, None]
    assert steps[-1].reasoning_tokens
    assert steps[-1].message == pb.ToolMessage(content="Seven.", reasoning="Hm.")


def test_what_a_parser_breaks_on_is_said_once(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another attempt would say the same again."""
    from vllm.parser.abstract_parser import DelegatingParser

    def broken(*_: object, **__: object) -> None:
        raise IndexError("no such mark")

    monkeypatch.setattr(DelegatingParser, "parse", broken)
    for chat, code, param in (
        (pb.ChatPrompt(messages_json="[]", as_message=pb.AsMessage()), "reasoning_parser_failed", "messages"),
        (pb.ChatPrompt(messages_json="[]", tools=TOOLS, as_message=pb.AsMessage()), "tool_parser_failed", "tools"),
    ):
        with pytest.raises(RequestRefusedError, match="IndexError: no such mark") as refused:
            read_by(config, BOTH, chat, *THOUGHT)
        assert (refused.value.code, refused.value.param) == (code, param)
