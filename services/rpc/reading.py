"""The two halves of a bidirectional stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc

from services.auth.keyring import NotAllowedError
from services.rpc.strict import BadInputError, ReaderFailedError

EXPECTED = (BadInputError, NotAllowedError, ReaderFailedError, grpc.aio.BaseError)
"""What a reader may end with: the peer's fault, or the end of the call. Whoever serves it says so to the peer."""

log = logging.getLogger("rpc")


@asynccontextmanager
async def reading(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run the reader of a stream beside its writer; it ends with the writer at the latest.

    If it fails as nobody expected, that is logged, and ReaderFailedError raised once the writer has ended.
    """
    task = asyncio.create_task(_logged(work))
    try:
        yield task
    finally:
        task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(ended, ReaderFailedError):
        raise ended


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except EXPECTED:
        raise
    except Exception as error:
        log.exception("the reader of a stream failed")
        raise ReaderFailedError from error
