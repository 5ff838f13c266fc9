"""Whose client is behind with its answer, or leaves the rest of it, is to take the least there is in a minute.

What it takes is counted by the kernel, where the transport sees nothing of it for megabytes.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from asyncio import constants
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from penstock.dev_ca import Authority
from services.gateway.limits import LEAST_TAKEN_BYTES, MAX_HEAD_BYTES, WRITE_TIMEOUT_S
from services.gateway.protocol import BoundedProtocol
from services.gateway.server import Server
from services.gateway.taking import taken_bytes
from tests.unit.gateway.test_protocol import Clockwork, Sender, connection

MUCH = b"x" * (16 * 2**20)
SOME_BYTES = 2**20
PIECE_BYTES = 2**16


async def test_what_a_client_has_read_is_counted() -> None:
    transports: asyncio.Queue[asyncio.Transport] = asyncio.Queue()

    class Writer(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            transports.put_nowait(transport)

    server = await asyncio.get_running_loop().create_server(Writer, "127.0.0.1")
    async with asyncio.timeout(30), server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        transport = await transports.get()
        before = taken_bytes(transport)
        transport.write(MUCH)
        await reader.readexactly(SOME_BYTES)
        assert SOME_BYTES <= taken_bytes(transport) - before < len(MUCH)
        transport.abort()
        writer.close()


def test_where_the_kernel_does_not_count_the_transports_buffer_tells() -> None:
    sizes_bytes = [2, 9]
    transport: Any = SimpleNamespace(get_extra_info=lambda _name: None, get_write_buffer_size=sizes_bytes.pop)
    before = taken_bytes(transport)
    assert taken_bytes(transport) - before == 7


def fallen_behind() -> tuple[Clockwork, Any]:
    """Return a connection whose client has just fallen behind."""
    clockwork, protocol = connection(Sender())
    protocol.pause_writing()
    return clockwork, protocol


def test_a_client_that_is_behind_has_a_minute_to_take_some() -> None:
    clockwork, _ = fallen_behind()
    timer = clockwork.timers[-1]
    assert (timer.delay_s, timer.cancelled) == (WRITE_TIMEOUT_S, False)
    timer.rings()
    assert clockwork.aborted


@pytest.mark.parametrize("closing", [False, True])
def test_a_client_has_another_minute_as_often_as_it_takes_the_least_there_is(closing: bool) -> None:
    clockwork, protocol = connection(Sender())
    clockwork.unsent_bytes = 3 * LEAST_TAKEN_BYTES
    protocol.pause_writing()
    if closing:
        protocol.timeout_keep_alive_handler()
    for _ in range(2):
        timer = clockwork.timers[-1]
        clockwork.unsent_bytes -= LEAST_TAKEN_BYTES
        timer.rings()
        assert not clockwork.aborted
        assert clockwork.timers[-1] is not timer
    clockwork.unsent_bytes -= LEAST_TAKEN_BYTES - 1
    clockwork.timers[-1].rings()
    assert clockwork.aborted


def no_request(protocol: Any) -> None:
    protocol.data_received(b"\r\n no request\r\n\r\n")


def too_large(protocol: Any) -> None:
    protocol.data_received(b"GET / HTTP/1.1\r\nx: " + b"x" * MAX_HEAD_BYTES)


def idle(protocol: Any) -> None:
    protocol.timeout_keep_alive_handler()


@pytest.mark.parametrize("ends", [no_request, too_large, idle])
def test_what_is_unsent_when_the_connection_is_closed_is_waited_for_a_minute(ends: Callable[[Any], None]) -> None:
    clockwork, protocol = connection(Sender())
    clockwork.unsent_bytes = 1
    ends(protocol)
    timer = clockwork.timers[-1]
    assert (clockwork.closed, timer.delay_s, timer.cancelled) == (True, WRITE_TIMEOUT_S, False)
    protocol.resume_writing()
    assert not timer.cancelled, "what was below the mark is not taken yet"
    timer.rings()
    assert clockwork.aborted


def test_a_connection_that_closes_with_all_sent_leaves_no_timer() -> None:
    clockwork, protocol = connection(Sender())
    idle(protocol)
    assert clockwork.closed
    assert all(timer.cancelled for timer in clockwork.timers)


def test_over_tls_a_minute_is_waited_whatever_the_transport_tells() -> None:
    clockwork, protocol = connection(Sender())
    protocol.scheme = "https"
    idle(protocol)
    assert [timer.delay_s for timer in clockwork.timers if not timer.cancelled] == [WRITE_TIMEOUT_S]


def test_over_tls_who_sends_its_own_end_first_has_no_longer() -> None:
    """Its transport closes, and tells of that only later."""
    clockwork, protocol = connection(Sender())
    protocol.scheme = "https"
    protocol.eof_received()
    assert not clockwork.closed
    protocol.resume_writing()
    assert [timer.delay_s for timer in clockwork.timers if not timer.cancelled][-1] == WRITE_TIMEOUT_S


def contexts(directory: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return those of a server and of its client."""
    cert, key = Authority.open(directory).issue(directory, "service", 1, ["localhost"])
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    return server, ssl.create_default_context(cafile=directory / "ca.pem")


async def much(_scope: Scope, _receive: Receive, send: Send) -> None:
    """Answer with MUCH, and have the connection closed."""
    headers = [(b"content-length", str(len(MUCH)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": MUCH})


def server_of(context: ssl.SSLContext) -> Server:
    config = uvicorn.Config(much, http=BoundedProtocol, ws="none", lifespan="off", log_config=None)
    config.load()
    config.ssl = context
    return Server(config)


async def test_over_tls_who_says_nothing_has_no_longer_than_for_a_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol, "head_timeout_s", 0.05)
    of_server, _ = await asyncio.to_thread(contexts, tmp_path)
    listening = socket.create_server(("127.0.0.1", 0))
    server = server_of(of_server)
    serving = asyncio.create_task(server.serve([listening]))
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        server.should_exit = True
        await serving


async def test_over_tls_who_takes_its_answer_has_it_whole_however_long_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop's own bound of what follows a close is made shorter than any answer takes."""
    monkeypatch.setattr(constants, "SSL_SHUTDOWN_TIMEOUT", 1e-6)
    of_server, of_client = await asyncio.to_thread(contexts, tmp_path)
    listening = socket.create_server(("127.0.0.1", 0))
    server = server_of(of_server)
    serving = asyncio.create_task(server.serve([listening]))
    async with asyncio.timeout(60):
        address = listening.getsockname()
        reader, writer = await asyncio.open_connection(
            *address, ssl=of_client, server_hostname="localhost", ssl_shutdown_timeout=30
        )
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        size_bytes = 0
        while piece := await reader.read(PIECE_BYTES):
            size_bytes += len(piece)
        assert size_bytes == len(MUCH)
        writer.close()
        server.should_exit = True
        await serving


def test_a_client_that_takes_some_may_fall_behind_anew() -> None:
    clockwork, protocol = fallen_behind()
    first = clockwork.timers[-1]
    protocol.resume_writing()
    assert first.cancelled
    protocol.pause_writing()
    assert clockwork.timers[-1] is not first
    assert not clockwork.timers[-1].cancelled


def test_a_connection_that_is_lost_leaves_no_timer() -> None:
    clockwork, protocol = fallen_behind()
    protocol.connection_lost(ConnectionResetError())
    assert all(timer.cancelled for timer in clockwork.timers)
