"""How connections end: whose client takes nothing of its answer, and whose body still comes when it has it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from services.gateway.limits import WRITE_TIMEOUT_S
from services.gateway.protocol import BoundedProtocol
from services.gateway.server import Server

PIECE = b"x" * 65_536
PIECES = 512
"""More than the kernel's buffers of both ends and the transport's own hold together."""


class ImpatientProtocol(BoundedProtocol):
    """Waits a moment instead of a minute."""

    write_timeout_s = 0.2


class Sender:
    """An application that sends PIECES, and listens for the client's hang-up meanwhile."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # the request
        listening = asyncio.create_task(self._listen(receive))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(PIECES):
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        await listening

    async def _listen(self, receive: Receive) -> None:
        await receive()
        self.gone.set()


class Refuser:
    """An application that refuses whatever comes without a look at its body."""

    def __init__(self) -> None:
        self.asked = 0

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        self.asked += 1
        headers = [(b"content-length", b"2"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b"no"})


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[tuple[str, int]]:
    """Serve `app`; yield its address."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = Server(uvicorn.Config(app, http=ImpatientProtocol, ws="none", lifespan="off", log_config=None))
    serving = asyncio.create_task(server.serve([listening]))
    try:
        yield listening.getsockname()
    finally:
        server.should_exit = True
        await serving


@asynccontextmanager
async def asked(app: Sender) -> AsyncIterator[None]:
    """Serve `app` to a client that asks and reads nothing."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        async with served(app) as address:
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, address)
            await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            yield
            client.close()


def test_a_client_that_takes_nothing_has_gone() -> None:
    async def test() -> None:
        app = Sender()
        async with asyncio.timeout(60), asked(app):
            await app.gone.wait()

    asyncio.run(test())


@pytest.mark.parametrize("said", ["", "connection: close\r\n"])
async def test_who_is_refused_before_the_body_is_here_may_send_it_and_is_told(said: str) -> None:
    """Closed with bytes unread, the connection would be reset, and the answer lost to who reads it after sending."""
    head = f"POST / HTTP/1.1\r\nhost: x\r\n{said}content-length: {len(PIECE) * PIECES}\r\n\r\n".encode()
    app = Refuser()
    async with asyncio.timeout(60), served(app) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(head)
        answer = await reader.readuntil(b"\r\n\r\nno")
        assert answer.startswith(b"HTTP/1.1 401 ")
        for _ in range(PIECES):
            writer.write(PIECE)
            await writer.drain()
        assert await reader.read() == b"", "closed when the body is here"
        writer.close()
    assert app.asked == 1


@dataclass
class Timer:
    """One that never rings."""

    delay_s: float
    rings: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class Clockwork:
    """The part of a loop and of a transport that a connection needs to bound its client's pauses."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []
        self.aborted = False

    def call_later(self, delay_s: float, rings: Callable[[], None]) -> Timer:
        self.timers.append(Timer(delay_s, rings))
        return self.timers[-1]

    def abort(self) -> None:
        self.aborted = True

    def get_extra_info(self, _name: str) -> None:
        return None


def behind(clockwork: Clockwork) -> Any:
    """Return a connection whose client has just fallen behind."""
    config = uvicorn.Config(Sender(), ws="none", lifespan="off", log_config=None)
    protocol: Any = BoundedProtocol(config, ServerState(), {}, clockwork)
    protocol.connection_made(clockwork)
    protocol.pause_writing()
    return protocol


def test_a_client_that_is_behind_has_a_minute_to_take_some() -> None:
    clockwork = Clockwork()
    behind(clockwork)
    timer = clockwork.timers[-1]
    assert (timer.delay_s, timer.cancelled) == (WRITE_TIMEOUT_S, False)
    timer.rings()
    assert clockwork.aborted


def test_a_client_that_takes_some_may_fall_behind_anew() -> None:
    clockwork = Clockwork()
    protocol = behind(clockwork)
    first = clockwork.timers[-1]
    protocol.resume_writing()
    assert first.cancelled
    protocol.pause_writing()
    assert clockwork.timers[-1] is not first
    assert not clockwork.timers[-1].cancelled


def test_a_connection_that_is_lost_leaves_no_timer() -> None:
    clockwork = Clockwork()
    behind(clockwork).connection_lost(ConnectionResetError())
    assert all(timer.cancelled for timer in clockwork.timers)
