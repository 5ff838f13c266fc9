"""HTTP connections with bounds that uvicorn leaves open.

Of heads, of requests sent ahead of an answer, of bodies nobody reads any more, of answers nobody takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.limits import AHEAD_S, LINGER_S, MAX_AHEAD_BYTES, MAX_HEAD_BYTES, WRITE_TIMEOUT_S
from services.gateway.taking import Taking
from services.gateway.unparsed import Unparsed

TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
"""RFC 6585, section 5."""

MAX_LOOKS = 32
"""Pieces parsed at once: each empty line of a body in chunks may be its end and costs one, and it may be full of them.
All else has its turn before the next ones."""


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
        """Parse a piece that ends with a head, if one ends in it; raises httptools' errors."""
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade:
            if not self.offered:
                raise
            self._protocol.pass_over()


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A head that is late or too large ends it; so does a body that goes on after its answer.

    Nothing is parsed behind a request that is not answered: it is held, so that `cycle` is always the request that is
    answered and hears of a hang-up. To notice one the connection is read on, up to a bound. Reading pauses beyond it,
    and the connection ends if the answer takes long: nobody would see its client go.

    So does a client that takes next to nothing of its answer: whoever writes it finds the client gone. Timed here,
    where it is known that the client is behind, it costs the chunks of a stream nothing. What is unsent when the
    connection is closed is timed as well: the transport would wait for it.

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
        self._taking: Taking
        self._unparsed = Unparsed()
        self._again: asyncio.Handle | None = None
        self._head_bytes = 0
        """Of a head, or between chunks of a body and behind the last, until there is more of it."""
        self._left_bytes: int | None = None
        self._in_body = False
        self._waits = False
        self._holds_much = False
        self._parting = False
        self._ends = False
        """Whether nothing more is to be written than is unsent: the connection closes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Expect a head."""
        super().connection_made(transport)
        self._taking = Taking(self.loop, transport, self.write_timeout_s)
        self._close_in(self.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers, and what of a body has not been read: nobody will, and what is left here is a cycle."""
        self._disarm()
        self._taking.stop()
        self._unparsed = Unparsed()
        super().connection_lost(exc)
        if self.cycle is not None:
            self.cycle.body.clear()

    def data_received(self, data: bytes) -> None:
        """Parse it, or hold it until the request before it is answered."""
        self._unparsed.add(data)
        self._go_on()

    def on_message_begin(self) -> None:
        """Expect the rest of the head soon."""
        super().on_message_begin()
        self._close_in(self.head_timeout_s)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field of the head; those behind a body in chunks are dropped (RFC 9110, section 6.5.1)."""
        if not self._in_body:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Take some of a body."""
        self._head_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """The head is here."""
        if self.parser.offered:
            return
        self._disarm()
        self._in_body = True
        self._head_bytes = 0
        self._left_bytes = _length(self.headers)
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self.cycle.transport = Parting(self.transport, self._leave)  # type: ignore[assignment]  # all it calls of one

    def on_message_complete(self) -> None:
        """The body is here; what comes next is a head."""
        if self.parser.offered:
            return
        self._disarm()
        self._in_body = False
        self._left_bytes = None
        self._head_bytes = 0
        super().on_message_complete()
        self._waits = not self.cycle.response_complete
        if self._parting:
            self._close()

    def pass_over(self) -> None:
        """Parse the last head again, without its offer of another protocol.

        By a parser of its own: the other takes the connection for over where the head does not ask to keep it.
        """
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
        self.parser = Parser(self)
        self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    def on_response_complete(self) -> None:
        """Go on with what was sent ahead. Give a body that is still coming a while: its sender may read only then."""
        self._waits = False
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._in_body:
            self._close_in(LINGER_S)
        elif self._unparsed.held_bytes:
            self._disarm()
            self._go_on()

    def pause_writing(self) -> None:
        """Expect the client to take what was written: more than the transport's high-water mark is unsent."""
        super().pause_writing()
        self._taking.watch()

    def resume_writing(self) -> None:
        """It has taken all but a little, which it is still to take if the connection is closing."""
        if not self._ends and not self.transport.is_closing():
            self._taking.stop()
        super().resume_writing()

    def eof_received(self) -> None:
        """The client sends no more: the transport closes."""
        super().eof_received()
        self._expect_rest()

    def shutdown(self) -> None:
        """Close once what is open is answered: the server stops."""
        super().shutdown()
        if self.transport.is_closing():
            self._expect_rest()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing came for long."""
        self._close()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request."""
        super().send_400_response(msg)
        self._expect_rest()

    def _go_on(self) -> None:
        """Parse what is held. Read no more as long as that leaves too much."""
        for _ in range(MAX_LOOKS):
            if not self._parse_piece():
                break
        else:
            self._again = self._again or self.loop.call_soon(self._go_on_again)
        if self.transport.is_closing():
            return
        if self._unparsed.held_bytes > MAX_AHEAD_BYTES:
            self._holds_much = True
            self.transport.pause_reading()
            if self._waits:
                self._close_in(AHEAD_S)
        elif self._holds_much:
            self._holds_much = False
            if not self.flow.read_paused:
                self.transport.resume_reading()
        if not (self._waits or self._in_body or self._timer or self.timeout_keep_alive_task):
            self._close_in(self.timeout_keep_alive)

    def _go_on_again(self) -> None:
        self._again = None
        self._go_on()

    def _parse_piece(self) -> bool:
        """Parse a piece, unless a request is not answered; return whether there may be more."""
        if self._waits or self.transport.is_closing():
            return False
        piece = self._unparsed.take(self._left_bytes)
        if not piece:
            return False
        if self._left_bytes is None:
            self._head_bytes += len(piece)
        else:
            self._left_bytes -= len(piece)
        if not self._in_body and self._head_bytes > MAX_HEAD_BYTES:
            self.transport.write(TOO_LARGE)
            self._close()
            return False
        super().data_received(piece)  # type: ignore[arg-type]  # all it does with it is to feed the parser
        if self._in_body and self._head_bytes > MAX_HEAD_BYTES:
            self.transport.abort()
        return True

    def _leave(self) -> None:
        """Close once the body is here, or does not come."""
        self._parting = True
        if self._in_body:
            self._close_in(LINGER_S)
        else:
            self._close()

    def _close_in(self, delay_s: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(delay_s, self._close)

    def _close(self) -> None:
        self._disarm()
        if not self.transport.is_closing():
            self.transport.close()
            self._expect_rest()

    def _expect_rest(self) -> None:
        """Expect the client to take what was unsent when the connection was closed.

        Of one over TLS the transport does not tell whether that is any: another below it has what is encrypted.
        """
        self._ends = True
        if self.scheme == "https" or self.transport.get_write_buffer_size():
            self._taking.watch()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _length(headers: list[tuple[bytes, bytes]]) -> int | None:
    """Return the length of the body, in bytes, if the head says so: the parser has refused what is none."""
    for name, value in headers:
        if name == b"content-length":
            return int(value)
    return None
