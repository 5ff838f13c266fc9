"""How many announced requests of each channel may wait here: a window onto the queue's lines.

So that the scheduler's work and memory do not grow with what waits at the queue; the queue announces more as these
leave. Who is set aside does not leave: there is room for as many beside those, so that the line behind them has its
turns. What waits for a model that nobody serves does not leave, so the queue is told with each window which models
somebody serves, and lets the others take none of their room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from services.scheduler.core.fleet import Fleet
from services.scheduler.core.messages import SetWindow
from services.scheduler.core.sharing.line import Line

LEAST_REQUESTS: Final = 64
"""Announcements for one model that a channel may have waiting even for a tiny fleet, so that lines stay visible before
a worker comes."""

FACTOR: Final = 2
"""Windows hold this many times what the fleet runs at once: if all of it ended in one step, as many more are known."""


SHARED_REQUESTS: Final = 16_384
"""Announcements of a channel that there is room for beside those, shared by its lines that are as long as a window:
their memory is some tens of megabytes then."""


class Windows:
    """The windows that the queue was told of. Owns them."""

    def __init__(self, fleet: Fleet, lines_of: Callable[[str], list[Line]]) -> None:
        """Size windows for `fleet`, and for those aside in the `lines_of` a channel; the queue has no channel yet."""
        self._fleet = fleet
        self._lines_of = lines_of
        self._channels: tuple[str, ...] = ()
        self._told: dict[str, SetWindow] = {}

    def opened(self, channels: Iterable[str]) -> None:
        """Note that a queue opened its stream, with these channels, and knows of no window."""
        self._channels = tuple(channels)
        self._told.clear()

    def changed(self, channels: Iterable[str]) -> None:
        """Note which channels the queue has now; a line that is made anew there begins without a window."""
        self._channels = tuple(channels)
        self._told = {name: window for name, window in self._told.items() if name in self._channels}

    def closed(self) -> None:
        """Note that the queue's stream ended."""
        self.opened(())

    def news(self) -> list[SetWindow]:
        """Return what the queue is to be told: windows that differ from those it knows."""
        limit = max(LEAST_REQUESTS, FACTOR * self._fleet.sequences())
        models = self._fleet.models()
        windows = [SetWindow(name, limit + self._beside(name, limit), models) for name in self._channels]
        news = [window for window in windows if self._told.get(window.channel) != window]
        for window in news:
            self._told[window.channel] = window
        return news

    def _beside(self, channel: str, limit: int) -> int:
        """Return the room beside a channel's window: twice those aside, so that a long row of them is soon passed.

        The queue gives it to each model alike, and those take it of which a whole window waits.
        """
        lines = self._lines_of(channel)
        most_aside = max((line.aside for line in lines), default=0)
        if not most_aside:
            return 0
        long = sum(len(line) >= limit and bool(self._fleet.serving(line.model)) for line in lines)
        return min(FACTOR * most_aside, SHARED_REQUESTS // max(long, 1))
