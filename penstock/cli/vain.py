"""Says of what waits that no worker takes it: none is there, none serves its model, or all that do are drained."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeAlias

from penstock.client import Client
from penstock.errors import PenstockError
from penstock.fleet import drained_of, names_of, young_for_s

WHY_AFTER_S = 2.0
"""What has had no answer for so long may be waiting in vain."""

LOOK_EVERY_S = 5.0
"""Between two looks at who serves what: workers come and go within seconds."""

SAY_AGAIN_S = 600.0
"""After which what still holds is said again: often enough for who looks into a log now and then."""

UNDRAIN = "none takes more, until `penstock drain WORKER --undo` has one take requests again"

Say: TypeAlias = Callable[[str], None]
"""Prints a line beside whatever else the command shows."""


class Look(NamedTuple):
    """What one look at the scheduler has told."""

    names: frozenset[str] = frozenset()
    drained: frozenset[str] = frozenset()
    """Those of them that only workers serve which take no more."""
    young_for_s: float = 0.0
    why: str = ""
    """Why nothing."""

    @property
    def all_drained(self) -> bool:
        """Whether there are workers, and none takes any request."""
        return bool(self.names) and self.names == self.drained


InVain: TypeAlias = Callable[[Look], Iterable[str]]
"""Returns what is to be said of what waits, where the fleet is as a look has told."""

Waits: TypeAlias = Callable[[Client], Awaitable[bool]]
"""Asks the queue whether any of it waits. What runs is finished, also by a worker that takes no more."""


async def ask_fleet(client: Client) -> Look:
    """Ask the scheduler who serves what."""
    try:
        status = await client.fleet(names_only=True)
    except PenstockError as error:
        return Look(why=str(error))
    return Look(names_of(status), drained_of(status), young_for_s(status))


@asynccontextmanager
async def telling(queue: str, scheduler: str, in_vain: InVain, waits: Waits, say: Say) -> AsyncIterator[None]:
    """Say meanwhile what is waited for in vain: when it begins, and now and then for as long as it holds."""
    task = asyncio.create_task(_tell(queue, scheduler, in_vain, waits, say))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _tell(queue: str, scheduler: str, in_vain: InVain, waits: Waits, say: Say) -> None:
    said_s: dict[str, float] = {}
    await asyncio.sleep(min(WHY_AFTER_S, LOOK_EVERY_S))
    async with Client(queue, scheduler, retry_for_s=0) as client:
        while True:
            texts = await _in_vain_now(client, in_vain, waits)
            if texts is not None:
                said_s = {text: said_s[text] for text in texts if text in said_s}
                now_s = time.monotonic()
                for text in texts:
                    if text not in said_s or now_s - said_s[text] >= SAY_AGAIN_S:
                        said_s[text] = now_s
                        say(f"waiting: {text}")
            await asyncio.sleep(LOOK_EVERY_S)


async def _in_vain_now(client: Client, in_vain: InVain, waits: Waits) -> list[str] | None:
    """Return what is to be said now; None if that is not known.

    That is so of a scheduler that does not answer, or that workers may still come back to, and without the queue.
    """
    look = await ask_fleet(client)
    if look.why or look.young_for_s:
        return None
    try:
        return texts if (texts := list(in_vain(look))) and await waits(client) else []
    except PenstockError:
        return None
