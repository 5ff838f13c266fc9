"""What a submitted request may look like. Each check names the field it is about, and the first that fails counts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from typing import Any, cast

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from penstock.limits import MAX_NAME_BYTES, MAX_REQUEST_BYTES
from penstock.openai.limits import MAX_ENTRIES, MAX_STOP_STRINGS
from penstock.openai.pieces import pieces_of
from penstock.openai.speakable import UNSPEAKABLE, unspeakable_field
from penstock.request.v1 import request_pb2
from services.queue.core.entry import Failure, RequestMeta
from services.quoting import shown
from services.rpc.strict import BadInputError

EARLIEST_NS = 10**17
"""Of deadlines, in 1973: what is below it is meant in another unit, as microseconds are until the year 5138."""

MAX_REFERENCE_BYTES = 4096
"""Of client_reference: it is kept in memory while the request lives."""

MAX_COMPLETIONS = 16384
"""Of `n`: vLLM's own bound on the sequences of one request."""

MAX_BAD_WORDS_BYTES = 65_536
"""Of all bad words together: vLLM tokenizes each twice on the worker's own loop, a tenth of a second for so many."""

MAX_STOP_STRINGS_BYTES = 4096
"""Of all stop strings together: vLLM looks for each of them at every token, on the loop that all runs share."""

MAX_JSON_PIECES = 131_072
"""Strings, commas and opening brackets of one JSON text: to make objects of them takes the loop a tenth of a second,
and 20 MiB. A conversation of 10,000 messages that have a part each has as many; 12 MiB could hold four million."""

MAX_LISTED_BYTES = 65_536
"""Of a request whose unknown fields are listed: to list those of 12 MiB takes seconds of the loop."""

MAX_UNKNOWN_NAMED = 10
"""Of the unknown fields of a request: each takes two bytes, and a refusal that named them all could not be sent."""

_MOST: dict[str, int] = {
    "stop": MAX_STOP_STRINGS,
    "logit_bias": MAX_ENTRIES,
    "stop_token_ids": MAX_ENTRIES,
    "allowed_token_ids": MAX_ENTRIES,
    "bad_words": MAX_ENTRIES,
}
"""Entries that a field may have; 12 MiB have room for millions, each of which would be looked at."""

_RANGES: dict[str, tuple[float, float, bool]] = {
    # least, most, whether the least itself is excluded
    "n": (1, MAX_COMPLETIONS, False),
    "max_tokens": (1, math.inf, False),
    "temperature": (0, math.inf, False),
    "top_p": (0, 1, True),
    "top_k": (-1, math.inf, False),
    "min_p": (0, 1, False),
    "presence_penalty": (-2, 2, False),
    "frequency_penalty": (-2, 2, False),
    "repetition_penalty": (0, math.inf, True),
    "logprobs": (-1, math.inf, False),
    "prompt_logprobs": (-1, math.inf, False),
}


class InvalidRequestError(Exception):
    """A request was refused; `failure` says why."""

    def __init__(self, param: str, message: str, code: str = "invalid_request") -> None:
        """Refuse because of the field `param`."""
        super().__init__(f"{param}: {message}")
        self.failure = Failure(code, f"{param}: {message}", param)


def check(request: request_pb2.Request, meta: RequestMeta, channels: Collection[str]) -> None:
    """Raise InvalidRequestError if `request`, whose channel is filled in and of which `meta` tells, is not acceptable.

    What `meta` has is not read from the message again: reading a field of it takes ten times as long.
    """
    if meta.payload_bytes > MAX_REQUEST_BYTES:
        text = f"{meta.payload_bytes} bytes encoded; at most {MAX_REQUEST_BYTES} are allowed"
        raise InvalidRequestError("request", text)
    if request.request_id:
        raise InvalidRequestError("request_id", "must be empty on submit; the queue gives the name")
    if meta.channel not in channels:
        known = ", ".join(sorted(channels))
        raise InvalidRequestError("channel", f"{shown(meta.channel)} is unknown; known: {known}", "unknown_channel")
    _check_sizes(meta)
    _check_deadline(meta.deadline_ns)
    kind = request.WhichOneof("prompt")
    _check_prompt(request, kind)
    sampling = request.sampling
    _check_sampling(sampling)
    # Of a text these are all messages that can be in it: to look at both is cheaper than the copy that looks at all.
    plain = kind == "text" and not sampling.HasField("structured_outputs") and meta.payload_bytes <= MAX_LISTED_BYTES
    if not plain or len(UnknownFieldSet(request)) or len(UnknownFieldSet(sampling)):
        _check_unknown(request, meta.payload_bytes)


def _check_sizes(meta: RequestMeta) -> None:
    _check_size("tenant", meta.tenant, MAX_NAME_BYTES)
    _check_size("idempotency_key", meta.idempotency_key, MAX_NAME_BYTES)
    _check_size("model", meta.model, MAX_NAME_BYTES)
    _check_size("batch", meta.batch, MAX_NAME_BYTES)
    _check_size("client_reference", meta.client_reference, MAX_REFERENCE_BYTES)


def _check_size(name: str, text: str, most_bytes: int) -> None:
    # A string has at least as many bytes as characters: short ones need no encoding to know.
    if len(text) * 4 > most_bytes and len(text.encode()) > most_bytes:
        raise InvalidRequestError(name, f"{len(text.encode())} bytes; at most {most_bytes} are allowed")


def check_name(param: str, text: str) -> None:
    """Raise BadInputError if `text` is too long to name anything in the queue."""
    if len(text.encode()) > MAX_NAME_BYTES:
        raise BadInputError(f"{param}: {len(text.encode())} bytes; at most {MAX_NAME_BYTES} are allowed")


def _check_deadline(deadline_ns: int) -> None:
    """Refuse what is no time. One that has passed is: that of a submit which is repeated after its ack was lost."""
    if deadline_ns < 0:
        raise InvalidRequestError("deadline_unix_ns", f"{deadline_ns} is negative")
    if 0 < deadline_ns < EARLIEST_NS:
        raise InvalidRequestError("deadline_unix_ns", f"{deadline_ns} is long ago; the unit is nanoseconds since 1970")


def _check_prompt(request: request_pb2.Request, kind: str | None) -> None:
    if kind is None:
        raise InvalidRequestError("prompt", "exactly one of text, token_ids and chat must be set")
    if kind == "token_ids" and not request.token_ids.ids:
        raise InvalidRequestError("token_ids.ids", "at least one token is needed")
    if kind == "chat":
        _check_chat(request.chat)
        if request.echo:
            raise InvalidRequestError("echo", "is for completions; a chat prompt cannot be echoed")


def _check_chat(chat: request_pb2.ChatPrompt) -> None:
    _check_objects("chat.messages_json", chat.messages_json)
    _check_object("chat.chat_template_kwargs_json", chat.chat_template_kwargs_json)
    if chat.HasField("tools"):
        _check_tools(chat.tools)


def _check_tools(tools: request_pb2.ToolUse) -> None:
    _check_objects("chat.tools.tools_json", tools.tools_json)
    if tools.tool_choice_json:
        choice = _json("chat.tools.tool_choice_json", tools.tool_choice_json)
        if not isinstance(choice, str | dict):
            raise InvalidRequestError("chat.tools.tool_choice_json", "must be a JSON string or object")


def _check_sampling(sampling: request_pb2.SamplingParams) -> None:
    for field, value in sampling.ListFields():
        name = field.name
        bounds = _RANGES.get(name)
        if bounds is not None:
            _check_range(name, value, *bounds)
            continue
        most = _MOST.get(name)
        if most is not None and len(value) > most:
            raise InvalidRequestError(f"sampling.{name}", f"at most {most} entries, got {len(value)}")
        if (check_field := _OTHERS.get(name)) is not None:
            check_field(sampling)


def _check_min_tokens(sampling: request_pb2.SamplingParams) -> None:
    if sampling.HasField("max_tokens") and sampling.min_tokens > sampling.max_tokens:
        text = f"{sampling.min_tokens} is more than max_tokens ({sampling.max_tokens})"
        raise InvalidRequestError("sampling.min_tokens", text)


def _check_logit_bias(sampling: request_pb2.SamplingParams) -> None:
    for token_id, bias in sampling.logit_bias.items():
        _check_range(f"logit_bias[{token_id}]", bias, -100, 100, False)


def _check_stop(sampling: request_pb2.SamplingParams) -> None:
    if "" in sampling.stop:
        raise InvalidRequestError("sampling.stop", "a stop string cannot be empty")
    size_bytes = sum(len(text.encode()) for text in sampling.stop)
    if size_bytes > MAX_STOP_STRINGS_BYTES:
        text = f"{size_bytes} bytes in all; at most {MAX_STOP_STRINGS_BYTES} are allowed"
        raise InvalidRequestError("sampling.stop", text)


def _check_bad_words(sampling: request_pb2.SamplingParams) -> None:
    size_bytes = sum(len(word.encode()) for word in sampling.bad_words)
    if size_bytes > MAX_BAD_WORDS_BYTES:
        text = f"{size_bytes} bytes in all; at most {MAX_BAD_WORDS_BYTES} are allowed"
        raise InvalidRequestError("sampling.bad_words", text)


def _check_extra_args(sampling: request_pb2.SamplingParams) -> None:
    _check_object("sampling.extra_args_json", sampling.extra_args_json)


def _check_truncation(sampling: request_pb2.SamplingParams) -> None:
    most = sampling.truncate_prompt_tokens
    if most != -1 and most < 1:
        text = f"{most} is out of range: must be at least 1, or -1 for the model's window"
        raise InvalidRequestError("sampling.truncate_prompt_tokens", text)


def _check_structured_outputs(sampling: request_pb2.SamplingParams) -> None:
    _check_structured(sampling.structured_outputs)


_OTHERS: dict[str, Callable[[request_pb2.SamplingParams], None]] = {
    "min_tokens": _check_min_tokens,
    "logit_bias": _check_logit_bias,
    "stop": _check_stop,
    "bad_words": _check_bad_words,
    "extra_args_json": _check_extra_args,
    "structured_outputs": _check_structured_outputs,
    "truncate_prompt_tokens": _check_truncation,
}


def _check_range(field: str, value: float, least: float, most: float, open_ended: bool) -> None:
    # What is not a number is on no side of anything.
    if (least < value if open_ended else least <= value) and value <= most and value != math.inf:
        return
    bounds = [f"above {least:.15g}" if open_ended else f"at least {least:.15g}"]
    if math.isfinite(most):
        bounds.append(f"at most {most:.15g}")
    text = f"{value:.15g} is out of range: must be {' and '.join(bounds)}"
    raise InvalidRequestError(f"sampling.{field}", text)


def _check_structured(outputs: request_pb2.StructuredOutputs) -> None:
    param = "sampling.structured_outputs"
    kind = outputs.WhichOneof("kind")
    if kind is None:
        raise InvalidRequestError(param, "exactly one kind must be set")
    if kind == "json_object" and not outputs.json_object:
        raise InvalidRequestError(f"{param}.json_object", "must be true if it is set")
    if kind == "choice" and not outputs.choice.values:
        raise InvalidRequestError(f"{param}.choice.values", "at least one string is needed")
    if kind in {"json_schema", "structural_tag"}:
        _json(f"{param}.{kind}", getattr(outputs, kind))


def _json(param: str, text: str, parse_int: Callable[[str], int] | None = None) -> Any:
    """Return what `text` says; what no message could repeat is refused here, before a worker has to quote it."""
    data = text.encode()
    if len(data) > MAX_JSON_PIECES and sum(pieces_of(data, MAX_JSON_PIECES)) > MAX_JSON_PIECES:
        raise InvalidRequestError(param, f"has more than {MAX_JSON_PIECES} strings, commas and opening brackets")
    try:
        found = json.loads(text, parse_int=parse_int)
        speakable = unspeakable_field(data, {param: found}) is None
    except RecursionError:
        raise InvalidRequestError(param, "is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequestError(param, f"is not JSON: {error}") from None
    if not speakable:
        raise InvalidRequestError(param, UNSPEAKABLE)
    return found


def _check_objects(param: str, text: str) -> None:
    found = _json(param, text)
    objects = isinstance(found, list) and all(isinstance(entry, dict) for entry in found)
    if not found or not objects:
        raise InvalidRequestError(param, "must be a JSON array of at least one object")


def _check_object(param: str, text: str) -> None:
    """Refuse what is no object that can be handed to an engine as it is: MessagePack has integers of 64 bits."""

    def bounded(digits: str) -> int:
        value = int(digits)
        if not -(2**63) <= value < 2**64:
            raise InvalidRequestError(param, "has an integer that is not between -2**63 and 2**64 - 1")
        return value

    if text and not isinstance(_json(param, text, bounded), dict):
        raise InvalidRequestError(param, "must be a JSON object")


def _check_unknown(request: request_pb2.Request, size_bytes: int) -> None:
    """Refuse fields this version does not know: dropping them would change what was asked for."""
    known = request_pb2.Request()
    known.CopyFrom(request)
    known.DiscardUnknownFields()  # type: ignore[no-untyped-call,unused-ignore]
    if known.ByteSize() == size_bytes:
        return
    listed = unknown_fields(request) if size_bytes <= MAX_LISTED_BYTES else ()
    names = ", ".join(islice(listed, MAX_UNKNOWN_NAMED)) or "inside a submessage, or too many to name"
    raise InvalidRequestError("request", f"has fields this queue does not know: {names}", "unknown_field")


def unknown_fields(message: Message, path: str = "") -> Iterator[str]:
    """Yield the unknown fields of `message` and of the messages in it, as dotted paths that end in a number."""
    for unknown in cast(Iterable[Any], UnknownFieldSet(message)):
        yield f"{path}{unknown.field_number}"
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None or descriptor.message_type.GetOptions().map_entry:
            continue
        for inner in value if descriptor.is_repeated else (value,):
            yield from unknown_fields(inner, f"{path}{descriptor.name}.")
