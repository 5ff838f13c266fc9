"""What a download tells that cannot be told to its end, or has not begun."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from services.gateway.download import Download
from services.gateway.vigil import Vigil
from tests.support.asgi import Visit


@pytest.mark.parametrize("told", [b"", b"begun"], ids=["waits", "begun"])
async def test_at_a_stop_a_download_that_has_not_begun_is_told_so(told: bytes) -> None:
    waits = asyncio.Event()

    async def parts() -> AsyncGenerator[bytes, None]:
        if told:
            yield told * 2**16
        waits.set()
        await asyncio.Event().wait()

    visit = Visit(Download(parts(), {}, Vigil()), "GET", "/", b"", {})
    async with asyncio.timeout(10):
        await waits.wait()
        visit.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await visit.task
    if told:
        assert (visit.answer.status, visit.answer.complete) == (200, False)
    else:
        assert (visit.answer.status, visit.answer.complete) == (503, True)
        assert visit.answer.error["code"] == "gateway_stopping"
