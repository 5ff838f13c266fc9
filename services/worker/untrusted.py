"""What a worker does not do for a client: run its template, open what it points to, move the cache where it says."""

from __future__ import annotations

from typing import Any

from penstock.openai.parts import wrong_part
from services.worker.engine import PromptSpec, RequestRefusedError

TOKENIZING = ("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs",
              "return_assistant_tokens_mask")  # fmt: skip
"""Parameters of `apply_chat_template` that are no variables of the template."""

FIELDS = ("documents", "reasoning_effort", "enable_thinking", "chat_template")
"""Variables of a template that come with fields of a body; the third follows from the second, the last one is judged
elsewhere."""

TRANSFERS = ("kv_transfer_params", "ec_transfer_params")
"""Extra arguments that vLLM takes from the servers of a fleet which hand caches to each other. They name hosts to fetch
from, and numbers that are believed: of cached tokens, more than the prompt has."""


def refuse_template(spec: PromptSpec, kwargs: dict[str, Any], trusted: bool) -> None:
    """Raise RequestRefusedError, in the words of vLLM's server, if a chat brings its own template untrusted.

    A template is a program: two loops, one in the other, would keep the tokenizer from every other prompt for hours.
    """
    if trusted or not (spec.chat_template or kwargs.get("chat_template") is not None):
        return
    text = "Chat template is passed with request, but --trust-request-chat-template is not set."
    raise RequestRefusedError(
        "unsupported_parameter", f"{text} Refused request with untrusted chat template.", "chat_template"
    )


def refuse_tokenizing(kwargs: dict[str, Any]) -> None:
    """Raise RequestRefusedError if a chat says how its template's text is to be tokenized.

    Hugging Face takes these beside a template's own variables, and fills up to a length the client names.
    """
    named = next((name for name in TOKENIZING if name in kwargs), None)
    if named is not None:
        text = f"chat_template_kwargs.{named} is no variable of a template"
        raise RequestRefusedError("unsupported_parameter", text, "chat_template_kwargs")


def refuse_variables(kwargs: dict[str, Any]) -> None:
    """Raise RequestRefusedError if a chat has variables for a template, of which Mistral's tokenizer has none.

    Those that requests have fields of their own for come the same way, and are its to take or to leave.
    """
    named = next((name for name in kwargs if name not in FIELDS), None)
    if named is not None:
        text = f"chat_template_kwargs.{named}: Mistral's tokenizer has no template"
        raise RequestRefusedError("unsupported_parameter", text, "chat_template_kwargs")


def refuse_transfer(extra_args: dict[str, Any]) -> None:
    """Raise RequestRefusedError if a request says where the engine takes its cache from, or brings it to."""
    named = next((name for name in TRANSFERS if name in extra_args), None)
    if named is not None:
        text = f"extra_args.{named} is not the client's to say"
        raise RequestRefusedError("unsupported_parameter", text, "sampling.extra_args_json")


def refuse_media(messages: Any) -> None:
    """Raise RequestRefusedError if a message holds anything but text."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise RequestRefusedError("invalid_messages", "messages must be a list of objects", "messages")
    wrong = wrong_part(messages)
    if wrong is not None:
        code = "invalid_messages" if wrong.malformed else "unsupported_parameter"
        raise RequestRefusedError(code, f"{wrong.place}: {wrong.text}", wrong.place)
