"""Who a client of the gateway is. The queue knows; the gateway keeps no keys and passes on what it is given."""

from __future__ import annotations

import base64
import binascii
import time

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.client import Client
from penstock.credentials import pass_on
from penstock.errors import PermissionDenied
from penstock.keys import DEFAULT_TENANT, Role
from penstock.queue.v1 import queue_pb2

GOOD_FOR_S = 1.0
"""Long enough that who asks often pays no round trip for it."""

MOST_GOOD = 1024
"""Headers remembered: of more clients some are asked about again."""

OPEN = queue_pb2.IdentifyResponse(role="open", tenant=DEFAULT_TENANT, all_channels=True)
"""Everyone, where the fleet has no keys."""


class PassOn:
    """The application, with every call that a request makes being its client's."""

    def __init__(self, app: ASGIApp) -> None:
        """Serve `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; its task, and those it starts, call with the client's key or with none."""
        if scope["type"] == "http":
            pass_on(authorization_of(scope))
        await self._app(scope, receive, send)


def authorization_of(scope: Scope) -> str:
    """Return the Authorization header of a request, empty if it has none or several."""
    found = [value for name, value in scope["headers"] if name == b"authorization"]
    return found[0].decode("latin-1") if len(found) == 1 else ""


def bearer_of(authorization: str) -> str:
    """Return the header with the key that this one has as a browser's password (RFC 7617); others as they are."""
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() != "basic":
        return authorization
    try:
        _, _, password = base64.b64decode(given, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return ""
    return f"Bearer {password}"


class Doorman:
    """Asks the queue who the client of the present request is."""

    def __init__(self, client: Client | None = None) -> None:
        """Ask through `client`. None: this gateway has no credentials, so there are no keys, and everyone may do all.

        (Had the fleet keys, a gateway without credentials could not read anything that it might show.)
        """
        self._client = client
        self._good: dict[str, tuple[float, queue_pb2.IdentifyResponse]] = {}
        """Headers that were good: when, and whose."""

    async def tenant_client(self) -> queue_pb2.IdentifyResponse:
        """Return who asks; raises Unauthenticated, or PermissionDenied for a service, whose calls are not HTTP."""
        return await self._one_of(Role.CLIENT, Role.OPERATOR)

    async def let_in(self, authorization: str) -> queue_pb2.IdentifyResponse:
        """Return who asks, or did a moment ago with this header, the present request's. Raises as `tenant_client` does.

        What was good then is not asked about again: every call to the queue is judged by itself.
        """
        if self._client is None:
            return OPEN
        now_s = time.monotonic()
        since_s, who = self._good.get(authorization, (float("-inf"), OPEN))
        if now_s - since_s >= GOOD_FOR_S:
            who = await self.tenant_client()
            if len(self._good) >= MOST_GOOD:
                self._good.clear()
            self._good[authorization] = now_s, who
        return who

    async def operator(self) -> queue_pb2.IdentifyResponse:
        """Return who asks; raises Unauthenticated, or PermissionDenied unless it is an operator."""
        return await self._one_of(Role.OPERATOR)

    async def _one_of(self, *roles: Role) -> queue_pb2.IdentifyResponse:
        if self._client is None:
            return OPEN
        who = await self._client.identify()
        if who.role not in {OPEN.role, *roles}:
            raise PermissionDenied(f"this needs a key of the role {' or '.join(roles)}; yours is a {who.role}'s")
        return who
