"""A small HTTP/1.1 client on asyncio streams: hundreds of open responses in one process, and clients that misbehave."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Response:
    """A response whose head has been read."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes, without its framing."""
        if "content-length" in self.headers:
            yield await self.reader.readexactly(int(self.headers["content-length"]))
            return
        while size := int(await self.reader.readline(), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]

    async def json(self) -> Any:
        """Return the body as JSON."""
        return json.loads(b"".join([part async for part in self.parts()]))

    async def events(self) -> AsyncIterator[str]:
        """Yield the data of server-sent events, comments left out."""
        text = b""
        async for part in self.parts():
            text += part
            *whole, text = text.split(b"\n\n")
            for event in whole:
                if event.startswith(b"data: "):
                    yield event[6:].decode()


@asynccontextmanager
async def connected(
    address: str, receive_bytes: int | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yield a connection to "HOST:PORT"; `receive_bytes` is what its side may hold unread, otherwise many MiB."""
    host, _, port = address.rpartition(":")
    endpoint = socket.socket()
    if receive_bytes is not None:
        endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)  # before the window is agreed upon
    endpoint.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(endpoint, (host, int(port)))
    except BaseException:
        endpoint.close()
        raise
    reader, writer = await asyncio.open_connection(sock=endpoint)
    try:
        yield reader, writer
    finally:
        writer.close()


def head(method: str, path: str, length: int, **headers: str) -> bytes:
    """Return the head of a request; header names with underscores for dashes."""
    lines = [f"{method} {path} HTTP/1.1", "host: test", f"content-length: {length}"]
    fields = {"content_type": "application/json", **headers}
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return "\r\n".join([*lines, "", ""]).encode()


async def read_head(reader: asyncio.StreamReader) -> Response:
    """Read status and headers of a response."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Response(int(first.split()[1]), headers, reader)


@asynccontextmanager
async def asked(
    address: str, method: str, path: str, body: Any = None, *, receive_bytes: int | None = None, **headers: str
) -> AsyncIterator[Response]:
    """Send a request on a connection of its own, which holds `receive_bytes` unread; leaving hangs up."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    async with connected(address, receive_bytes) as (reader, writer):
        writer.write(head(method, path, len(data), **headers) + data)
        yield await read_head(reader)


async def ask(address: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Return status and JSON body of one request."""
    async with asked(address, method, path, body, receive_bytes=None, **headers) as response:
        return response.status, await response.json()
