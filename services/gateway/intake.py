"""Bodies on their way in: read within bounds of size and time, parsed strictly."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from starlette.types import Receive

from penstock.openai.pieces import excess
from penstock.openai.speakable import UNSPEAKABLE, unspeakable_field
from services.gateway.limits import MAX_BODIES_BYTES, MAX_BODY_BYTES, RETRY_AFTER_S
from services.gateway.pace import LARGE_BYTES, give_way
from services.gateway.problem import Problem
from services.gateway.shares import Body, Shares

CLOSE = {"connection": "close"}
"""For answers to clients whose next bytes would not be a request."""

NOBODYS = ""
"""Bodies that no tenant sends, but who runs the fleet: they share as those of a tenant do."""


class ClientGoneError(Exception):
    """Nobody is there to be answered."""


class Held:
    """Bytes of one body that count against the bound of all bodies until they are let go of."""

    def __init__(self, body: Body | None) -> None:
        """Hold what `body` has; None: nothing any more."""
        self._body = body

    def add(self, size_bytes: int) -> None:
        """Hold `size_bytes` more; raises Problem if all bodies together, or the tenant's, would be too large."""
        if self._body is not None and not self._body.take(size_bytes):
            retry = {**CLOSE, "retry-after": str(RETRY_AFTER_S)}
            raise Problem(503, "too many large bodies are being sent at once", "", "overloaded", retry)

    def pass_on(self) -> Held:
        """Return who holds it from now on."""
        other, self._body = Held(self._body), None
        return other

    def let_go(self) -> None:
        """Hold nothing any more."""
        if self._body is not None:
            self._body.give()


class Intake:
    """Reads bodies; all that are held at once share one bound on memory, and large ones are parsed one at a time."""

    def __init__(self, timeout_s: float) -> None:
        """Give a body `timeout_s` seconds to arrive."""
        self._timeout_s = timeout_s
        self._shares = Shares(MAX_BODIES_BYTES)
        self._parsing = asyncio.Lock()

    @property
    def held_bytes(self) -> int:
        """Of all bodies."""
        return self._shares.had_bytes

    @contextmanager
    def holding(self, tenant: str = NOBODYS) -> Iterator[Held]:
        """Let go of what is held of a tenant's body at the end, if not before."""
        held = Held(Body(self._shares, tenant))
        try:
            yield held
        finally:
            held.let_go()

    async def read(self, headers: Mapping[str, str], receive: Receive, tenant: str = NOBODYS) -> dict[str, Any]:
        """Return the JSON object that is a tenant's body. Raises Problem, or ClientGoneError."""
        with self.holding(tenant) as held:
            return await self.read_held(headers, receive, held)

    async def read_held(self, headers: Mapping[str, str], receive: Receive, held: Held) -> dict[str, Any]:
        """Return the JSON object that is the body, whose bytes count until `held` lets go. Raises as `read` does."""
        check_uncompressed(headers)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Problem(415, f"content-type: must be application/json, got {kind[:40]!r}", "", "unsupported_media")
        announced = headers.get("content-length", "0")
        if not announced.isdecimal() or int(announced) > MAX_BODY_BYTES:
            raise _too_large()
        data = bytearray()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._fill(data, receive, held)
        except TimeoutError:
            text = f"the body took longer than {self._timeout_s:g} s"
            raise Problem(408, text, "", "request_timeout", CLOSE) from None
        return await self._parsed(data)

    async def _parsed(self, data: bytearray) -> dict[str, Any]:
        if len(data) < LARGE_BYTES:
            return parse_object(data)
        async with self._parsing:
            since_s = time.monotonic()
            try:
                return parse_object(data)
            finally:
                await give_way(len(data), since_s)

    async def _fill(self, data: bytearray, receive: Receive, held: Held) -> None:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part = message.get("body", b"")
            if len(data) + len(part) > MAX_BODY_BYTES:
                raise _too_large()
            held.add(len(part))
            data += part
            more = message.get("more_body", False)


def check_uncompressed(headers: Mapping[str, str]) -> None:
    """Raise Problem for a body that is compressed: its size says nothing of what it takes."""
    coding = headers.get("content-encoding", "").strip().lower()
    if coding not in {"", "identity"}:
        text = f"content-encoding: bodies are taken as they are, not compressed, got {coding[:40]!r}"
        raise Problem(415, text, "content-encoding", "unsupported_media", {"accept-encoding": "identity"})


def parse_object(data: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object in `data`; raises Problem."""
    if much := excess(data):
        raise Problem(413, f"the body has {much}", "", "body_too_large")
    try:
        found = json.loads(data.decode("utf-8-sig"), parse_constant=_no_constant)
        field = unspeakable_field(data, found) if isinstance(found, dict) else None
    except (ValueError, RecursionError) as error:
        raise Problem(400, f"the body is not JSON: {error}", "", "invalid_json") from None
    if not isinstance(found, dict):
        raise Problem(400, "the body must be a JSON object", "", "invalid_json")
    if field is not None:
        raise Problem(400, f"{field}: {UNSPEAKABLE}", field, "invalid_value")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _too_large() -> Problem:
    return Problem(413, f"the body is larger than {MAX_BODY_BYTES} bytes", "", "body_too_large")
