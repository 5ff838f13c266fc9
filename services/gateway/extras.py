"""What a client can say of its request in headers, beside OpenAI's body."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.limits import MAX_NAME_BYTES
from penstock.request.v1 import request_pb2 as pb
from penstock.trace_context import parent_of, state_of
from services.gateway.problem import Problem

PREFIX = "x-penstock-"
CHANNEL = "x-penstock-channel"
PRIORITY = "x-penstock-priority"
DEADLINE = "x-penstock-deadline-ms"
KEEP = "x-penstock-keep"
KNOWN = (CHANNEL, PRIORITY, DEADLINE, KEEP)

PREFER = "prefer"
RESPOND_ASYNC = "respond-async"
"""The one preference (RFC 7240) that means something here: its client asks for the answer later, by the id."""

MAX_DEADLINE_MS = 100 * 365 * 86_400_000
"""A hundred years: far beyond any use, and far below where Unix time in ns leaves 64 bits."""

MAX_DIGITS = 15
"""Of a number in a header: enough for MAX_DEADLINE_MS, few enough to be read at once."""

PRIORITY_BOUND = 2**31
"""Priorities are 32-bit integers."""

OURS = re.compile(r"(?:batch_[0-9a-f]{32}|several-[0-9a-f]{32}|rb-[0-9a-f]{16}(?:-[0-9a-f]{16})?):")
"""How the keys begin that batches, bodies with several prompts and `penstock run-batch` give their requests: one of a
client's would be taken for theirs, and answered in their place."""


@dataclass(frozen=True, slots=True)
class Extras:
    """The headers of one request that mean something here."""

    channel: str = ""
    priority: int | None = None
    deadline_ms: int | None = None
    """From the arrival of the request."""
    respond_async: bool = False
    """The id is all that is to be answered, at once."""
    idempotency_key: str = ""
    keep: bool = False
    """The request goes on if the client goes away."""
    traceparent: str = ""
    tracestate: str = ""

    def put_into(self, request: pb.Request, now_ns: int) -> None:
        """Write what was said into `request`; a header wins over the body's field."""
        request.channel = self.channel
        request.idempotency_key = self.idempotency_key
        if self.priority is not None:
            request.priority = self.priority
        if self.deadline_ms is not None:
            request.deadline_unix_ns = now_ns + self.deadline_ms * 1_000_000


def read_extras(headers: Iterable[tuple[str, str]]) -> Extras:
    """Return the extras among `headers` (names in lower case); raises Problem naming a wrong one."""
    headers = list(headers)
    given = dict(headers)
    for name in given:
        if name.startswith(PREFIX) and name not in KNOWN:
            raise _refusal(name, f"there is no such header; known: {', '.join(KNOWN)}", "unknown_parameter")
    key = given.get("idempotency-key", "")
    if len(key.encode()) > MAX_NAME_BYTES:
        raise _refusal("idempotency-key", f"at most {MAX_NAME_BYTES} bytes are allowed")
    if OURS.match(key):
        raise _refusal("idempotency-key", "keys of this form are those of the lines of batches and of several prompts")
    keep = given.get(KEEP, "false").lower()
    if keep not in {"true", "false"}:
        raise _refusal(KEEP, f"must be true or false, got {keep[:40]!r}")
    traceparent = parent_of(given.get("traceparent", ""))
    return Extras(
        given.get(CHANNEL, ""),
        _number(given, PRIORITY, -PRIORITY_BOUND, PRIORITY_BOUND - 1),
        _number(given, DEADLINE, 1, MAX_DEADLINE_MS),
        _prefers_async(value for name, value in headers if name == PREFER),
        key,
        keep == "true" or bool(key),
        traceparent,
        state_of(given.get("tracestate", "")) if traceparent else "",
    )


def _prefers_async(values: Iterable[str]) -> bool:
    """Return whether one of the preferences in these headers is RESPOND_ASYNC; others are passed over."""
    preferences = ",".join(values).split(",")
    return any(preference.partition(";")[0].strip().lower() == RESPOND_ASYNC for preference in preferences)


def _number(given: dict[str, str], name: str, least: int, most: int) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if re.fullmatch(rf"-?[0-9]{{1,{MAX_DIGITS}}}", text) is None or not least <= int(text) <= most:
        raise _refusal(name, f"must be a whole number from {least} to {most}, got {text[:40]!r}")
    return int(text)


def _refusal(name: str, text: str, code: str = "invalid_value") -> Problem:
    return Problem(400, f"{name}: {text}", name, code)
