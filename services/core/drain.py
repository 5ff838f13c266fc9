"""What operators last asked of a worker: the one state that says whether it drains, alike at both ends of a stream."""

from __future__ import annotations

from typing import Final, NamedTuple


class Drain(NamedTuple):
    """Whether a worker is to take no new grants. Of two the greater holds: the one with the higher version.

    Only the scheduler makes one, by a version more than the last that it or the worker knows of.
    """

    version: int = 0
    """0: nobody has asked for anything."""
    wanted: bool = False

    def changed(self) -> Drain:
        """Return the next one, which wants the opposite."""
        return Drain(self.version + 1, not self.wanted)


NEVER_ASKED: Final = Drain()
