"""The event loop every service runs on, and how it shares processors and memory with what is beside it."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import uvloop

from services.pulse import Pulse

T = TypeVar("T")

GC_THRESHOLDS = (50_000, 4, 500)
"""New objects before a collection of the youngest, and how many of those before the next older ones. A request makes
some hundred objects that die by their reference counts; only what lives long is looked at in vain, so look seldom.

Where a backlog grows every new object lives: the second number is how many times 50,000 are looked at in one go while
the loop stands still. Each is looked at twice in any case, so that it is small costs nothing. The third keeps a look at
everything as seldom as 100 million objects."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end as `asyncio.run` does, on uvloop."""
    settle_garbage()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def run_service(main: Coroutine[Any, Any, T]) -> T:
    """Run a service: `run`, nobody else on the machine is interrupted for it, and its metrics tell if it hangs."""
    interrupt_nobody()
    return run(_beating(main, Pulse()))


async def _beating(main: Coroutine[Any, Any, T], pulse: Pulse) -> T:
    pulse.beat()
    return await main


def settle_garbage() -> None:
    """Exempt everything alive from collection (modules, descriptors, a recovered backlog), and collect seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def interrupt_nobody() -> None:
    """Put this thread, and those it starts from now on, into the kernel's class for batch work (sched(7)).

    Who wakes up in it does not take the processor from who runs. A service that is woken for a message while another
    one works on a batch would switch processes for every few messages; so it finds more of them at once. On a processor
    that is free it starts as soon as in any class. A class that somebody chose is kept.
    """
    # Linux has it, and a sandbox may forbid it.
    with suppress(AttributeError, OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
