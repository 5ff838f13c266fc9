"""What clients are told whose requests are cut off at the end of the grace, when the gateway stops."""

from __future__ import annotations

import asyncio

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.problem import Problem


class Stopping:
    """The application, with an answer to each request that is cancelled before it has one."""

    def __init__(self, app: ASGIApp) -> None:
        """Serve `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            if not begun:
                stopping = Problem(503, "the gateway is stopping", "", "gateway_stopping")
                await JSONResponse(stopping.body, stopping.status)(scope, receive, send)
            raise
