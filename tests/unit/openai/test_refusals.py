"""What a refused field is told to be: not supported at all, or only in the form in which the answer is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.openai.bodies import CHAT_URL, COMPLETIONS_URL, BodyError, parse_body

PROMPTS: dict[str, dict[str, Any]] = {
    CHAT_URL: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS_URL: {"prompt": "p"},
}


@pytest.mark.parametrize(
    ("url", "fields"),
    [
        (CHAT_URL, {"prompt_logprobs": 0}),
        (COMPLETIONS_URL, {"prompt_logprobs": 1}),
        (COMPLETIONS_URL, {"echo": True}),
    ],
)
def test_what_is_carried_whole_alone_is_not_supported_in_a_stream(url: str, fields: dict[str, Any]) -> None:
    body = {**PROMPTS[url], **fields}
    with pytest.raises(BodyError, match=r"^\w+: not supported in a stream$") as refused:
        parse_body(url, {**body, "stream": True}, streams=True)
    assert (refused.value.param, refused.value.code) == (next(iter(fields)), "unsupported_parameter")
    assert not parse_body(url, {**body, "stream": False}, streams=True).stream


@pytest.mark.parametrize("name", ["store", "best_of", "functions"])
def test_what_is_refused_everywhere_is_not_refused_in_batches_alone(name: str) -> None:
    """Or its line would be sent as a single request next, and be refused again."""
    for streams in (False, True):
        with pytest.raises(BodyError, match=f"^{name}: not supported$") as refused:
            parse_body(COMPLETIONS_URL, {"prompt": "p", name: 7}, streams)
        assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")
