"""Whether an engine that lives has stopped working: something is in it, and no step comes.

A kernel or a collective that never returns leaves the engine's process alive and its runs without an end. Only the
absence of steps tells.
"""

from __future__ import annotations

from typing import Final

LOOKS: Final = 10
"""How often it is looked at in the time after which an engine is given up. From one look to the next no more than
that part counts: where the whole machine, or this process, was stopped for an hour, that is one look."""


class Watchdog:
    """Adds up the time for which something was in the engine since its last step.

    It adds up over runs that come and go: those that are aborted, or whose deadlines pass, show no step either.
    """

    def __init__(self, stall_ns: int) -> None:
        """Give an engine up after `stall_ns` without a step; 0 means never."""
        self.stall_ns = stall_ns
        self._look_ns = -(-stall_ns // LOOKS)
        self._silent_ns = 0
        self._looked_ns = 0
        self._at_work = False
        """Whether something was in the engine at the last look; nothing changes between two of them."""
        self._stepped = False
        self.gave_up = False
        """Whether an engine has been given up."""

    @property
    def due_ns(self) -> int | None:
        """When it is to be looked at again; None while nothing is in the engine."""
        return self._looked_ns + self._look_ns if self._at_work and self.stall_ns else None

    def stepped(self) -> None:
        """Note that the engine has made a step."""
        self._stepped = True

    def look(self, at_work: bool, now_ns: int) -> bool:
        """Return whether the engine is to be given up, once for each time; `at_work`: something is in it from now."""
        if self._stepped:
            self._silent_ns = 0
        elif self._at_work:
            self._silent_ns += min(now_ns - self._looked_ns, self._look_ns)
        self._stepped, self._at_work, self._looked_ns = False, at_work, now_ns
        if not self.stall_ns or self._silent_ns < self.stall_ns:
            return False
        self._silent_ns = 0
        self.gave_up = True
        return True
