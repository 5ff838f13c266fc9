"""The event loop every service runs on, and a garbage collector that leaves long-lived objects alone."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")

GC_THRESHOLDS = (50_000, 20, 100)
"""New objects before a collection of the youngest, and how many of those before the next older ones. A request makes
some hundred objects that die by their reference counts; only what lives long is looked at in vain, so look seldom."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end as `asyncio.run` does, on uvloop."""
    settle_garbage()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def settle_garbage() -> None:
    """Exempt everything alive from collection (modules, descriptors, a recovered backlog), and collect seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
