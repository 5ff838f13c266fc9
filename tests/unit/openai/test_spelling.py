"""An error names the field that the body has, whatever the request calls it."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.batch.answers import answer
from penstock.errors import InvalidRequest
from penstock.openai.bodies import CHAT_URL, COMPLETIONS_URL, BodyError, ChatBody, CompletionBody, parse_body
from penstock.openai.convert import to_request
from penstock.openai.shape import MARK, Shape
from penstock.openai.spelling import as_spelt
from penstock.request.v1 import request_pb2 as pb
from services.gateway.batch.errors import refused
from services.gateway.batch.lines import Reference
from services.gateway.batch.output import line_of
from services.gateway.problem import of_result

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
JSON = {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}}

CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": MESSAGES}, "prompt", "messages"),
    ({"messages": MESSAGES}, "messages[0].content", "messages[0].content"),
    ({"messages": MESSAGES, "max_completion_tokens": 9}, "max_tokens", "max_completion_tokens"),
    ({"messages": MESSAGES, "max_completion_tokens": 9, "max_tokens": 8}, "max_tokens", "max_completion_tokens"),
    ({"messages": MESSAGES, "max_tokens": 9}, "sampling.max_tokens", "max_tokens"),
    ({"messages": MESSAGES, "tools": TOOLS}, "tool_choice", "tools"),
    ({"messages": MESSAGES, "tools": TOOLS, "tool_choice": "auto"}, "tool_choice", "tool_choice"),
    ({"messages": MESSAGES, "tools": TOOLS}, "chat.tools.tools_json", "tools"),
    ({"messages": MESSAGES, "tools": TOOLS}, "sampling.structured_outputs", "tools"),
    ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 50}, "sampling.logprobs", "top_logprobs"),
    ({"messages": MESSAGES, "logprobs": True}, "sampling.logprobs", "logprobs"),
    ({"messages": MESSAGES, "response_format": JSON}, "structured_outputs.json_schema", "response_format"),
    ({"messages": MESSAGES, "vllm_xargs": {"a": 1}}, "sampling.extra_args_json", "vllm_xargs"),
    ({"prompt": "p"}, "prompt", "prompt"),
    ({"prompt": [1]}, "token_ids.ids", "prompt"),
    ({"prompt": "p", "logprobs": 50}, "sampling.logprobs", "logprobs"),
    ({"prompt": "p", "logprobs": 50, "echo": True}, "sampling.prompt_logprobs", "logprobs"),
    ({"prompt": "p", "prompt_logprobs": 50, "echo": True}, "sampling.prompt_logprobs", "prompt_logprobs"),
    ({"prompt": "p", "structured_outputs": {"json": {}}}, "structured_outputs.json_schema", "structured_outputs.json"),
    ({"prompt": "p", "structured_outputs": {"regex": "x"}}, "sampling.structured_outputs", "structured_outputs"),
    ({"prompt": "p"}, "sampling", ""),
]  # fmt: skip


def parsed(body: dict[str, Any]) -> ChatBody | CompletionBody:
    return parse_body(CHAT_URL if "messages" in body else COMPLETIONS_URL, body)


@pytest.mark.parametrize(("given", "field", "spelt"), CASES)
def test_batch_and_gateway_name_the_field_that_the_body_has(given: dict[str, Any], field: str, spelt: str) -> None:
    body = parsed(given)
    error = pb.RequestError(code="c", message=f"{field}: is wrong", param=field)
    text = f"{spelt or field}: is wrong"
    ended = pb.Result(request_id="r", outcome=pb.OUTCOME_REJECTED, error=error, client_reference="7")
    line = answer("mine", 7, body, ended)
    assert (line["error"]["param"], line["error"]["message"]) == (f"body.{spelt}" if spelt else None, text)
    inner = line["response"]["body"]["error"]
    assert (inner["param"], inner["message"]) == (spelt or None, text)

    ended.client_reference = Shape.of(body).to_reference()
    assert of_result(ended).body == line["response"]["body"]
    ended.client_reference = Reference(7, "mine", Shape.of(body)).to_text()
    assert f'"body":{{"error":{{"message":"{text}"'.encode() in b"".join(line_of(ended))
    refusal = refused(error, pb.Request(client_reference=ended.client_reference))  # type: ignore[arg-type]
    assert (refusal.param, refusal.message) == (spelt or None, text)


def test_a_text_names_the_fields_of_the_body_where_it_names_any() -> None:
    names = {"max_tokens": "max_completion_tokens", "logprobs": "top_logprobs"}
    for text, told in (
        ("max_tokens=9 is too large: 9 + 2 > 10", "max_completion_tokens=9 is too large: 9 + 2 > 10"),
        ("sampling.min_tokens: 3 is more than max_tokens (2)", "min_tokens: 3 is more than max_completion_tokens (2)"),
        ("Requested sample logprobs of 50", "Requested sample logprobs of 50"),
        ("default_max_tokens", "default_max_tokens"),
        ("extra_args.kv is not yours", "vllm_xargs.kv is not yours"),
    ):
        assert as_spelt(text, "sampling.min_tokens", names) == (told, "min_tokens")
    with pytest.raises(BodyError, match="min_tokens: 5 is more than max_completion_tokens 3"):
        parsed({"messages": MESSAGES, "min_tokens": 5, "max_completion_tokens": 3})


def test_what_cannot_be_asked_is_named_as_in_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fields: object) -> pb.Request:
        raise InvalidRequest("extra_args: is wrong", "extra_args", "invalid_type")

    monkeypatch.setattr("penstock.openai.convert.build_request", refuse)
    with pytest.raises(InvalidRequest, match=r"^vllm_xargs: is wrong$") as wrong:
        to_request(parsed({"prompt": "p", "vllm_xargs": {"a": 1}}))
    assert (wrong.value.param, wrong.value.code) == ("vllm_xargs", "invalid_type")


def test_a_shape_with_other_names_travels_and_one_without_is_as_it_was() -> None:
    asked = Shape.of(parsed({"messages": MESSAGES, "max_completion_tokens": 9}))
    assert asked.names == {"max_tokens": "max_completion_tokens"}
    assert Shape.from_reference(asked.to_reference()) == asked
    assert "names" not in Shape.of(parsed({"messages": MESSAGES, "max_tokens": 9})).to_reference()
    assert Shape.from_reference(MARK + '{"chat":true,"later":1}') == Shape(chat=True)
    for names in ('"x"', "5", '{"max_tokens":5}'):
        assert Shape.from_reference(f'{MARK}{{"names":{names}}}') == Shape()
