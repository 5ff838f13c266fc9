"""Peers that accept what they are told and read none of it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from services.rpc.limits import MAX_UNSENT_BYTES
from services.rpc.outbox import Outbox

UNREAD_LOOK_S: Final = 10.0
"""Between two looks at whether the peer reads. One that does takes a frame within moments, also over a slow link,
however much there is: on a new stream it may be told all there is at once."""


async def end_unread(call: Any, outbox: Outbox, peer: str, log: logging.Logger) -> None:
    """End a stream whose peer reads nothing, once too much is unread: the next open says the same."""
    taken = -1
    while outbox.size_bytes <= MAX_UNSENT_BYTES or outbox.frames_taken != taken:
        taken = outbox.frames_taken
        await asyncio.sleep(UNREAD_LOOK_S)
    log.warning("%s: more than %d bytes are unread", peer, MAX_UNSENT_BYTES)
    outbox.discard()
    call.cancel()
