"""Connections without a call: those whose clients ping as documented stay, those whose peers answer no ping end."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc

from services.rpc.limits import CHANNEL_OPTIONS, SERVER_OPTIONS
from tests.support.raw_http2 import RawConnection
from tests.unit.rpc.test_late_pings import PING, sooner

PINGS = 6
"""More than gRPC forgives those that it takes for too many."""


class CountingProxy:
    """Carries all, and tells when one side has closed or the client has sent PINGS pings."""

    def __init__(self, port: int) -> None:
        self.pings = self.connections = 0
        self.seen = asyncio.Event()
        self.closed = False
        self._port = port
        self._carrying: list[asyncio.Task[None]] = []

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        self._server.close()
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        theirs, ours = await asyncio.open_connection("127.0.0.1", self._port)
        self._carrying.append(asyncio.create_task(self._carry(reader, ours, asks=True)))
        self._carrying.append(asyncio.create_task(self._carry(theirs, writer, asks=False)))

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, asks: bool) -> None:
        with suppress(ConnectionError):
            while data := await source.read(65536):
                target.write(data)
                self.pings += data.count(PING) if asks else 0
                if self.pings >= PINGS:
                    self.seen.set()
        self.closed = True
        self.seen.set()
        target.close()


async def test_an_idle_channel_that_pings_as_documented_keeps_its_connection() -> None:
    async def answer(_request: bytes, _context: Any) -> bytes:
        return b"done"

    server = grpc.aio.server(options=sooner(SERVER_OPTIONS))
    handler: Any = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"ask": handler}),))
    proxy = CountingProxy(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    try:
        address = f"127.0.0.1:{await proxy.start()}"
        # The services' own, which ping also without a call; a bare channel of any language is set so by the document.
        async with grpc.aio.insecure_channel(address, sooner(CHANNEL_OPTIONS)) as channel, asyncio.timeout(60):
            method: Any = channel.unary_unary("/s/ask")
            assert await method(b"") == b"done"
            await proxy.seen.wait()
            assert not proxy.closed, "the connection was closed for its pings"
            assert await method(b"") == b"done"
    finally:
        await proxy.close()
        await server.stop(0)
    assert proxy.connections == 1


async def test_a_connection_without_calls_is_let_go_when_its_peer_answers_no_ping() -> None:
    others = [option for option in sooner(SERVER_OPTIONS) if option[0] != "grpc.http2.ping_timeout_ms"]
    server = grpc.aio.server(options=[*others, ("grpc.http2.ping_timeout_ms", 500)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    connection = await RawConnection.open(f"127.0.0.1:{port}")
    try:
        async with asyncio.timeout(60):
            await connection.closed.wait()
    finally:
        await connection.close()
        await server.stop(0)
