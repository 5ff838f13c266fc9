"""A connection whose pings are answered late, because a slow link has much to carry before the answers, stays."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from penstock.connection import CHANNEL_OPTIONS
from services.rpc.limits import SERVER_OPTIONS

PING = bytes((0, 0, 8, 6, 0, 0, 0, 0, 0))
"""Head of the HTTP/2 frame: 8 bytes, of type 6, no answer, of no stream."""

TIMEOUTS = {"grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"}
INTERVALS = {"grpc.keepalive_time_ms", "grpc.http2.min_ping_interval_without_data_ms"}
SOONER, MORE_OFTEN = 5, 40
"""The options' times are divided by these."""

LATE_S = 15.0 / SOONER
"""What 3 MB take at 200 kB/s, in the same measure."""


def sooner(options: list[tuple[str, int]]) -> list[tuple[str, int]]:
    divided = dict.fromkeys(TIMEOUTS, SOONER) | dict.fromkeys(INTERVALS, MORE_OFTEN)
    return [(name, value // divided.get(name, 1)) for name, value in options]


class LateProxy:
    """Carries all until `watching`; then the first pings of both sides, and whatever comes behind them, are late."""

    def __init__(self, port: int) -> None:
        self.connections = 0
        self.watching = False
        self.late = asyncio.Event()
        """What was held has been let go."""
        self._port = port
        self._pinging: set[asyncio.StreamWriter] = set()
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
        for source, target in ((reader, ours), (theirs, writer)):
            self._carrying.append(asyncio.create_task(self._carry(source, target)))

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                if self.watching and PING in data:
                    self._pinging.add(target)
                    if len(self._pinging) == 2:
                        asyncio.get_running_loop().call_later(LATE_S, self.late.set)
                if self._pinging:
                    await self.late.wait()
                target.write(data)
        finally:
            target.close()


async def test_a_connection_outlives_pings_that_are_answered_late_on_both_sides() -> None:
    begun = asyncio.Event()

    async def wait(_request: bytes, _context: Any) -> bytes:
        begun.set()
        await proxy.late.wait()
        return b"done"

    server = grpc.aio.server(options=sooner(SERVER_OPTIONS))
    handler: Any = grpc.unary_unary_rpc_method_handler(wait)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"wait": handler}),))
    proxy = LateProxy(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    try:
        address = f"127.0.0.1:{await proxy.start()}"
        async with grpc.aio.insecure_channel(address, sooner(CHANNEL_OPTIONS)) as channel, asyncio.timeout(60):
            method: Any = channel.unary_unary("/s/wait")
            call = method(b"")
            await begun.wait()
            proxy.watching = True
            assert await call == b"done"
    finally:
        await proxy.close()
        await server.stop(0)
    assert proxy.connections == 1
