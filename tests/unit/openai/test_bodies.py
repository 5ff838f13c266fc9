"""Bodies: what is carried reaches the request; what is not is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from penstock.errors import InvalidRequest
from penstock.openai.bodies import (
    CHAT_URL,
    COMPLETIONS_URL,
    NOT_CARRIED,
    WITHOUT_EFFECT,
    BodyError,
    ChatBody,
    CompletionBody,
    StreamOptions,
    parse_body,
)
from penstock.openai.convert import to_request
from penstock.openai.limits import MAX_PROMPTS
from penstock.request.v1 import request_pb2 as pb
from tests.support.json_depth import levels_around_the_limit

CHAT = {"messages": [{"role": "user", "content": "hé"}]}
UNSUPPORTED = "unsupported_parameter"


def completion(**fields: Any) -> pb.Request:
    return to_request(parse_body(COMPLETIONS_URL, {"prompt": "p", **fields}))


def chat(**fields: Any) -> pb.Request:
    return to_request(parse_body(CHAT_URL, {**CHAT, **fields}))


SAMPLING: dict[str, Any] = {
    "n": 3,
    "max_tokens": 7,
    "min_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": -1,
    "min_p": 0.125,
    "seed": -5,
    "stop_token_ids": [1, 2],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "presence_penalty": -2.0,
    "frequency_penalty": 2.0,
    "repetition_penalty": 1.5,
    "prompt_logprobs": 1,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "allowed_token_ids": [9],
    "bad_words": ["x"],
    "truncate_prompt_tokens": -1,
    "thinking_token_budget": 10,
}


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize("make", [completion, chat])
def test_a_sampling_field_reaches_the_request(make: Any, name: str) -> None:
    carried = getattr(make(**{"max_tokens": 9, name: SAMPLING[name]}).sampling, name)
    value = SAMPLING[name]
    assert (list(carried) if isinstance(value, list) else carried) == value


def test_what_is_not_said_is_not_set() -> None:
    assert completion().sampling == pb.SamplingParams(max_tokens=16)
    assert chat().sampling == pb.SamplingParams()
    assert completion(max_tokens=None).sampling.max_tokens == 16
    assert chat(max_tokens=5, max_completion_tokens=3).sampling.max_tokens == 3


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3], ["text"], [[1, 2, 3]]])
def test_prompts(prompt: Any) -> None:
    request = completion(prompt=prompt)
    assert request.text == "text" or list(request.token_ids.ids) == [1, 2, 3]


def test_chat_messages_reach_the_template_as_they_are() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "é"}], "name": "x"}]
    request = chat(
        messages=messages, add_generation_prompt=False, continue_final_message=True, chat_template="{{ x }}",
        chat_template_kwargs={"x": 1}, documents=[{"d": "1"}], reasoning_effort="none", add_special_tokens=True,
    )  # fmt: skip
    assert json.loads(request.chat.messages_json) == messages
    assert json.loads(request.chat.chat_template_kwargs_json) == {
        "x": 1, "documents": [{"d": "1"}], "reasoning_effort": "none", "enable_thinking": False,
    }  # fmt: skip
    assert request.chat.HasField("add_generation_prompt")
    assert not request.chat.add_generation_prompt
    assert request.chat.continue_final_message
    assert request.chat.add_special_tokens
    assert request.chat.chat_template == "{{ x }}"


@pytest.mark.parametrize(
    ("content", "param", "code"),
    [
        ([{"type": "image_url", "image_url": {"url": "http://10.0.0.1/"}}], "messages.1.content.0.type", UNSUPPORTED),
        ([{"type": "text", "text": "a"}, {"image_url": "http://x/"}], "messages.1.content.1.type", UNSUPPORTED),
        ([{"type": "text", "text": "a", "uuid": "u", "image_url": "x"}], "messages.1.content.0.type", UNSUPPORTED),
        (
            [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}],
            "messages.1.content.0.type",
            UNSUPPORTED,
        ),
        ([{"type": "what"}], "messages.1.content.0.type", UNSUPPORTED),
        ([{"type": ["text"]}], "messages.1.content.0.type", UNSUPPORTED),
        ([{"text": "a"}], "messages.1.content.0.type", "invalid_value"),
        ([3], "messages.1.content.0", "invalid_value"),
        (3, "messages.1.content", "invalid_value"),
        (None, "messages.1.content", "invalid_value"),
    ],
)
@pytest.mark.parametrize("streams", [True, False])
def test_messages_hold_texts_alone(content: Any, param: str, code: str, streams: bool) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": content}]
    with pytest.raises(BodyError) as refused:
        parse_body(CHAT_URL, {"model": "m", "messages": messages}, streams)
    assert (refused.value.param, refused.value.code) == (param, code)


@pytest.mark.parametrize(
    "content",
    [None, "a", [], ["a"], [{"type": "text", "text": "a", "image_url": None}, {"type": "refusal", "refusal": "no"}]],
)
def test_messages_hold_text_in_every_form(content: Any) -> None:
    parse_body(CHAT_URL, {"model": "m", "messages": [{"role": "assistant", "content": content}, {"role": "user"}]})


@pytest.mark.parametrize("role", ["user", "system", "developer", "tool", "critic"])
def test_null_is_no_content_but_of_who_may_say_nothing(role: str) -> None:
    """As `vllm serve` has it, whose `ChatCompletionRequest` takes null of an assistant and of a function."""
    with pytest.raises(BodyError, match=r"messages\.0\.content: must be a text"):
        parse_body(CHAT_URL, {"model": "m", "messages": [{"role": role, "content": None}]})
    for other in ("assistant", "function"):
        parse_body(CHAT_URL, {"model": "m", "messages": [{"role": other, "name": "f", "content": None}]})


def test_log_probabilities() -> None:
    assert completion(logprobs=2, echo=True).sampling.prompt_logprobs == 2
    assert completion(logprobs=2).sampling.logprobs == 2
    assert not completion(logprobs=2).sampling.HasField("prompt_logprobs")
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).sampling.logprobs == 4
    assert not chat(logprobs=False).sampling.HasField("logprobs")


def test_a_bias_may_be_for_any_token_id() -> None:
    assert dict(completion(logit_bias={"0": 1, str(2**32 - 1): 2}).sampling.logit_bias) == {0: 1, 2**32 - 1: 2}


def test_biases_are_clamped_as_vllm_does() -> None:
    assert dict(completion(logit_bias={"5": 1000, "6": -1000.0}).sampling.logit_bias) == {5: 100.0, 6: -100.0}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"structured_outputs": {"json": {"type": "object"}}}, pb.StructuredOutputs(json_schema='{"type": "object"}')),
        ({"structured_outputs": {"regex": "a+"}}, pb.StructuredOutputs(regex="a+")),
        ({"structured_outputs": {"grammar": "root"}}, pb.StructuredOutputs(grammar="root")),
        ({"structured_outputs": {"json_object": True}}, pb.StructuredOutputs(json_object=True)),
        (
            {"structured_outputs": {"choice": ["a", "b"], "disable_any_whitespace": True}},
            pb.StructuredOutputs(choice=pb.StructuredOutputs.Choices(values=["a", "b"]), disable_any_whitespace=True),
        ),
        ({"response_format": {"type": "text"}}, pb.StructuredOutputs()),
        ({"response_format": {"type": "json_object"}}, pb.StructuredOutputs(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}},
            pb.StructuredOutputs(json_schema='{"type": "null"}'),
        ),
    ],
)
def test_shapes_of_the_output(fields: dict[str, Any], wanted: pb.StructuredOutputs) -> None:
    assert completion(**fields).sampling.structured_outputs == wanted
    assert chat(**fields).sampling.structured_outputs == wanted


def test_a_structural_tag_keeps_its_fields() -> None:
    tag = {"type": "structural_tag", "structures": [], "triggers": ["<a>"]}
    assert json.loads(completion(response_format=tag).sampling.structured_outputs.structural_tag) == tag


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"shiny": 1}, "shiny"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"allowed_token_ids": [1] * 1025}, "allowed_token_ids"),
        ({"bad_words": ["a"] * 1025}, "bad_words"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {str(2**32): 1}}, "logit_bias"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": True}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format"),
        ({"stream": True}, "stream"),
        ({"tools": []}, "tools"),
        ({"best_of": 2}, "best_of"),
        ({"priority": 2**40}, "priority"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    for url, body in ((COMPLETIONS_URL, {"prompt": "p"}), (CHAT_URL, CHAT)):
        with pytest.raises(BodyError, match=param) as refused:
            parse_body(url, {**body, **fields})
        assert refused.value.param == param


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        (COMPLETIONS_URL, {}, "prompt"),
        (COMPLETIONS_URL, {"prompt": ""}, "prompt"),
        (COMPLETIONS_URL, {"prompt": []}, "prompt"),
        (COMPLETIONS_URL, {"prompt": ["a", ""]}, "prompt"),
        (COMPLETIONS_URL, {"prompt": [1, -1]}, "prompt"),
        (COMPLETIONS_URL, {"prompt": "p", "suffix": "s"}, "suffix"),
        (CHAT_URL, {"messages": []}, "messages"),
        (CHAT_URL, {"messages": [{"content": "x"}]}, "messages"),
        (CHAT_URL, {"messages": ["x"]}, "messages.0"),
        (CHAT_URL, {"messages": [{"role": "user", "content": "x"}, ["y"]]}, "messages.1"),
        (CHAT_URL, {**CHAT, "top_logprobs": 2}, "top_logprobs"),
        (CHAT_URL, {**CHAT, "echo": True}, "echo"),
        (CHAT_URL, {**CHAT, "reasoning_effort": "hihg"}, "reasoning_effort"),
        (CHAT_URL, {**CHAT, "prompt": "p"}, "prompt"),
        (CHAT_URL, {**CHAT, "tools": [{"type": "function"}]}, "tools.0.function"),
        (CHAT_URL, {**CHAT, "tools": [{"function": {"name": "f"}}, {"function": {}}]}, "tools.1.function.name"),
        (
            CHAT_URL,
            {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_a_wrong_field_of_one_endpoint_is_named(url: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(BodyError) as refused:
        parse_body(url, body)
    assert refused.value.param == param
    assert str(refused.value).startswith(param)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([-1], "token ids are not negative (got -1)"),
        ([1, -2], "token ids are not negative (got -2)"),
        ([[1], [2, -3]], "token ids are not negative (got -3)"),
        ([2**32], "token ids are at most 4294967295 (got 4294967296)"),
    ],
)
def test_wrong_token_ids_of_a_prompt_are_told_as_such(prompt: Any, said: str) -> None:
    with pytest.raises(BodyError) as refused:
        parse_body(COMPLETIONS_URL, {"prompt": prompt}, streams=True)
    assert str(refused.value) == f"prompt: {said}"


@pytest.mark.parametrize("prompt", [[["a"]], [["a", "b"]], [[[1, 2], [3]]], [["a"] * (MAX_PROMPTS + 1)], [["a", ""]]])
def test_prompts_in_a_list_of_one_list_are_no_prompts(prompt: Any) -> None:
    with pytest.raises(BodyError) as refused:
        parse_body(COMPLETIONS_URL, {"prompt": prompt}, streams=True)
    assert refused.value.param == "prompt"


def test_values_that_change_nothing_are_accepted() -> None:
    neutral: dict[str, Any] = {name: values[0] if values else None for name, values in NOT_CARRIED.items()}
    assert chat(**neutral, user="me", metadata={"a": "b"}) == chat()
    assert completion(**neutral, user="me") == completion(echo=False)


@pytest.mark.parametrize("wrong", [5, True, ["me"], {"name": "me"}])
@pytest.mark.parametrize("parsed", [chat, completion])
def test_a_user_is_a_text(parsed: Callable[..., pb.Request], wrong: Any) -> None:
    assert parsed(user=None) == parsed()
    with pytest.raises(BodyError, match=r"^user: ") as refused:
        parsed(user=wrong)
    assert (refused.value.param, refused.value.code) == ("user", "invalid_value")


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_what_vllm_does_not_know_may_be_anything(name: str) -> None:
    assert chat(**{name: 5}) == chat()


def test_every_field_of_vllms_protocol_is_carried_or_refused_by_name() -> None:
    completion_protocol = pytest.importorskip("vllm.entrypoints.openai.completion.protocol")
    chat_protocol = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    for ours, theirs in (
        (CompletionBody, completion_protocol.CompletionRequest),
        (ChatBody, chat_protocol.ChatCompletionRequest),
    ):
        known = set(ours.model_fields) | set(NOT_CARRIED) | {"user", "metadata"}
        assert set(theirs.model_fields) <= known


def test_every_field_that_openais_client_sends_is_known() -> None:
    chat_params = pytest.importorskip("openai.types.chat.completion_create_params")
    completion_params = pytest.importorskip("openai.types.completion_create_params")
    for ours, theirs in ((CompletionBody, completion_params), (ChatBody, chat_params)):
        known = {*ours.model_fields, *NOT_CARRIED, *WITHOUT_EFFECT}
        assert set(theirs.CompletionCreateParamsBase.__annotations__) <= known
    options = pytest.importorskip("openai.types.chat").ChatCompletionStreamOptionsParam
    assert set(options.__annotations__) <= set(StreamOptions.model_fields)


def test_what_only_openais_own_servers_heed_is_accepted() -> None:
    hints = {"safety_identifier": "u-1", "prompt_cache_key": "k", "prompt_cache_retention": "24h"}
    assert chat(**hints, prompt_cache_options={"ttl": "30m"}, verbosity="medium") == chat()
    with pytest.raises(BodyError) as refused:
        chat(verbosity="low")
    assert (refused.value.param, refused.value.code) == ("verbosity", UNSUPPORTED)
    options = {"include_obfuscation": False}
    assert parse_body(CHAT_URL, {**CHAT, "stream": True, "stream_options": options}, streams=True).stream
    with pytest.raises(BodyError, match="stream_options"):
        parse_body(CHAT_URL, {**CHAT, "stream": True, "stream_options": {"include_obfuscation": True}}, streams=True)


def test_a_stream_is_for_those_who_wait_for_it() -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = parse_body(CHAT_URL, {**CHAT, **options}, streams=True)
    assert (body.stream, body.streamed_usage) == (True, True)
    for name, value in options.items():
        with pytest.raises(BodyError, match="not supported in batches") as refused:
            parse_body(CHAT_URL, {**CHAT, name: value})
        assert refused.value.param == name
    assert parse_body(CHAT_URL, {**CHAT, "stream": False, "stream_options": None}).stream is None


@pytest.mark.parametrize(
    ("url", "fields", "param"),
    [
        (CHAT_URL, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT_URL, {"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        (CHAT_URL, {"stream": "yes"}, "stream"),
        (CHAT_URL, {"tools": [{}]}, "tools.0.function"),
    ],
)
def test_what_a_stream_cannot_tell_is_refused_by_name(url: str, fields: dict[str, Any], param: str) -> None:
    prompt = CHAT if url == CHAT_URL else {"prompt": "p"}
    with pytest.raises(BodyError) as refused:
        parse_body(url, {**prompt, **fields}, streams=True)
    assert refused.value.param == param


@pytest.mark.parametrize("url", [CHAT_URL, COMPLETIONS_URL])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"return_token_ids": True}, "return_token_ids"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ],
)
def test_what_may_only_be_false_is_not_supported(url: str, fields: dict[str, Any], param: str) -> None:
    prompt = CHAT if url == CHAT_URL else {"prompt": "p"}
    with pytest.raises(BodyError, match="not supported") as refused:
        parse_body(url, {**prompt, "stream": True, **fields}, streams=True)
    assert (refused.value.param, refused.value.code) == (param, "unsupported_parameter")


def test_a_body_too_deep_to_be_written_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Which bodies these are depends on Python's version: with some, none that can be parsed.
    def write(fields: Any) -> pb.Request:
        raise RecursionError

    monkeypatch.setattr("penstock.openai.convert.build_request", write)
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        chat()


def test_no_body_is_too_deep_for_an_answer() -> None:
    for levels in levels_around_the_limit():
        try:
            variables = json.loads('{"a": ' + "[" * levels + "]" * levels + "}")
        except RecursionError:
            continue
        with suppress(InvalidRequest, BodyError):
            chat(chat_template_kwargs=variables)


@pytest.mark.parametrize("wrong", [5, None, {"a": 1}, [1, "a"], ["a", [1]], [[1], ["a"]]], ids=repr)
def test_of_a_value_of_no_kind_every_kind_is_told(wrong: Any) -> None:
    with pytest.raises(BodyError) as refused:
        completion(prompt=wrong)
    kinds = "must be a text, a list of texts, a list of token ids, or a list of such lists"
    assert (str(refused.value), refused.value.param) == (f"prompt: {kinds} (got {wrong!r})", "prompt")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"stop": [""]}, "stop: must be a text or a list of texts, none of which is empty (got [''])"),
        ({"tool_choice": {"type": "function"}}, "tool_choice: must be "),
        ({"vllm_xargs": {"a": None}}, "vllm_xargs: must be an object of texts, numbers and lists of these"),
    ],
)
def test_so_it_is_of_other_fields(fields: dict[str, Any], told: str) -> None:
    tools = [{"type": "function", "function": {"name": "clock"}}]
    with pytest.raises(BodyError) as refused:
        chat(tools=tools, **fields)
    assert str(refused.value).startswith(told)
