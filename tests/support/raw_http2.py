"""An HTTP/2 client made of bytes (RFC 9113), which can therefore do what no client library lets one do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 7, 8, 9
END_STREAM, END_HEADERS = 1, 4

INITIAL_WINDOW_SIZE = 4
"""The setting (RFC 9113, 6.5.2) that says how much of an answer a client takes unless it says more."""

DEFAULT_WINDOW_BYTES = 65_535

HOSTILE_HOST = "127.0.0.2"
"""Where hostile clients come from: another host than that of the good ones, as far as the services can tell."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return one frame."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def literal(name: str, value: str) -> bytes:
    """Return a header as HPACK's literal without indexing (RFC 7541, 6.2.2); both are shorter than 127 bytes."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def grpc_headers(path: str, more: Mapping[str, str] | None = None) -> bytes:
    """Return the header block of a gRPC call."""
    fields = {
        ":method": "POST", ":scheme": "http", ":path": path, ":authority": "x",
        "te": "trailers", "content-type": "application/grpc", **(more or {}),
    }  # fmt: skip
    return b"".join(literal(name, value) for name, value in fields.items())


def grpc_message(payload: bytes, length: int | None = None) -> bytes:
    """Return a message with gRPC's prefix, which may lie about its length."""
    return b"\0" + (len(payload) if length is None else length).to_bytes(4, "big") + payload


class RawConnection:
    """One connection; everything received is read and kept apart by stream, so that the peer is never blocked."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Use `RawConnection.open`."""
        self._reader = reader
        self._writer = writer
        self.begun: set[int] = set()
        """Streams that the peer has begun to answer."""
        self.ended: dict[int, bytes] = {}
        """Last HEADERS or RST_STREAM payload of each stream that the peer has ended."""
        self.closed = asyncio.Event()
        self._task = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, address: str, greet: bool = True, window_bytes: int = DEFAULT_WINDOW_BYTES) -> RawConnection:
        """Connect from HOSTILE_HOST; with `greet`, introduce the client as HTTP/2 asks.

        It takes `window_bytes` of each answer, and never says that it takes more.
        """
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), local_addr=(HOSTILE_HOST, 0))
        connection = cls(reader, writer)
        if greet:
            window = INITIAL_WINDOW_SIZE.to_bytes(2, "big") + window_bytes.to_bytes(4, "big")
            await connection.send(PREFACE, frame(SETTINGS, 0, 0, window))
        return connection

    async def send(self, *parts: bytes) -> bool:
        """Send bytes; return whether the peer still takes them."""
        try:
            for part in parts:
                self._writer.write(part)
            async with asyncio.timeout(5):
                await self._writer.drain()
        except (ConnectionError, TimeoutError):
            return False
        return not self.closed.is_set()

    async def call(self, path: str, streams: Sequence[int], then: bytes = b"", last: bool = False) -> bool:
        """Open a call on each stream, and send `then` on it, as all there is to be said if it is the `last`."""
        block = grpc_headers(path)
        opening = [frame(HEADERS, END_HEADERS, stream, block) for stream in streams]
        data = [frame(DATA, END_STREAM if last else 0, stream, then) for stream in streams] if then else []
        return await self.send(*opening, *data)

    async def close(self) -> None:
        """Close the connection."""
        self._task.cancel()
        self._writer.close()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                stream = int.from_bytes(head[5:], "big")
                if head[3] == HEADERS:
                    self.begun.add(stream)
                if head[3] == RST_STREAM or (head[3] == HEADERS and head[4] & END_STREAM):
                    self.ended[stream] = payload
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed.set()
