"""What a download tells that cannot be told to its end, or has not begun."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from services.gateway.download import PIECE_BYTES, Download
from services.gateway.stopping import Stopping
from services.gateway.vigil import Vigil
from tests.support.asgi import Visit


async def test_a_head_is_answered_without_reading_what_is_not_sent() -> None:
    """Nobody takes it, so nothing would slow it, and the connection's next request would wait for all of it."""
    read = 0
    closed = False

    async def parts() -> AsyncGenerator[bytes, None]:
        nonlocal read, closed
        try:
            while read < 100:
                read += 1
                yield b"x" * PIECE_BYTES
        finally:
            closed = True

    answer = await Visit(Download(parts(), {"content-length": "7"}, Vigil()), "HEAD", "/", b"", {}).whole()
    assert (answer.status, answer.headers["content-length"], answer.complete) == (200, "7", True)
    assert (read, closed) == (1, True)


@pytest.mark.parametrize("told", [b"", b"begun"], ids=["waits", "begun"])
async def test_at_a_stop_a_download_that_has_not_begun_is_told_so(told: bytes) -> None:
    waits = asyncio.Event()

    async def parts() -> AsyncGenerator[bytes, None]:
        if told:
            yield told * 2**16
        waits.set()
        await asyncio.Event().wait()

    visit = Visit(Stopping(Download(parts(), {}, Vigil())), "GET", "/", b"", {})
    async with asyncio.timeout(30):
        await waits.wait()
        visit.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await visit.task
    if told:
        assert (visit.answer.status, visit.answer.complete) == (200, False)
    else:
        assert (visit.answer.status, visit.answer.complete) == (503, True)
        assert visit.answer.error["code"] == "gateway_stopping"
