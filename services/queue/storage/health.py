"""Whether the store can be written, as a table, and why not: a write that failed, a disk too full or not there."""

from __future__ import annotations

import logging
import math
from enum import Enum
from typing import Final

from services.clock import Clock
from services.queue.core import records
from services.queue.core.effects import Write
from services.queue.core.messages import (
    BacklogClosed,
    Cancel,
    Delete,
    Inspect,
    InspectQueue,
    WatchTokens,
    WorkerClosed,
)
from services.queue.items import Item
from services.queue.storage.reserve import LAST_ROOM_BYTES, ROOM_AGAIN_BYTES
from services.queue.storage.store import Store, StoreError, write_reopening

log = logging.getLogger(__name__)

DISK_CHECK_NS: Final = 200_000_000
"""Least time between looks at the free disk space: no disk writes the watermark's margin in less."""

HEAL_PAUSE_NS: Final = 1_000_000_000
"""Between attempts to write again after the store failed."""


class Ability(Enum):
    """What the queue can do with its store."""

    WRITES = "writes"
    TIGHT = "tight"
    """It writes what frees room: the reserve is given up, and little is left."""
    BROKEN = "broken"
    """A write has failed; the machine knows what the disk holds."""
    UNSURE = "unsure"
    """The same, and the machine may know what the disk does not: it could not be built anew."""


class Event(Enum):
    """What befalls it."""

    FAILED = "failed"
    """A write or a sync has failed, or still fails."""
    RUNS_OUT = "runs out"
    """The reserve is given up, and little room is left."""
    BUILT = "built"
    """The machine was built anew of what the disk holds."""
    NOT_BUILT = "not built"
    MENDED = "mended"
    """It writes again, and the machine knows what it holds."""


TABLE: Final[dict[tuple[Ability, Event], Ability]] = {
    (Ability.WRITES, Event.FAILED): Ability.BROKEN,
    (Ability.WRITES, Event.RUNS_OUT): Ability.TIGHT,
    (Ability.TIGHT, Event.FAILED): Ability.BROKEN,
    (Ability.TIGHT, Event.BUILT): Ability.TIGHT,
    (Ability.TIGHT, Event.NOT_BUILT): Ability.UNSURE,
    (Ability.TIGHT, Event.MENDED): Ability.WRITES,
    (Ability.BROKEN, Event.FAILED): Ability.BROKEN,
    (Ability.BROKEN, Event.BUILT): Ability.BROKEN,
    (Ability.BROKEN, Event.NOT_BUILT): Ability.UNSURE,
    (Ability.BROKEN, Event.MENDED): Ability.WRITES,
    (Ability.UNSURE, Event.FAILED): Ability.UNSURE,
    (Ability.UNSURE, Event.BUILT): Ability.BROKEN,
    (Ability.UNSURE, Event.NOT_BUILT): Ability.UNSURE,
}
"""What is not in it does not happen: a machine is built anew only after a failure, or as room runs out."""

UNANSWERED = (WatchTokens, WorkerClosed, BacklogClosed)
"""Messages that are answered with nothing."""

READ_ONLY = (Inspect, InspectQueue, *UNANSWERED)
"""Messages that change nothing in the store."""

SERVED: Final[dict[Ability, tuple[type, ...]]] = {
    Ability.TIGHT: (*READ_ONLY, Cancel, Delete),
    Ability.BROKEN: READ_ONLY,
    Ability.UNSURE: UNANSWERED,
}
"""Messages that are served where not all are."""

NO_ROOM: Final = (
    "the queue's disk is full and its reserve given up: only cancels and deletes are taken until there is room again"
)


class LittleRoomError(StoreError):
    """The store writes, and has too little room for all but what frees some."""


class StoreHealth:
    """What is known of the store's ability to write. One owner, the committer; others read."""

    def __init__(self, store: Store, clock: Clock, disk_free_min_bytes: int) -> None:
        """Take the store for able to write; of its disk nothing is known yet."""
        self._store = store
        self._clock = clock
        self._disk_free_min_bytes = disk_free_min_bytes
        self.ability = Ability.WRITES
        self._why = ""
        """Why it does not write everything."""
        self.disk_free_bytes = 0
        """When it was last looked at; 0 if that could not be told."""
        self.unreadable = ""
        """Why that could not be told; empty if it could. It says nothing of whether the store writes."""
        self._disk_checked_ns = 0
        self._probe_at_ns = 0

    @property
    def broken(self) -> str:
        """Why the store cannot write, or not all; empty if it can."""
        return "" if self.ability is Ability.WRITES else self._why

    @property
    def is_tight(self) -> bool:
        """Whether it cannot only towards what takes room."""
        return self.ability is Ability.TIGHT

    def _take(self, event: Event, why: str = "") -> None:
        self.ability = TABLE[self.ability, event]
        self._why = why or self._why

    def check_disk(self) -> None:
        """Look at the free disk space, unless that was done a moment ago."""
        now_ns = self._clock.now_ns()
        if now_ns - self._disk_checked_ns < DISK_CHECK_NS:
            return
        self._disk_checked_ns = now_ns
        try:
            self.disk_free_bytes = self._store.disk_free_bytes()
            fault = ""
        except StoreError as error:
            self.disk_free_bytes = 0
            fault = f"the queue's data directory cannot be read: {error}"
        if fault and fault != self.unreadable:
            log.error("%s", fault)
        elif self.unreadable and not fault:
            log.warning("the queue's data directory can be read again")
        self.unreadable = fault

    @property
    def free_bytes_if_known(self) -> float:
        """The free bytes of the disk; not a number while they cannot be told."""
        return math.nan if self.unreadable else float(self.disk_free_bytes)

    @property
    def is_disk_full(self) -> bool:
        """Whether submits are refused because of how much is on the disk, and nothing else is wrong with it."""
        return bool(self.refusal()) and (self.is_tight or not (self.broken or self.unreadable))

    def refusal(self) -> str:
        """Return why submits are refused for now; empty if they are not."""
        if self.broken:
            return self.broken
        if self.unreadable:
            return f"{self.unreadable}; submits are refused until it can"
        if self.disk_free_bytes < self._disk_free_min_bytes and self._disk_checked_ns:
            return (
                f"the queue's disk has {self.disk_free_bytes} bytes free, less than the watermark of "
                f"{self._disk_free_min_bytes}; submits are refused until there is room"
            )
        return ""

    def serves(self, item: Item) -> bool:
        """Return whether `item` can be served as things are; what changes nothing in the store can."""
        served = SERVED.get(self.ability)
        return served is None or isinstance(item, served)

    def failed(self, error: StoreError) -> None:
        """Note that a batch could not be written."""
        log.error("the store cannot write, refusing all changes: %s", error)
        self.still_fails(error)
        self._probe_at_ns = self._clock.now_ns() + HEAL_PAUSE_NS

    def notice_failure(self) -> None:
        """Be broken, to be probed at once, where another writer's write or sync failed: files and records have one."""
        if self.ability in (Ability.WRITES, Ability.TIGHT) and (failure := self._store.write_failure()):
            log.error("a write to the store failed, refusing all changes: %s", failure)
            self.still_fails(failure)
            self._probe_at_ns = 0

    def notice_little_room(self) -> bool:
        """Be broken towards all that takes room, where the reserve is given up and little is left beside.

        Return whether that is new.
        """
        if self.ability is not Ability.WRITES or not self._store.is_reserve_given_up():
            return False
        self.check_disk()
        if self.disk_free_bytes < LAST_ROOM_BYTES:
            self._disk_checked_ns = 0  # it may have been seen before the reserve was given up
            self.check_disk()
        if self.disk_free_bytes >= LAST_ROOM_BYTES or self.unreadable:
            return False
        self._take(Event.RUNS_OUT, NO_ROOM)
        log.error("%s", NO_ROOM)
        return True

    def still_fails(self, error: StoreError | str) -> None:
        """Note why the store cannot write now."""
        if not isinstance(error, LittleRoomError):
            self._take(Event.FAILED, f"the queue's store cannot write: {error}")

    def built(self, whole: bool) -> None:
        """Note whether the machine could be built anew of what the disk holds."""
        self._take(Event.BUILT if whole else Event.NOT_BUILT)

    def is_probe_due(self) -> bool:
        """Return whether to try a write again now; the next time is a pause later."""
        now_ns = self._clock.now_ns()
        if now_ns < self._probe_at_ns:
            return False
        self._probe_at_ns = now_ns + HEAL_PAUSE_NS
        return True

    def probe(self) -> None:
        """Write something harmless; if that fails though there is room to open the store, or in doubt, do so and retry.

        Raises StoreError if it cannot be written, or there is still little room.
        """
        if self.is_tight and self._store.is_reserve_given_up() and self._store.disk_free_bytes() < ROOM_AGAIN_BYTES:
            raise LittleRoomError(NO_ROOM)
        write_reopening(self._store, [Write(records.META, b"probe", b"")])

    def mended(self) -> None:
        """Note that the store writes again, and that the machine knows what it holds."""
        self._take(Event.MENDED)
        self._disk_checked_ns = 0  # what was seen of the disk is of the time before
        log.warning("the store writes again")
