"""What a test asks the composed stack's gateway over HTTP or HTTPS, always on a connection of its own."""

from __future__ import annotations

import http.client
import json
import ssl
from typing import Any

from tests.compose.docker import Composed

PATIENCE_S = 300
"""For one answer, of an engine that may be busy with a batch."""

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}


def ask(
    stack: Composed, path: str, body: Any = None, tls: ssl.SSLContext | None = None, key: str = ""
) -> tuple[int, Any, http.client.HTTPMessage]:
    """Return status, JSON body and headers of an answer; raises OSError or HTTPException if there is none."""
    place = ("127.0.0.1", stack.gateway_port)
    connection = (
        http.client.HTTPConnection(*place, timeout=PATIENCE_S)
        if tls is None
        else http.client.HTTPSConnection(*place, timeout=PATIENCE_S, context=tls)
    )
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    try:
        connection.request("GET" if body is None else "POST", path, body and json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read()), answer.headers
    finally:
        connection.close()


def chat(stack: Composed, tls: ssl.SSLContext | None = None, key: str = "") -> str:
    """Have a chat completed; return the id of the request."""
    status, answer, headers = ask(stack, "/v1/chat/completions", CHAT, tls, key)
    assert status == 200, answer
    assert answer["choices"][0]["finish_reason"] in {"length", "stop"}, answer
    return headers["x-request-id"] or ""
