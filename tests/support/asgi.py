"""A client of an ASGI application in the same process: scripted messages in, the whole response out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message


@dataclass
class Answer:
    """What the application has sent so far."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def json(self) -> Any:
        """Return the body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object of the body."""
        found: dict[str, Any] = self.json()["error"]
        return found

    @property
    def events(self) -> list[str]:
        """The data of the stream's events."""
        return [part.removeprefix("data: ") for part in self.body.decode().split("\n\n") if part.startswith("data: ")]


class Visit:
    """One HTTP request to the application; `leave` hangs up."""

    def __init__(self, app: ASGIApp, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        self.answer = Answer()
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        path, _, query = path.partition("?")
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "", "headers": raw,
            "server": ("test", 80), "client": ("test", 1), "state": {},
        }  # fmt: skip
        self.task = asyncio.create_task(self._visit(app, scope))

    async def _visit(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        await app(scope, self._inbox.get, self._send)

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.answer.status = message["status"]
            self.answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.answer.body += message.get("body", b"")
            self.answer.complete = not message.get("more_body", False)
        self.answer.changed.set()

    def leave(self) -> None:
        """Hang up."""
        self._inbox.put_nowait({"type": "http.disconnect"})

    async def whole(self) -> Answer:
        """Return the answer once the application is done."""
        await self.task
        return self.answer


def post(app: ASGIApp, path: str, body: Any, **headers: str) -> Visit:
    """Post a JSON body; header names with underscores for dashes."""
    fields = {"content-type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
    return Visit(app, "POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), fields)


def get(app: ASGIApp, path: str, method: str = "GET") -> Visit:
    """Ask without a body."""
    return Visit(app, method, path, b"", {})
