"""Notices that a client has gone while something else is awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from services.gateway.intake import ClientGoneError
from services.rpc.interruption import Interruption


@asynccontextmanager
async def until_hangup(receive: Receive) -> AsyncIterator[None]:
    """Run the body of the `with`; raises ClientGoneError out of it as soon as the client has gone.

    The request's body must have been read: what else the client sends is dropped.
    """
    with Interruption() as interruption:

        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            interruption.end(ClientGoneError())

        listener = asyncio.create_task(listen(), name="hangup")
        try:
            yield
        finally:
            listener.cancel()
