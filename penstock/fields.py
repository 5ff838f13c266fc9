"""Builds a wire request from plain named fields, the names those of the protos."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, TypedDict

from google.protobuf.descriptor import FieldDescriptor

from penstock.errors import InvalidRequest
from penstock.request.v1 import request_pb2 as pb


class RequestFields(TypedDict, total=False):
    """Everything a request can say. Exactly one of `prompt` (text or token ids) and `messages` is needed.

    What is left out takes the queue's, the model's or vLLM's own default. `as_message` has a chat's answer read as a
    message too, where the worker has a reasoning parser.
    `deadline_s` is a `deadline_unix_ns` said as seconds from now; give at most one of the two.
    Units and ranges are those of `penstock.request.v1.Request` and `SamplingParams`.
    """

    prompt: str | Sequence[int]
    messages: Sequence[Mapping[str, Any]]
    chat_template: str
    chat_template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    as_message: bool
    add_special_tokens: bool
    channel: str
    tenant: str
    idempotency_key: str
    model: str
    batch: str
    priority: int
    deadline_unix_ns: int
    deadline_s: float
    traceparent: str
    tracestate: str
    echo: bool
    client_reference: str
    n: int
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    logprobs: int
    prompt_logprobs: int
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    structured_outputs: Mapping[str, Any]
    truncate_prompt_tokens: int
    thinking_token_budget: int
    extra_args: Mapping[str, Any]


CHAT_ONLY = ("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "as_message")

PLAIN = (
    "channel",
    "tenant",
    "idempotency_key",
    "model",
    "batch",
    "priority",
    "deadline_unix_ns",
    "traceparent",
    "tracestate",
    "echo",
    "client_reference",
)
"""Fields copied to the request as they are."""

SCALARS = (
    "n",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "include_stop_str_in_output",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "thinking_token_budget",
    "add_special_tokens",
)
"""Fields copied to the sampling parameters as they are."""

LISTS = ("stop_token_ids", "allowed_token_ids", "bad_words")
"""Fields whose items are copied to the sampling parameters."""

OTHER_NAMES = {
    "max_completion_tokens": "max_tokens",
    "prompt_ids": "prompt",
    "prompt_token_ids": "prompt",
    "text": "prompt",
    "token_ids": "prompt",
    "timeout": "deadline_s",
}
"""Names that other interfaces have for fields of this one, where the spelling alone would mislead."""

_WHOLE = {
    FieldDescriptor.TYPE_SINT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_SINT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}

WHOLE_NUMBERS = {
    field.name: _WHOLE[field.type]
    for message in (pb.Request, pb.SamplingParams)
    for field in message.DESCRIPTOR.fields
    if field.type in _WHOLE
}
"""The least and the most that each field of whole numbers, one or several, can hold."""

NO_LISTS = (str, bytes, bytearray, memoryview, Mapping, Set)
"""What gives items one by one and is no list: they would be a text's characters or bytes, keys, or in any order."""

MAX_DEADLINE_S = 100 * 365 * 86400.0
"""Far beyond any use, and far below where Unix time in ns leaves 64 bits."""

JSON_KINDS = ("json_schema", "structural_tag")
TEXT_KINDS = ("regex", "grammar")
STRUCTURE_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


def copied(message: pb.Request) -> pb.Request:
    """Return a message of our own to fill in: with our key in it, the caller's would never be another request again."""
    copy = pb.Request()
    copy.CopyFrom(message)
    return copy


def build_request(fields: RequestFields | Mapping[str, Any]) -> pb.Request:
    """Return the wire request; raises InvalidRequest naming the field if one is unknown or of the wrong type."""
    if not isinstance(fields, Mapping):
        text = f"request: must be fields by name, or a Request, not {type(fields).__name__}"
        raise InvalidRequest(text, "request", "invalid_type")
    for name in map(str, fields):
        if name not in FIELDS:
            raise InvalidRequest(_no_such_field(name), name, "unknown_field")
    given = {name: value for name, value in fields.items() if value is not None}
    request = pb.Request()
    _put_prompt(request, given)
    if "deadline_s" in given and "deadline_unix_ns" in given:
        raise InvalidRequest("deadline_s: deadline_unix_ns is given too; at most one is allowed", "deadline_s")
    for name, value in given.items():
        with _naming(name):
            SETTERS[name](request, name, value)
    return request


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Raise InvalidRequest naming the field for what protobuf says of the value it is given inside."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        if name not in WHOLE_NUMBERS:
            raise InvalidRequest(f"{name}: {error}", name, "invalid_type") from None
        least, most = WHOLE_NUMBERS[name]
        raise InvalidRequest(f"{name}: takes whole numbers from {least} to {most} ({error})", name) from None
    except (TypeError, AttributeError) as error:
        raise InvalidRequest(f"{name}: {error}", name, "invalid_type") from None


def _no_such_field(name: str) -> str:
    near = [OTHER_NAMES[name]] if name in OTHER_NAMES else get_close_matches(name, FIELDS, 1)
    return f"{name}: there is no such field" + (f"; did you mean {near[0]}?" if near else "")


def _put_prompt(request: pb.Request, given: dict[str, Any]) -> None:
    """Take the prompt and everything that shapes it out of `given`."""
    prompt, messages = given.pop("prompt", None), given.pop("messages", None)
    if (prompt is None) == (messages is None):
        raise InvalidRequest("prompt: exactly one of prompt and messages is needed", "prompt")
    if messages is not None:
        _put_chat(request, messages, given)
        return
    for name in CHAT_ONLY:
        if name in given:
            raise InvalidRequest(f"{name}: only a chat (messages) has it", name)
    try:
        if isinstance(prompt, str):
            request.text = prompt
        else:
            _extend(request.token_ids.ids, prompt)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"prompt: neither text nor token ids ({error})", "prompt", "invalid_type") from None
    # Only now: an array says of itself neither that it is empty nor that it is not.
    if not (request.text or request.token_ids.ids):
        raise InvalidRequest("prompt: is empty", "prompt")


def _put_chat(request: pb.Request, messages: Any, given: dict[str, Any]) -> None:
    chat = request.chat
    with _naming("messages"):
        chat.messages_json = _json("messages", messages)
    if "chat_template_kwargs" in given:
        with _naming("chat_template_kwargs"):
            chat.chat_template_kwargs_json = _json("chat_template_kwargs", given.pop("chat_template_kwargs"))
    with _naming("as_message"):
        if _wanted(given.pop("as_message", False)):
            chat.as_message.SetInParent()
    for name in ("chat_template", "continue_final_message", "add_generation_prompt", "add_special_tokens"):
        if name in given:
            with _naming(name):
                setattr(chat, name, given.pop(name))


def _wanted(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"is true or false, not {type(value).__name__}")
    return value


def _json(name: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest(f"{name}: is nested too deeply", name) from None
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name}: not JSON ({error})", name, "invalid_type") from None


def _plain(request: pb.Request, name: str, value: Any) -> None:
    setattr(request, name, value)


def _scalar(request: pb.Request, name: str, value: Any) -> None:
    setattr(request.sampling, name, value)


def _items(request: pb.Request, name: str, value: Any) -> None:
    _extend(getattr(request.sampling, name), value)


def _extend(items: Any, given: Any) -> None:
    """Add what is given to the items of a field; raises TypeError for what is no list or array of such."""
    if isinstance(given, NO_LISTS):
        raise TypeError(f"a list is needed, not {type(given).__name__}")
    items.extend(given)


def _deadline(request: pb.Request, name: str, value: float) -> None:
    # Written so that it refuses what is not a number as well.
    if not 0 < value <= MAX_DEADLINE_S:
        raise InvalidRequest(f"{name}: {value:g} s from now is no deadline: must be above 0 and below 100 years", name)
    request.deadline_unix_ns = time.time_ns() + int(value * 1e9)


def _stop(request: pb.Request, _name: str, value: Any) -> None:
    _extend(request.sampling.stop, [value] if isinstance(value, str) else value)


def _logit_bias(request: pb.Request, _name: str, value: Mapping[Any, Any]) -> None:
    for token_id, bias in value.items():
        request.sampling.logit_bias[int(token_id)] = bias


def _extra_args(request: pb.Request, name: str, value: Any) -> None:
    request.sampling.extra_args_json = _json(name, value)


def _structured(request: pb.Request, name: str, value: Mapping[str, Any]) -> None:
    target = request.sampling.structured_outputs
    kinds = 0
    for kind, constraint in value.items():
        if kind in STRUCTURE_OPTIONS:
            setattr(target, kind, constraint)
            continue
        kinds += 1
        if kind in JSON_KINDS:
            setattr(target, kind, constraint if isinstance(constraint, str) else _json(f"{name}.{kind}", constraint))
        elif kind in TEXT_KINDS:
            setattr(target, kind, constraint)
        elif kind == "choice":
            _extend(target.choice.values, constraint)
        elif kind == "json_object" and constraint is True:
            target.json_object = True
        else:
            raise InvalidRequest(f"{name}.{kind}: there is no such constraint", f"{name}.{kind}", "unknown_field")
    if kinds != 1:
        raise InvalidRequest(f"{name}: exactly one constraint is needed, got {kinds}", name)


SETTERS: dict[str, Callable[[pb.Request, str, Any], None]] = {
    **dict.fromkeys(PLAIN, _plain),
    **dict.fromkeys(SCALARS, _scalar),
    **dict.fromkeys(LISTS, _items),
    "deadline_s": _deadline,
    "stop": _stop,
    "logit_bias": _logit_bias,
    "extra_args": _extra_args,
    "structured_outputs": _structured,
}

FIELDS = frozenset(RequestFields.__annotations__)
"""Names of everything that can be said."""
