"""HTTP connections with bounds that uvicorn leaves open: the head of a request, and a body nobody reads any more."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.limits import LINGER_S, MAX_HEAD_BYTES

TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
"""RFC 6585, section 5."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A head that is late or too large ends it; so does a body that goes on after its answer."""

    head_timeout_s = 10.0
    """Set once by whoever starts the server: uvicorn makes the instances."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what uvicorn gives."""
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_head = True
        self._in_body = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Expect a head."""
        super().connection_made(transport)
        self._close_in(self.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count the bytes of a head, then parse."""
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        """Expect the rest of the head soon."""
        super().on_message_begin()
        if self._timer is None:
            self._close_in(self.head_timeout_s)

    def on_headers_complete(self) -> None:
        """The head is here."""
        self._disarm()
        self._in_head, self._in_body = False, True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is here; what comes next is a head."""
        self._disarm()
        self._in_head, self._in_body = True, False
        self._head_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Give a body that is still coming a while: its sender may only read the answer after it."""
        super().on_response_complete()
        if self._in_body and not self.transport.is_closing():
            self._close_in(LINGER_S)

    def _close_in(self, delay_s: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(delay_s, self._close)

    def _close(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
