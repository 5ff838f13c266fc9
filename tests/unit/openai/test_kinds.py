"""A value of another kind is refused by name, though Python takes it for the same: 0 for false, 1 for true and 1.0."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.openai.bodies import CHAT_URL, COMPLETIONS_URL, MODELS, NOT_CARRIED, STREAMING, BodyError, parse_body

NEEDED: dict[str, dict[str, Any]] = {
    CHAT_URL: {"messages": [{"role": "user", "content": "x"}]},
    COMPLETIONS_URL: {"prompt": "p"},
}
ALIKE = ((False, 0, 0.0), (True, 1, 1.0))
"""Each a truth value, a whole number and another number."""

OF_ANY_NUMBER = {
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty",
}  # fmt: skip
"""Fields that may be no whole number: of these 1 is one as well as 1.0."""

FIELDS = [(url, name) for url, kind in MODELS.items() for name in {**kind.model_fields, **NOT_CARRIED, **STREAMING}]


def takes(url: str, name: str, value: Any, streams: bool) -> bool:
    try:
        parse_body(url, {**NEEDED[url], "logprobs": url == CHAT_URL or 1, name: value}, streams)
        blamed = ""
    except BodyError as error:
        blamed = error.param.split(".")[0]
    assert blamed in {"", name}
    return not blamed


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("url", "name"), FIELDS)
def test_a_field_takes_values_of_one_kind(url: str, name: str, streams: bool) -> None:
    for truth, whole, other in ALIKE:
        assert not (takes(url, name, truth, streams) and takes(url, name, whole, streams))
        assert not (takes(url, name, truth, streams) and takes(url, name, other, streams))
        if takes(url, name, whole, streams):
            assert takes(url, name, other, streams) == (name in OF_ANY_NUMBER)
            assert not takes(url, name, str(whole), streams)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("vllm_xargs", {"a": True}),
        ("vllm_xargs", {"a": [1, False]}),
        ("logit_bias", {"1": True}),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [1.0]),
        ("structured_outputs", {"json_object": 1}),
        ("structured_outputs", {"regex": "a", "disable_any_whitespace": 0}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": 1}}),
        ("tools", [{"type": "function", "function": {"name": "f", "strict": 0}}]),
    ],
)
def test_so_does_what_is_within_one(name: str, wrong: Any) -> None:
    assert not takes(CHAT_URL, name, wrong, True)


@pytest.mark.parametrize("name", ["include_usage", "continuous_usage_stats", "include_obfuscation"])
def test_so_do_the_options_of_a_stream(name: str) -> None:
    for wrong in (0, 0.0, "false"):
        with pytest.raises(BodyError, match=f"stream_options.{name}|stream_options: "):
            parse_body(CHAT_URL, {**NEEDED[CHAT_URL], "stream": True, "stream_options": {name: wrong}}, streams=True)
