"""What chats are rendered with where they say nothing of it: a template, and variables for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from vllm.exceptions import VLLMError
from vllm.renderers.chat_utils import load_chat_template

from services.worker.untrusted import TOKENIZING
from services.worker.vllm.checks import NotServedError

TEMPLATE = "--chat-template"
VARIABLES = "--default-chat-template-kwargs"
"""Both as vLLM's server has them; they are none of the engine's arguments."""


class ChatDefaults(NamedTuple):
    """What a chat may override, but for the template, which it must be trusted for."""

    template: str | None = None
    """None for the model's own."""
    variables: Mapping[str, Any] = MappingProxyType({})


NO_DEFAULTS = ChatDefaults()


def add_flags(parser: Any) -> None:
    """Let a parser of the engine's arguments take both flags as vLLM's server does."""
    parser.add_argument(TEMPLATE, default=None)
    parser.add_argument(VARIABLES, type=json.loads, default=None)


def chat_defaults(found: Any) -> ChatDefaults:
    """Return what parsed arguments say. Raises NotServedError for a file that is not there, and for no variables."""
    try:
        template = load_chat_template(found.chat_template)
    except (VLLMError, OSError, ValueError) as error:
        raise NotServedError(f"{TEMPLATE}: {error}") from None
    variables = found.default_chat_template_kwargs or {}
    if not isinstance(variables, dict):
        raise NotServedError(f"{VARIABLES}: {json.dumps(variables)} is no JSON object")
    wrong = next((name for name in (*TOKENIZING, "chat_template") if name in variables), None)
    if wrong is not None:
        raise NotServedError(f"{VARIABLES}: {wrong} is no variable of a template")
    return ChatDefaults(template, variables)
