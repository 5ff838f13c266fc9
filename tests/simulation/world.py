"""Virtual time, one seed, and processes that wake up, stall, die and come back."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

MS = 1_000_000
START_NS = 1_700_000_000_000_000_000
"""Some Unix time to begin at."""

WAKE_NS = MS // 10
"""Most time between a message's arrival and the wake-up that takes it, with everything that came meanwhile."""


class BrokenPromiseError(AssertionError):
    """A promise is broken."""


def demand(kept: object, text: str) -> None:
    """Raise BrokenPromiseError with `text` unless the promise is kept."""
    if not kept:
        raise BrokenPromiseError(text)


class World:
    """Events in order of virtual time; the only source of chance and of time in a simulation."""

    def __init__(self, seed: int, verbose: bool = False) -> None:
        """Begin at START_NS with nothing to do; keep a transcript if `verbose`."""
        self.rng = random.Random(seed)
        self._now_ns = START_NS
        self.events = 0
        self.verbose = verbose
        self.log: list[str] = []
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def now_ns(self) -> int:
        """Return the virtual Unix time; makes the world a `Clock`."""
        return self._now_ns

    def at(self, when_ns: int, action: Callable[..., None], *args: Any) -> None:
        """Do `action` at virtual time `when_ns`; what is planned for one moment happens in the order of planning."""
        self._order += 1
        heapq.heappush(self._heap, (when_ns, self._order, action, args))

    def after(self, delay_ns: int, action: Callable[..., None], *args: Any) -> None:
        """Do `action` after `delay_ns`."""
        self.at(self._now_ns + delay_ns, action, *args)

    def draw_ns(self, most_ns: int) -> int:
        """Draw a time from 1 to `most_ns`."""
        return 1 + int(self.rng.random() * most_ns)

    def chance(self, share: float) -> bool:
        """Return True for a `share` of calls."""
        return share > 0 and self.rng.random() < share

    def note(self, *words: object) -> None:
        """Write a line into the transcript."""
        if self.verbose:
            self.log.append(f"{(self._now_ns - START_NS) / MS:10.3f} " + " ".join(map(str, words)))

    def step(self) -> bool:
        """Do the next event; False if there is none."""
        if not self._heap:
            return False
        self._now_ns, _, action, args = heapq.heappop(self._heap)
        self.events += 1
        action(*args)
        return True


class Process:
    """One process: an inbox, a loop that takes all of it at each wake-up, and timers; all of it dies in a crash."""

    def __init__(self, world: World, name: str) -> None:
        """Make a process that is not running yet."""
        self.world = world
        self.name = name
        self.up = False
        self.life = 0
        self._stalled_until_ns = 0
        self._inbox: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._waking = False

    # ---- to be filled in ----

    def boot(self) -> None:
        """Begin a new life."""

    def died(self) -> None:
        """Forget the life that ended; the streams have been cut."""

    def woke(self) -> None:
        """End a wake-up, after everything that was ready has been taken."""

    # ---- life ----

    def start(self) -> None:
        """Begin a new life, unless one is in progress."""
        if not self.up:
            self.up = True
            self.life += 1
            self.world.note(self.name, "starts")
            self.boot()

    def stop(self, restart_ns: int) -> None:
        """End this life now; the next one begins after `restart_ns`."""
        self.up = False
        self._stalled_until_ns = 0
        self._waking = False
        self._inbox.clear()
        self.died()
        self.world.after(restart_ns, self.start)

    def stall(self, duration_ns: int) -> None:
        """Do nothing for a while (SIGSTOP); what arrives waits."""
        self._stalled_until_ns = max(self._stalled_until_ns, self.world.now_ns() + duration_ns)

    @property
    def is_stalled(self) -> bool:
        """Whether it is stopped now."""
        return self._stalled_until_ns > self.world.now_ns()

    def resume(self) -> None:
        """End a stall."""
        if self.is_stalled:
            self._stalled_until_ns = 0
            if self._waking:
                self.world.after(0, self._wake, self.life)

    # ---- the loop ----

    def post(self, action: Callable[..., None], *args: Any) -> None:
        """Have `action` done at the next wake-up."""
        if not self.up:
            return
        self._inbox.append((action, args))
        if not self._waking:
            self._waking = True
            self.world.after(self.world.draw_ns(WAKE_NS), self._wake, self.life)

    def timer(self, delay_ns: int, action: Callable[..., None], *args: Any) -> None:
        """Have `action` done at a wake-up after `delay_ns`, if this life lasts so long."""
        self.world.after(delay_ns, self._ring, self.life, action, args)

    def _ring(self, life: int, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        if life == self.life:
            self.post(action, *args)

    def _wake(self, life: int) -> None:
        if life != self.life or not self._waking:
            return
        if self.is_stalled:
            self.world.at(self._stalled_until_ns, self._wake, life)
            return
        self._waking = False
        inbox, self._inbox = self._inbox, []
        for action, args in inbox:
            action(*args)
            if life != self.life or not self.up:
                return
        self.woke()
