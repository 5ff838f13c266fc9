"""A response whose body is made while it is sent, for a client that may leave, stall, or read for hours."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.errors import Unauthenticated
from services.gateway.doorman import authorization_of
from services.gateway.hangup import until_hangup
from services.gateway.intake import ClientGoneError
from services.gateway.vigil import Vigil

PIECE_BYTES = 64 * 1024
"""Small pieces of a body are sent together up to this size."""


class Download(Response):
    """Sends what `parts` yields. If that fails the connection is broken off, so that no client takes it for the end."""

    def __init__(
        self,
        parts: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        vigil: Vigil,
        size_bytes: Callable[[], int] | None = None,
    ) -> None:
        """Begin the body only when the first part is there: what fails before it has a status of its own.

        `vigil` breaks it off when the client's key is no longer good. `size_bytes` says then how large the body is; it
        may be told in `headers` too, or not at all.
        """
        super().__init__(headers=headers)
        del self.headers["content-length"]
        for name, value in headers.items():
            self.headers[name] = value
        self._parts = parts
        self._vigil = vigil
        self._size_bytes = size_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        begun = False
        try:
            with suppress(ClientGoneError), self._vigil.over(authorization_of(scope)):
                async with until_hangup(receive), aclosing(gathered(self._parts)) as pieces:
                    first = await anext(pieces, b"")
                    begun = True
                    if self._size_bytes is not None:
                        self.headers["content-length"] = str(self._size_bytes())
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    if scope["method"] != "HEAD":
                        await send({"type": "http.response.body", "body": first, "more_body": True})
                        async for piece in pieces:
                            await send({"type": "http.response.body", "body": piece, "more_body": True})
                    await send({"type": "http.response.body", "body": b""})
        except Unauthenticated:
            # Of an answer that has begun there is no other end than none, upon which the server hangs up.
            if not begun:
                raise


async def gathered(parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield small parts together."""
    held = bytearray()
    async with aclosing(parts):
        async for part in parts:
            held += part
            if len(held) >= PIECE_BYTES:
                piece = bytes(held)
                held.clear()  # before it is waited for that the client takes it
                yield piece
    if held:
        yield bytes(held)
