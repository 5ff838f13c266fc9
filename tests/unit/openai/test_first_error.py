"""A body may be wrong in millions of places: the first is told, and the others are not even looked for."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from penstock.openai.bodies import CHAT_URL, COMPLETIONS_URL, MODELS, BodyError, parse_body
from penstock.openai.limits import MAX_ENTRIES

MANY = 3000
"""Wrong items in one body of 16 MiB may be a thousand times as many; each that is noted takes kilobytes and time."""

FEW = 400
"""What a piece of a mapping may have that is wrong."""

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
PROMPT: dict[str, Any] = {"prompt": "p"}
NAMES = [f"field{number}" for number in range(MANY)]
OTHERS: dict[str, Any] = dict.fromkeys(NAMES, 1)
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, **OTHERS}}


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        (COMPLETIONS_URL, {"prompt": [1, *[""] * MANY]}, "prompt"),
        (COMPLETIONS_URL, {"prompt": [[1, *["a"] * MANY], *[["a"]] * 1000]}, "prompt"),
        (COMPLETIONS_URL, {**PROMPT, "stop_token_ids": ["a"] * MANY}, "stop_token_ids"),
        (COMPLETIONS_URL, {**PROMPT, "allowed_token_ids": ["a"] * MANY}, "allowed_token_ids"),
        (COMPLETIONS_URL, {**PROMPT, "bad_words": [1] * MANY}, "bad_words"),
        (COMPLETIONS_URL, {**PROMPT, "stop": [1] * MANY}, "stop"),
        (COMPLETIONS_URL, {**PROMPT, "logit_bias": dict.fromkeys(NAMES, "a")}, "logit_bias"),
        (COMPLETIONS_URL, {**PROMPT, "vllm_xargs": dict.fromkeys(NAMES)}, "vllm_xargs"),
        (COMPLETIONS_URL, {**PROMPT, "vllm_xargs": {"a": [None] * MANY}}, "vllm_xargs"),
        (COMPLETIONS_URL, {**PROMPT, "structured_outputs": {"choice": [1] * MANY}}, "structured_outputs"),
        (COMPLETIONS_URL, {**PROMPT, **OTHERS}, "field0"),
        (COMPLETIONS_URL, {**PROMPT, "stream_options": OTHERS}, "stream_options.field0"),
        (CHAT_URL, {"messages": [1] * MANY}, "messages.0"),
        (CHAT_URL, {**CHAT, "tools": [{}] * MANY}, "tools.0.function"),
        (CHAT_URL, {**CHAT, "tools": [{"function": {"name": "f", **OTHERS}}]}, "tools.0.function.field0"),
        (CHAT_URL, {**CHAT, "documents": [{"a": 1}] * MANY}, "documents"),
        (CHAT_URL, {**CHAT, "documents": [OTHERS]}, "documents"),
        (CHAT_URL, {**CHAT, "response_format": JSON_SCHEMA}, "response_format.json_schema.field0"),
    ],
)
def test_only_the_first_of_many_wrong_places_is_noted(url: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as found:
        MODELS[url].model_validate(body)
    assert found.value.error_count() <= FEW
    with pytest.raises(BodyError) as refused:
        parse_body(url, body, streams=True)
    assert refused.value.param == param


def test_large_values_that_are_right_are_taken_whole() -> None:
    bias = {str(number): 1.5 for number in range(MAX_ENTRIES)}
    variables = {name: [1, "a", 0.5] for name in NAMES}
    body = parse_body(COMPLETIONS_URL, {**PROMPT, "logit_bias": bias, "vllm_xargs": variables})
    assert (body.logit_bias, body.vllm_xargs) == (bias, variables)
    chat = parse_body(CHAT_URL, {**CHAT, "documents": [dict.fromkeys(NAMES, "text")]})
    assert chat.model_dump()["documents"] == [dict.fromkeys(NAMES, "text")]
