"""A TCP proxy that can cut, refuse and stall: one for each link between two processes."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

from tests.support.ports import free_port

CHUNK_BYTES = 64 * 1024
"""Read and passed on at once; while a link stalls, so much is taken and the rest waits in the sockets' buffers."""

RESET_AT_CLOSE = struct.pack("ii", 1, 0)
"""Of SO_LINGER: on, for no time."""


class Proxy:
    """One link: listens on a port of its own, and connects to the upstream for each connection it gets."""

    def __init__(self, name: str, upstream: str) -> None:
        """Carry what comes to `upstream`, a "HOST:PORT"."""
        self.name = name
        self._host, _, port = upstream.rpartition(":")
        self._port = int(port)
        self._server: asyncio.Server | None = None
        self._own_port = free_port()
        self._flowing = asyncio.Event()
        self._answering = asyncio.Event()
        for gate in (self._flowing, self._answering):
            gate.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """Where the link's other end connects to."""
        return f"127.0.0.1:{self._own_port}"

    async def start(self) -> None:
        """Listen; again, after `refuse`."""
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", self._own_port, limit=CHUNK_BYTES)

    def cut(self) -> None:
        """Reset every connection."""
        for writer in list(self._writers):
            _reset(writer)

    async def refuse(self, seconds: float) -> None:
        """Reset every connection, and take no new one for a while."""
        if self._server is not None:
            self._server.close()
        self.cut()
        await asyncio.sleep(seconds)
        await self.start()

    async def stall(self, seconds: float) -> None:
        """Carry nothing for a while; connections stay open, and new ones are taken and left alone."""
        self._flowing.clear()
        await asyncio.sleep(seconds)
        self._flowing.set()

    async def mute(self, seconds: float) -> None:
        """Carry what is said to the upstream and nothing of its answers for a while."""
        self._answering.clear()
        await asyncio.sleep(seconds)
        self._answering.set()

    async def close(self) -> None:
        """Stop listening and reset what is open."""
        if self._server is not None:
            self._server.close()
        for gate in (self._flowing, self._answering):
            gate.set()
        while self._tasks:
            self.cut()
            await asyncio.wait(self._tasks, timeout=0.1)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            await self._flowing.wait()
            with suppress(OSError):
                up_reader, up_writer = await asyncio.open_connection(self._host, self._port, limit=CHUNK_BYTES)
                self._writers.add(up_writer)
                try:
                    async with asyncio.TaskGroup() as both:
                        both.create_task(self._pump(reader, up_writer, [self._flowing]))
                        both.create_task(self._pump(up_reader, writer, [self._flowing, self._answering]))
                finally:
                    _reset(up_writer)
                    self._writers.discard(up_writer)
        finally:
            _reset(writer)
            self._writers.discard(writer)
            self._tasks.discard(task)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, gates: Sequence[asyncio.Event]
    ) -> None:
        """Pass on until either end is gone; then the other direction is over as well, as gRPC has no half-open one."""
        try:
            while data := await source.read(CHUNK_BYTES):
                for gate in gates:
                    await gate.wait()
                sink.write(data)
                await sink.drain()
            sink.close()
            await sink.wait_closed()
        except OSError:
            _reset(sink)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a TCP reset: what is on its way is lost, and the peer is told of an error, not of an end."""
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
    writer.transport.abort()
