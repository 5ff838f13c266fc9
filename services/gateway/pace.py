"""How what takes the event loop long leaves it to others: each stream that is open lives from turns in between."""

from __future__ import annotations

import asyncio
import time

LARGE_BYTES = 64 * 1024
"""Of JSON, from which on parsing may take more than ten milliseconds; the largest takes some tenths of a second."""


async def give_way(size_bytes: int, since_s: float) -> None:
    """Leave the loop to others for as long as work on something large has had it, since `since_s` (monotonic)."""
    if size_bytes >= LARGE_BYTES:
        await asyncio.sleep(time.monotonic() - since_s)
