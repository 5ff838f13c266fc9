"""From a field of the queue's request back to that of the body it was made of: errors name what the asker wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping

from penstock.openai.bodies import ChatBody, CompletionBody

OF_ANY_BODY = {
    "text": "prompt",
    "token_ids": "prompt",
    "token_ids.ids": "prompt",
    "chat": "messages",
    "chat.messages_json": "messages",
    "chat.chat_template_kwargs_json": "chat_template_kwargs",
    "chat.tools": "tools",
    "chat.tools.tools_json": "tools",
    "tools.tools_json": "tools",
    "chat.tools.tool_choice_json": "tool_choice",
    "tools.tool_choice_json": "tool_choice",
    "extra_args": "vllm_xargs",
    "extra_args_json": "vllm_xargs",
    "structured_outputs.json_schema": "structured_outputs.json",
    "structured_outputs.choice.values": "structured_outputs.choice",
    "request": "",
}
"""Fields of the request that every body has under another name: without the word `sampling`, and with and without
`chat`, as queue and client name them."""

IN_TEXTS = ("extra_args_json", "extra_args")
"""Those of them that a text names as a field, wherever in it."""


def spellings_of(body: ChatBody | CompletionBody) -> dict[str, str]:
    """Return what `body` calls the fields that another body may call otherwise: what it has of several that are one."""
    if isinstance(body, ChatBody):
        found = {
            "max_tokens": "max_completion_tokens" if body.max_completion_tokens is not None else "",
            "logprobs": "top_logprobs" if body.top_logprobs is not None else "",
            "tool_choice": "tools" if body.tools is not None and body.tool_choice is None else "",
        }
        tools = "tools" if body.tools is not None else ""
    else:
        scored = bool(body.echo) and body.prompt_logprobs is None and body.logprobs is not None
        found, tools = {"prompt_logprobs": "logprobs" if scored else ""}, ""
    if body.structured_outputs is None:
        shaped = body.response_format is not None and body.response_format.type != "text"
        found["structured_outputs"] = "response_format" if shaped else tools
    return {name: spelt for name, spelt in found.items() if spelt}


def as_spelt(message: str, param: str, spellings: Mapping[str, str]) -> tuple[str, str]:
    """Return an error's message and the field at fault as the body has it, whose own names `spellings` has.

    Words of the message that are a field's name beyond doubt, as `max_tokens` is and `prompt` is not, follow.
    """
    name = _spelt(param, spellings)
    own = {**{field: OF_ANY_BODY[field] for field in IN_TEXTS}, **spellings}
    names = [field for field in own if "_" in field]
    head, told = f"{param}: ", message
    begins = bool(param and name) and message.startswith(head)
    if begins:
        told = message[len(head) :]
    told = re.sub(rf"\b({'|'.join(names)})\b", lambda found: own[found[0]], told)
    return f"{name}: {told}" if begins else told, name


def _spelt(param: str, spellings: Mapping[str, str]) -> str:
    name = param.removeprefix("sampling").removeprefix(".")
    name = OF_ANY_BODY.get(name, name)
    # What is within a field that the body has under another name it has not in that form.
    return spellings.get(re.split(r"[.\[]", name, maxsplit=1)[0], name)
