"""HTTP connections with bounds that uvicorn leaves open: heads, bodies nobody reads any more, answers nobody takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.limits import LINGER_S, MAX_HEAD_BYTES, WRITE_TIMEOUT_S

TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
"""RFC 6585, section 5."""


class Parting:
    """A connection as who answers on it sees it: to close it is to ask that it be closed when the body is here."""

    def __init__(self, transport: asyncio.Transport, leave: Callable[[], None]) -> None:
        """Have `leave` close `transport`."""
        self._transport = transport
        self.write = transport.write  # for each chunk of a stream
        self.close = leave

    def __getattr__(self, name: str) -> Any:
        """Leave the rest to the connection."""
        return getattr(self._transport, name)


class Parser(httptools.HttpRequestParser):
    """httptools' parser, which ends a request that offers another protocol (`Upgrade`) at its head: here it goes on.

    An offer may be passed over (RFC 9110, section 7.8), and clients make one with any request: Java's asks for `h2c`.
    """

    def __init__(self, protocol: BoundedProtocol) -> None:
        """Tell `protocol` what is parsed: heads with an offer again without it."""
        super().__init__(protocol)
        self._protocol = protocol
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own: a request may follow the last

    @property
    def offered(self) -> bool:
        """Whether the head that was parsed last is to be parsed again."""
        return self.should_upgrade() and self.get_method() != b"CONNECT"

    def feed_data(self, data: bytes | memoryview) -> None:  # type: ignore[override]  # all that is fed here
        """Parse; raises httptools' errors."""
        left = memoryview(data)
        while left:
            try:
                super().feed_data(left)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self.offered:
                    raise
                (end,) = upgrade.args
                left = left[end:]
                super().feed_data(self._protocol.plain_head())


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A head that is late or too large ends it; so does a body that goes on after its answer.

    So does a client that takes nothing of its answer: whoever writes it finds the client gone. Timed here, where it is
    known that the client is behind, it costs the chunks of a stream nothing.

    While a body is still coming nobody closes it: with bytes unread it would be reset, and the answer be lost.
    """

    head_timeout_s = 10.0
    """Set once by whoever starts the server: uvicorn makes the instances."""
    write_timeout_s = WRITE_TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what uvicorn gives."""
        super().__init__(*args, **kwargs)
        self.parser: Parser = Parser(self)
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_head = True
        self._in_body = False
        self._parting = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Expect a head."""
        super().connection_made(transport)
        self._close_in(self.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers, and what of a body has not been read: nobody will, and what is left here is a cycle."""
        self._disarm()
        self._taken()
        super().connection_lost(exc)
        if self.cycle is not None:
            self.cycle.body.clear()

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
        if self.parser.offered:
            return
        self._disarm()
        self._in_head, self._in_body = False, True
        if self._parting:
            return  # nobody asked for more on a connection that is to be closed
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self.cycle.transport = Parting(self.transport, self._leave)  # type: ignore[assignment]  # all it calls of one

    def on_message_complete(self) -> None:
        """The body is here; what comes next is a head."""
        if self.parser.offered:
            return
        self._disarm()
        self._in_head, self._in_body = True, False
        self._head_bytes = 0
        super().on_message_complete()
        if self._parting:
            self._close()

    def plain_head(self) -> bytes:
        """Return the head that was parsed last, without an offer of another protocol."""
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_response_complete(self) -> None:
        """Give a body that is still coming a while: its sender may only read the answer after it."""
        if self._parting:
            self.pipeline.clear()
        super().on_response_complete()
        if self._in_body and not self.transport.is_closing():
            self._close_in(LINGER_S)

    def pause_writing(self) -> None:
        """Expect the client to take what was written: more than the transport's high-water mark is unsent."""
        super().pause_writing()
        # Not closed: that would wait for the unsent bytes.
        self._unread = self.loop.call_later(self.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It has taken some."""
        self._taken()
        super().resume_writing()

    def _leave(self) -> None:
        """Close once the body is here, or does not come."""
        self._parting = True
        if self._in_body:
            self._close_in(LINGER_S)
        else:
            self._close()

    def _taken(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

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
