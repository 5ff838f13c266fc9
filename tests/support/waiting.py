"""Waiting for facts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.02


def wait_for(fact: Callable[[], T | None], what: str, timeout_s: float = 60.0) -> T:
    """Poll `fact` until it returns something true, and return that; raises TimeoutError naming `what`."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = fact()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s in vain for: {what}")
        time.sleep(POLL_S)


async def wait_for_async(fact: Callable[[], Awaitable[T | None]], what: str, timeout_s: float = 60.0) -> T:
    """Like `wait_for` with a coroutine function; the loop runs on between two polls."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = await fact()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s in vain for: {what}")
        await asyncio.sleep(POLL_S)
