"""One HTTP response: a JSON body, or a stream of server-sent events that may be begun late."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any

from starlette.types import Send

from penstock.openai.chunks import DONE
from penstock.openai.jsontext import json_bytes
from services.gateway.problem import Problem

EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Proxies that buffer would hold back every chunk.
    "x-accel-buffering": "no",
}


LARGE_BYTES = 256 * 1024
"""Of results, from which on their JSON is made beside the event loop, as a MiB with log probabilities takes 0.2 s, and
only when there is room for as long as a client takes to read it."""


class Writing:
    """Makes JSON of results: of large ones beside the event loop, and one at a time.

    So each of some copies that it takes is there once, and the loop shares the interpreter with one thread.
    """

    def __init__(self) -> None:
        """Nothing is being made."""
        self._one = asyncio.Lock()

    async def of(self, make: Callable[[], Iterable[bytes]], size_bytes: int) -> bytes:
        """Return what `make` makes, part by part, of results of this size."""
        if size_bytes < LARGE_BYTES:
            return b"".join(make())
        async with self._one:
            return await _beside(make)


async def _beside(make: Callable[[], Iterable[bytes]]) -> bytes:
    """Make it in a thread, which has ended when this does: at its next part if nobody waits for it any more."""
    wanted = True

    def made() -> bytes:
        return b"".join(takewhile(lambda _part: wanted, make()))

    making = asyncio.ensure_future(asyncio.to_thread(made))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        wanted = False
        while not making.done():
            with suppress(asyncio.CancelledError):  # it is raised below
                await asyncio.wait([making])
        raise


def json_of(body: Any) -> bytes:
    """Return it as JSON."""
    return b"".join(json_bytes(body))


def text_of(lines: Iterable[str]) -> str:
    """Return chunks of a stream as they are sent."""
    return "".join([f"data: {line}\n\n" for line in lines])


def events_of(lines: Iterable[Iterable[str]]) -> Iterator[bytes]:
    """Yield parts of chunks of a stream, which come in parts, as they are sent."""
    for line in lines:
        yield b"data: "
        for part in line:
            yield part.encode()
        yield b"\n\n"


class Reply:
    """Writes one response through ASGI's `send`."""

    def __init__(self, send: Send) -> None:
        """Nothing is sent yet."""
        self._send = send
        self._writing = asyncio.Lock()
        self.headers: dict[str, str] = {}
        """Sent with the response, whatever it becomes."""
        self.status = 0
        """HTTP status sent; 0 while there is none."""
        self.ended = False
        self.torn = False
        """Whether part of something was sent, behind which nothing else can be."""
        self.wrote = False
        """Whether anything was written since this was last set to False."""

    async def json(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        """Send a whole response with a JSON body."""
        await self.whole(status, json_of(body), headers)

    async def whole(self, status: int, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send a whole response with a JSON body that is encoded already."""
        fields = {**self.headers, **(headers or {}), "content-type": "application/json"}
        fields["content-length"] = str(len(data))
        self.ended = True
        async with self._writing:
            if not self.status:
                await self._begin(status, fields)
            await self._send({"type": "http.response.body", "body": data})

    async def whole_in_pieces(self, pieces: AsyncGenerator[bytes, None], size_bytes: Callable[[], int]) -> None:
        """Send a whole response with a JSON body as it comes, of which `size_bytes` tells the size with the first."""
        first = await anext(pieces)
        fields = {**self.headers, "content-type": "application/json", "content-length": str(size_bytes())}
        self.ended = True
        async with self._writing:
            await self._begin(200, fields)
            await self._pieces(first, pieces)
            await self._send({"type": "http.response.body", "body": b""})

    async def event_in_pieces(self, pieces: AsyncGenerator[bytes, None]) -> None:
        """Send chunks of a stream as they come; if that fails nothing else can be sent."""
        first = await anext(pieces)
        async with self._writing:
            if not self.status:
                await self._begin(200, {**self.headers, **EVENT_HEADERS})
            self.torn = True
            await self._pieces(first, pieces)
            self.torn = False
        self.wrote = True

    async def _pieces(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        await self._send({"type": "http.response.body", "body": first, "more_body": True})
        async for piece in rest:
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def events(self, lines: Sequence[str]) -> None:
        """Send chunks of a stream, beginning it if need be."""
        if lines:
            await self._text(text_of(lines))

    async def comment(self, text: str) -> None:
        """Send a line that clients drop."""
        await self._text(f": {text}\n\n")

    async def end(self) -> None:
        """End the stream."""
        await self.events([DONE])
        self.ended = True
        async with self._writing:
            await self._send({"type": "http.response.body", "body": b""})

    async def problem(self, problem: Problem) -> None:
        """Tell what is wrong: as the response if none has begun, else as the last event."""
        if self.status:
            await self.events([json.dumps(problem.body, ensure_ascii=False, separators=(",", ":"))])
            await self.end()
        else:
            await self.json(problem.status, problem.body, problem.headers)

    async def _text(self, text: str) -> None:
        async with self._writing:
            if not self.status:
                await self._begin(200, {**self.headers, **EVENT_HEADERS})
            await self._send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        self.wrote = True

    async def _begin(self, status: int, fields: Mapping[str, str]) -> None:
        headers = [(name.encode(), value.encode("latin-1", "replace")) for name, value in fields.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self.status = status
