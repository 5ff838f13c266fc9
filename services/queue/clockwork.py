"""What the queue does by the clock: ticks, looks at disk, clock and commits, spot checks, sweeps of what is old."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from penstock.limits import KEEPALIVE_TIMEOUT_MS
from services.clock import SystemClock
from services.queue.admin import Admin
from services.queue.committer import Committer, RefusedError
from services.queue.core.messages import Message, StoodStill, Tick
from services.queue.files.shelf import Shelf, ShelfRefusedError
from services.queue.items import Lookup
from services.queue.letters import DeadLetters
from services.queue.metrics import QueueMetrics
from services.queue.settings import QueueSettings
from services.queue.storage.lives import Lives
from services.queue.storage.spot_check import SpotCheck
from services.queue.storage.store import Store, StoreError
from services.queue.watch.hub import WatchHub
from services.rpc.limits import PING_TIMEOUT_OF_SERVICES_MS

log = logging.getLogger(__name__)

TICK_S = 0.2
"""Between looks at deadlines and leases: what a deadline may be late by, but for many at once."""

STOOD_STILL_S = 1.0
"""A tick that is late by more finds a process that was stopped, or starved, and that has heard nobody meanwhile."""

PATIENCE_S = min(PING_TIMEOUT_OF_SERVICES_MS, KEEPALIVE_TIMEOUT_MS) / 1000
"""How long a worker's probe goes unanswered before its stream ends: a shorter standstill ends none."""

CLOCK_STEP_S = 2.0
"""From here on a clock that was set is told of, once for each time; NTP's slewing stays below it for hours."""

HOUSEKEEPING_TICKS = 5
"""Ticks between updates of gauges."""

SWEEP_S = 1.0
"""Between sweeps of what is old."""

HANGS_S = 15.0
"""A commit that takes longer hangs: more than a disk that answers takes for all that RocksDB keeps in memory (64 MiB),
at 5 MB/s, which is the most that a commit, or a backup between two, has to wait for. `PenstockCommitHangs` has it too.
"""

REPORT_S = 1.0
"""Between looks whether one does."""


class Clockwork:
    """The queue's loops by the clock, which run until cancelled. Ticks and sweeps begin once the store is loaded."""

    def __init__(
        self,
        settings: QueueSettings,
        clock: SystemClock,
        committer: Committer,
        hub: WatchHub,
        admin: Admin,
        shelf: Shelf,
        metrics: QueueMetrics,
        lives: Lives,
        letters: DeadLetters,
    ) -> None:
        """Post to `committer`, sweep by `admin` and `shelf`, show `metrics`, note the clock in `lives`, count `letters`
        each second."""
        self._settings = settings
        self._clock = clock
        self._committer = committer
        self._hub = hub
        self._admin = admin
        self._shelf = shelf
        self._metrics = metrics
        self._lives = lives
        self._letters = letters
        self._spots = SpotCheck(metrics.audit_violations.inc)
        self._told_behind_s = 0.0

    async def ticks(self) -> None:
        """Tick for ever."""
        ticks = 0
        await self._until_loaded()
        while True:
            began_ns = self._clock.now_ns()
            self._committer.post(Tick(began_ns))
            if ticks % HOUSEKEEPING_TICKS == 0:
                self._keep_house()
            ticks += 1
            if await self._has_stood_still(began_ns):
                await self._hear_first()

    async def _has_stood_still(self, began_ns: int) -> bool:
        """Wait until the next tick is due after `began_ns`; if the queue stood still, tell the machine."""
        await asyncio.sleep(TICK_S)
        stood_ns = self._clock.now_ns() - began_ns - int(TICK_S * 1e9)
        if stood_ns <= STOOD_STILL_S * 1e9:
            return False
        self._committer.post(StoodStill(stood_ns))
        if stood_ns >= PATIENCE_S * 1e9:
            log.warning("the queue stood still for %.1f s; its workers have a lease to return", stood_ns / 1e9)
        return True

    async def _hear_first(self) -> None:
        """Wait: renewals are to be read, and workers are about to return, before leases may be found to be over.

        What counts is time in which the queue hears. One that is late again and again hears a little in between, and
        comes to an end of it: deadlines, dead workers and a failed store wait for the next tick.
        """
        left_ns = int(self._settings.worker_grace_s * 1e9)
        while left_ns > 0:
            began_ns = self._clock.now_ns()
            has_stood_still = await self._has_stood_still(began_ns)
            left_ns -= int(TICK_S * 1e9) if has_stood_still else self._clock.now_ns() - began_ns

    def commit_age_s(self) -> float:
        """Return how long the older of the commits under way has taken so far; 0 if none is. Any thread may ask."""
        return max(self._committer.commit_age_s(), self._shelf.commit_age_s())

    async def reports(self, report: Callable[[bool], None]) -> None:
        """Say for ever whether changes are taken, whenever that is otherwise: not while a commit hangs."""
        hangs = False
        while True:
            age_s = self.commit_age_s()
            if hangs is not (age_s > HANGS_S):
                hangs = not hangs
                report(not hangs)
                if hangs:
                    log.error("a commit has been under way for %.0f s; until it ends no change is taken", age_s)
                else:
                    log.warning("the commit has ended; changes are taken again")
            await asyncio.sleep(REPORT_S)

    async def sweeps(self) -> None:
        """Note the clock, and delete what is old by it, for ever.

        Beside the ticks, since a sweep after a burst takes as long as it takes.
        """
        ttl_ns = int(self._settings.result_ttl_s * 1e9)
        await self._committer.loaded.wait()
        while True:
            await self._note_clock()
            await self.sweep(ttl_ns)
            await asyncio.sleep(SWEEP_S)

    async def sweep(self, ttl_ns: int) -> None:
        """Delete the results that are older, and files and records by their own time."""
        for sweep in (partial(self._admin.sweep, ttl_ns), self._shelf.sweep):
            try:
                await sweep()
            except (StoreError, RefusedError, ShelfRefusedError) as error:
                log.warning("what is old is not deleted now: %s", error)

    async def _note_clock(self) -> None:
        now_ns = self._clock.now_ns()
        if not self._lives.is_note_due(now_ns):
            return
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._lives.note, now_ns)
        except StoreError as error:
            log.warning("the clock is not noted now: %s", error)

    async def _until_loaded(self) -> None:
        """Return once every request of the store is known, and say so."""
        began_ns = self._clock.now_ns()
        while not self._committer.loaded.is_set():  # workers return meanwhile, and their leases last
            await self._has_stood_still(self._clock.now_ns())
        machine = self._committer.machine
        seconds = (self._clock.now_ns() - began_ns) / 1e9
        log.info(
            "loaded %d requests; the last of them %.1f s after the first submits", len(machine.book.entries), seconds
        )
        for line in machine.overview().lines:
            if line.ready and line.channel not in self._settings.channels:
                log.warning("%d requests wait in channel %r, which is not configured", line.ready, line.channel)

    def _keep_house(self) -> None:
        health, machine = self._committer.health, self._committer.machine
        health.check_disk()
        self._look_at_clock()
        self._letters.count()
        self._metrics.show(machine.overview(), self._clock.now_ns(), len(self._hub), health.free_bytes_if_known)
        if health.unreadable:
            self._metrics.store_failures.inc()  # it has no end by itself, and so has its alert none
        self._committer.post(Lookup(0, self._spot_check))

    def _look_at_clock(self) -> None:
        """Tell of a clock that was set: a lease must not feel it, and deadlines are judged by the same clock."""
        behind_s = self._clock.behind_s()
        self._metrics.clock_behind.set(round(behind_s, 3))
        if abs(behind_s - self._told_behind_s) > CLOCK_STEP_S:
            self._told_behind_s = behind_s
            if abs(behind_s) <= CLOCK_STEP_S:
                log.warning("this machine's clock was set, and agrees with the queue's own again")
                return
            log.warning(
                "this machine's clock was set: it is %.1f s %s the queue's own, which goes on from its start and "
                "judges deadlines and the age of results until the queue is restarted",
                abs(behind_s),
                "ahead of" if behind_s > 0 else "behind",
            )

    def _spot_check(self, store: Store) -> Message:
        """Compare a few requests with their rows; runs on the committing thread, while the machine stands still."""
        return self._spots.look(store, self._committer.machine.book)
