"""One stream to a peer, from its call to its end: for those who open another after each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc

from penstock.connection import cancelled_by_somebody
from services.rpc.outbox import Outbox
from services.rpc.streams import StreamMethod
from services.rpc.unread import end_unread


class Ending(NamedTuple):
    """Why a stream ended."""

    kind: Any
    """The status, or another word for the kind (`Any`: mypyc finds no `object` for a field of a named tuple)."""
    text: str


async def run_stream(
    method: StreamMethod, outbox: Outbox, peer: str, log: logging.Logger, take: Callable[[Any], None]
) -> Ending:
    """Say what `outbox` has and have `take` hear each frame of `peer`, until the stream ends; return why.

    A peer that reads nothing is an end, and what could not be said is forgotten. Raises what `take` does.
    """
    call = method(outbox.frames())
    unread = asyncio.create_task(end_unread(call, outbox, peer, log), name="unread")
    try:
        async for frame in call:
            take(frame)
        return Ending("ended", "it ended the stream")
    except grpc.aio.AioRpcError as error:
        return Ending(error.code(), error.details() or error.code().name)
    except asyncio.CancelledError:
        if cancelled_by_somebody():
            raise
        # By `end_unread`, or by gRPC, which cancels a call whose next frame cannot be made, and tells nobody why.
        return Ending("broken", "the stream broke off")
    finally:
        unread.cancel()
        outbox.close()
        call.cancel()
