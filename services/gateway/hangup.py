"""Notices that a client has gone while something else is awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from services.gateway.intake import ClientGoneError


@asynccontextmanager
async def until_hangup(receive: Receive) -> AsyncIterator[None]:
    """Run the body of the `with`; raises ClientGoneError out of it as soon as the client has gone.

    The request's body must have been read: what else the client sends is dropped.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def listen() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    listener = asyncio.create_task(listen(), name="hangup")
    try:
        yield
    except asyncio.CancelledError:
        # A cancellation of somebody else's at the same time stays one.
        if gone and task.uncancel() == 0:
            raise ClientGoneError from None
        raise
    finally:
        listener.cancel()
