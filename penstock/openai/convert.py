"""Turns a checked body into the request the queue stores."""

from __future__ import annotations

import json
from typing import Any, cast

from penstock.errors import InvalidRequest
from penstock.fields import RequestFields, build_request
from penstock.openai.bodies import Body, ChatBody, CompletionBody, NamedTool
from penstock.openai.shape import Shape
from penstock.openai.spelling import as_spelt
from penstock.request.v1 import request_pb2 as pb

SAME_NAME = (
    "model",
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "truncate_prompt_tokens",
    "add_special_tokens",
    "priority",
)
"""Fields that body and request call the same; what the line does not say is left to the model's defaults."""

CHAT_SAME_NAME = ("chat_template", "add_generation_prompt", "continue_final_message")

LOGIT_BIAS_BOUND = 100.0
"""vLLM clamps biases to this."""


def to_request(body: ChatBody | CompletionBody) -> pb.Request:
    """Return the request of one line, without its key, batch and channel; of several prompts, that of the first.

    Raises InvalidRequest, which names the field as the body does.
    """
    try:
        return _request(body)
    except InvalidRequest as error:
        raise InvalidRequest(*as_spelt(str(error), error.param, Shape.of(body).spellings), error.code) from None
    except RecursionError:  # what was parsed cannot be written again, as that takes a few levels more
        raise InvalidRequest("the body is nested too deeply", "", "invalid_value") from None


def _request(body: ChatBody | CompletionBody) -> pb.Request:
    fields: dict[str, Any] = {name: getattr(body, name) for name in SAME_NAME}
    fields["max_tokens"] = body.most_tokens
    fields["structured_outputs"] = _structure(body)
    fields["extra_args"] = body.vllm_xargs
    if body.logit_bias:
        bound = LOGIT_BIAS_BOUND
        fields["logit_bias"] = {int(k): min(bound, max(-bound, v)) for k, v in body.logit_bias.items()}
    if body.thinking_token_budget is not None and body.thinking_token_budget >= 0:
        fields["thinking_token_budget"] = body.thinking_token_budget
    if isinstance(body, ChatBody):
        _add_chat(fields, body)
    else:
        fields["prompt"] = body.prompts[0]
        fields["logprobs"] = body.logprobs
        fields["echo"] = body.echo
        if body.echo and body.prompt_logprobs is None:
            fields["prompt_logprobs"] = body.logprobs
    request = build_request(cast(RequestFields, fields))
    if isinstance(body, ChatBody):
        _add_answer(request.chat, body)
    return request


def _add_chat(fields: dict[str, Any], body: ChatBody) -> None:
    fields["messages"] = body.messages
    fields.update({name: getattr(body, name) for name in CHAT_SAME_NAME})
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    variables = dict(body.chat_template_kwargs or {})
    if body.documents is not None:
        variables["documents"] = body.documents
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
        # Some templates think only when told to; vLLM's server sets this in the same way.
        variables.setdefault("enable_thinking", body.reasoning_effort != "none")
    fields["chat_template_kwargs"] = variables or None


def _add_answer(chat: pb.ChatPrompt, body: ChatBody) -> None:
    """Write what is to be read out of the answer."""
    chat.as_message.in_parts = bool(body.stream)
    chat.as_message.hides_reasoning = body.include_reasoning is False
    if body.tools is not None:
        _add_tools(chat.tools, body)


def _add_tools(use: pb.ToolUse, body: ChatBody) -> None:
    """Write what `body` says of functions; how it says it is kept, for templates show it to the model."""
    tools = body.model_dump(include={"tools"}, exclude_unset=True)["tools"]
    use.tools_json = json.dumps(tools, ensure_ascii=False)
    if isinstance(body.tool_choice, NamedTool):
        use.tool_choice_json = json.dumps(body.tool_choice.model_dump(), ensure_ascii=False)
    elif body.tool_choice is not None:
        use.tool_choice_json = json.dumps(body.tool_choice)
    use.single_call = body.parallel_tool_calls is False
    use.in_parts = bool(body.stream)


def _structure(body: Body) -> dict[str, Any] | None:
    if body.structured_outputs is not None:
        given = body.structured_outputs.model_dump(exclude_none=True, exclude_defaults=True)
        if "json_" in given:
            given["json_schema"] = given.pop("json_")
        return given
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.json_schema is not None:
        return {"json_schema": wanted.json_schema.schema_}
    return {"structural_tag": json.dumps(wanted.model_dump(exclude_none=True))}
