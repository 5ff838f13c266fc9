"""How connections end: whose client takes nothing of its answer, and whose body still comes when it has it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from services.gateway.limits import AHEAD_S, MAX_AHEAD_BYTES, MAX_HEAD_BYTES
from services.gateway.protocol import TOO_LARGE, BoundedProtocol
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

    def __init__(self, keeps: bool = False) -> None:
        self.asked = 0
        self.keeps = keeps

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        self.asked += 1
        headers = [(b"content-length", b"2"), (b"connection", b"keep-alive" if self.keeps else b"close")]
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


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with what was asked."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message["body"]
        more = message["more_body"]
    headers = [name.decode() for name, _ in scope["headers"]]
    said = json.dumps([scope["method"], scope["path"], headers, body.decode()]).encode()
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-length", str(len(said)).encode())],
        }
    )
    await send({"type": "http.response.body", "body": said})


H2C = b"connection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAEAAEAA\r\nupgrade: h2c\r\n"
"""What Java's client says in each request."""
WEBSOCKET = b"connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n"
PLAIN = b"POST /plain HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nhi"
OFFERS = {
    "h2c": (b"POST /a?b HTTP/1.1\r\n" + H2C + b"host: x\r\ncontent-length: 5\r\n\r\nhello", "hello"),
    "chunked": (
        b"POST /a HTTP/1.1\r\n" + H2C + b"transfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n",
        "hello",
    ),
    "no body": (b"GET /a HTTP/1.1\r\nhost: x\r\n" + H2C + b"\r\n", ""),
    "websocket": (b"GET /a HTTP/1.1\r\nhost: x\r\n" + WEBSOCKET + b"\r\n", ""),
    "like a request": (
        b"POST /a HTTP/1.1\r\n" + H2C + b"content-length: %d\r\n\r\n" % len(PLAIN) + PLAIN,
        PLAIN.decode(),
    ),
}


async def said_to(reader: asyncio.StreamReader) -> list[Any]:
    """Return what `echo` answers next."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    (size,) = [int(line.split()[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
    said: list[Any] = json.loads(await reader.readexactly(size))
    return said


@pytest.mark.parametrize("piece_bytes", [1, 7, 1_000_000])
@pytest.mark.parametrize(("request_", "body"), OFFERS.values(), ids=OFFERS)
async def test_an_offer_of_another_protocol_is_passed_over(request_: bytes, body: str, piece_bytes: int) -> None:
    sent = PLAIN + request_ * 2 + PLAIN
    async with asyncio.timeout(60), served(echo) as address:
        reader, writer = await asyncio.open_connection(*address)
        for start in range(0, len(sent), piece_bytes):
            writer.write(sent[start : start + piece_bytes])
            await writer.drain()
            await asyncio.sleep(0)
        answers = [await said_to(reader) for _ in range(4)]
        writer.close()
    assert [answer[1] for answer in answers] == ["/plain", "/a", "/a", "/plain"]
    method, path, headers, told = answers[1]
    assert (method, path, told) == (request_.split()[0].decode(), "/a", body)
    assert "upgrade" not in headers
    assert "connection" in headers
    assert answers[2] == answers[1]


async def test_offers_one_after_the_other_are_passed_over_in_one_piece() -> None:
    count = 2000
    async with asyncio.timeout(60), served(echo) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(OFFERS["h2c"][0] * count)
        for _ in range(count):
            assert (await said_to(reader))[3] == "hello"
        writer.close()


@pytest.mark.parametrize(("piece_bytes", "behind"), [(1, b""), (1_000_000, PLAIN)])
@pytest.mark.parametrize("closing", ["HTTP/1.0", "connection: close", "connection: upgrade, close"])
@pytest.mark.parametrize("offer", ["h2c", "chunked", "no body"])
async def test_an_offer_on_a_connection_that_is_to_be_closed_is_answered(
    offer: str, closing: str, piece_bytes: int, behind: bytes
) -> None:
    request_, body = OFFERS[offer]
    if closing == "HTTP/1.0":
        sent = request_.replace(b"HTTP/1.1", b"HTTP/1.0")
    else:
        sent = request_.replace(b"\r\n\r\n", b"\r\n" + closing.encode() + b"\r\n\r\n", 1)
    sent += behind
    async with asyncio.timeout(60), served(echo) as address:
        reader, writer = await asyncio.open_connection(*address)
        for start in range(0, len(sent), piece_bytes):
            writer.write(sent[start : start + piece_bytes])
            await asyncio.sleep(0)
        assert (await said_to(reader))[3] == body
        assert await reader.read() == b"", "closed, and what is behind it is not answered"
        writer.close()


@pytest.mark.parametrize("offer", [b"", H2C])
async def test_a_head_that_is_too_large_is_refused_however_it_comes(offer: bytes) -> None:
    app = Refuser()
    start = b"GET / HTTP/1.1\r\nhost: x\r\n" + offer + b"x: "
    over = start + b"y" * (MAX_HEAD_BYTES + 1 - len(start) - 4) + b"\r\n\r\n"
    async with asyncio.timeout(60):
        for reads in ([over], [over[:40_000], over[40_000:]], [over[:-1], over[-1:]]):
            clockwork, protocol = connection(app)
            for read in reads:
                protocol.data_received(read)
            assert (bytes(clockwork.written), clockwork.closed, app.asked) == (TOO_LARGE, True, 0)
        _, protocol = connection(app)
        protocol.data_received(over.replace(b"yy", b"y", 1) + over)
        await asyncio.gather(*protocol.tasks)
    assert app.asked == 1, "one that is just not too large"


class Listener:
    """An application that answers when it is let go, and tells of hang-ups."""

    def __init__(self) -> None:
        self.asked = 0
        self.running = asyncio.Event()
        self.goes = asyncio.Semaphore(0)
        self.gone = asyncio.Event()

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        self.asked += 1
        while (await receive())["more_body"]:
            pass
        self.running.set()
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(self._listen(receive))
            await self.goes.acquire()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            listening.cancel()
        await send({"type": "http.response.body", "body": b"ok"})

    async def _listen(self, receive: Receive) -> None:
        assert (await receive())["type"] == "http.disconnect"
        self.gone.set()
        self.goes.release()


GET = b"GET / HTTP/1.1\r\nx: %s\r\n\r\n" % (b"y" * 1000)
AHEAD = {"a request": GET, "the beginning of one": GET[:9], "as much as is held": GET * (MAX_AHEAD_BYTES // len(GET))}


@pytest.mark.parametrize("ahead", AHEAD.values(), ids=AHEAD)
async def test_the_hang_up_of_a_client_that_sent_more_ahead_is_heard(ahead: bytes) -> None:
    app = Listener()
    async with asyncio.timeout(60), served(app) as address:
        _, writer = await asyncio.open_connection(*address)
        writer.write(GET + ahead)
        await app.running.wait()
        writer.close()
        await app.gone.wait()
        assert app.asked == 1


async def test_nothing_is_parsed_before_the_request_before_it_is_answered() -> None:
    app = Listener()
    clockwork, protocol = connection(app)
    count = 3 * MAX_AHEAD_BYTES // len(GET)
    protocol.data_received(GET * count)
    for answered in range(count):
        app.running.clear()
        assert not protocol.pipeline
        assert clockwork.reading == ((count - answered - 1) * len(GET) <= MAX_AHEAD_BYTES)
        (task,) = protocol.tasks
        app.goes.release()
        await task
        await asyncio.sleep(0)  # what is called when it is done
    assert (app.asked, clockwork.written.count(b"HTTP/1.1 200 OK"), clockwork.closed) == (count, count, False)


async def test_who_sent_too_much_ahead_is_closed_when_the_answer_takes_long() -> None:
    app = Listener()
    clockwork, protocol = connection(app)
    protocol.data_received(GET + b"x" * MAX_AHEAD_BYTES)
    await app.running.wait()
    assert clockwork.reading, "as much as is held"
    assert all(timer.cancelled for timer in clockwork.timers)
    protocol.data_received(b"x")
    timer = clockwork.timers[-1]
    assert (clockwork.reading, timer.delay_s, timer.cancelled) == (False, AHEAD_S, False)
    timer.rings()
    assert clockwork.closed
    protocol.connection_lost(None)
    await asyncio.gather(*protocol.tasks)
    assert app.gone.is_set()


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
        self.reading = True
        self.closed = False
        self.unsent_bytes = 0
        self.written = bytearray()

    def create_task(self, running: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.create_task(running)

    def write(self, data: bytes) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def call_soon(self, call: Callable[[], None]) -> asyncio.Handle:
        return asyncio.get_running_loop().call_soon(call)

    def call_later(self, delay_s: float, rings: Callable[[], None]) -> Timer:
        self.timers.append(Timer(delay_s, rings))
        return self.timers[-1]

    def abort(self) -> None:
        self.aborted = True

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def get_extra_info(self, _name: str) -> None:
        return None


def connection(app: ASGIApp) -> tuple[Clockwork, Any]:
    """Return a connection to `app`, and what it runs on."""
    clockwork: Any = Clockwork()
    config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None)
    protocol = BoundedProtocol(config, ServerState(), {}, clockwork)
    protocol.connection_made(clockwork)
    return clockwork, protocol


def test_what_nobody_has_read_goes_with_the_connection() -> None:
    _, protocol = connection(Sender())
    protocol.cycle = SimpleNamespace(body=bytearray(b"x"), response_complete=False, message_event=asyncio.Event())
    protocol.connection_lost(ConnectionResetError())
    assert protocol.cycle.disconnected
    assert not protocol.cycle.body
