"""Gives disk space back by the clock, beside everything else the queue does."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from services.queue.storage.health import StoreHealth
from services.queue.storage.reclaim import REST, SHORT_BOUND_BYTES
from services.queue.storage.store import Store, StoreError

log = logging.getLogger(__name__)

LOOK_S: Final = 5.0
"""Between looks at what is dead, each some reads of RocksDB's statistics."""

TOLD_BYTES: Final = 1024 * 1024
"""Less is not worth a line in the log."""

REST_IF_SHORT: Final = 1.0
"""The same while room is short, also where that begins during a rest: half of the disk's time then."""

BOUND_SHARE: Final = 8
"""An eighth of the watermark may be dead while there is room: little beside what is kept free, and compactions enough
apart for a flush to be worth it."""

LEAST_BOUND_BYTES: Final = 8 * 1024 * 1024
"""Where the watermark is small, or 0."""


class Reclaimer:
    """Two loops, a thread for each: a compaction takes as long as it takes, and the reserve waits for none."""

    def __init__(
        self, store: Store, health: StoreHealth, disk_free_min_bytes: int, count: Callable[[int], None]
    ) -> None:
        """Give back space of `store`, whatever is dead while room is short: while less than twice `disk_free_min_bytes`
        is free, or the reserve is given up.

        Call `count` with the bytes.
        """
        self._store = store
        self._health = health
        self._kept_bytes = disk_free_min_bytes
        self._bound_bytes = max(disk_free_min_bytes // BOUND_SHARE, LEAST_BOUND_BYTES)
        self._count = count
        self._threads = ThreadPoolExecutor(2, "reclaim")

    async def run(self, loaded: asyncio.Event) -> None:
        """Look for ever, once the store is `loaded`: until then the disk's time is needed for that."""
        await loaded.wait()
        try:
            await asyncio.gather(self._give_back(), self._keep_reserve())
        finally:
            self._threads.shutdown(wait=False)  # to close the store ends what they do

    async def _give_back(self) -> None:
        while True:
            compacted_s, rested_s = await self.look(), 0.0
            while not rested_s or rested_s < compacted_s * (REST_IF_SHORT if self._is_short() else REST):
                await asyncio.sleep(LOOK_S)
                rested_s += LOOK_S
                self._health.check_disk()

    async def _keep_reserve(self) -> None:
        while True:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._store.keep_reserve)
            await asyncio.sleep(LOOK_S)

    async def look(self) -> float:
        """Give back what is worth it; return the seconds that was compacted for it."""
        self._health.check_disk()
        if (self._health.broken and not self._health.is_tight) or self._health.unreadable:
            return 0.0  # it is looked after
        bound_bytes = SHORT_BOUND_BYTES if self._store.is_reserve_given_up() else self._bound_bytes
        began_s, before_s = time.monotonic(), self._store.compacted_s()
        try:
            loop = asyncio.get_running_loop()
            ask, is_low = self._store.reclaim, self._is_short()
            freed = await loop.run_in_executor(self._threads, ask, bound_bytes, is_low, self._kept_bytes)
        except StoreError as error:
            log.warning("disk space is not given back now: %s", error)
            freed = 0
        self._count(freed)
        if freed >= TOLD_BYTES:
            log.info("%d MiB of the disk came back in %.1f s", freed >> 20, time.monotonic() - began_s)
        return max(0.0, self._store.compacted_s() - before_s)  # it counts anew once the store is opened again

    def _is_short(self) -> bool:
        return self._health.disk_free_bytes < 2 * self._kept_bytes or self._store.is_reserve_given_up()
