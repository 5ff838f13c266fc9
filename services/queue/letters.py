"""Says in the log of which requests the queue has given up, so that who looks for one there finds it."""

from __future__ import annotations

import logging
from typing import Final

from services.logs import about
from services.paced import Paced
from services.queue.core.effects import Ended
from services.quoting import shown

log = logging.getLogger(__name__)

MOST_LINES: Final = 20
"""Between two counts, a second apart: enough for a worker's death, while an outage that leaves thousands, all of one
cause, keeps no disk busy with them."""


class DeadLetters:
    """A line for each dead letter; of too many at once the rest are counted."""

    def __init__(self) -> None:
        """Have said nothing."""
        self._lines = Paced(log, logging.WARNING, MOST_LINES, "%d more requests are dead letters")

    def note(self, ended: Ended, code: str) -> None:
        """Say of which request, and of what it died; not the failure's message, which may quote what a client sent."""
        text = "%s is a dead letter after %d attempts: %s"
        name, trace = ended.request_id, about(ended.request_id, ended.meta.traceparent)
        self._lines.say(text, name, ended.attempts, shown(code), extra=trace)

    def count(self) -> None:
        """Say how many had no line since the last count, and have lines for as many again. To be called each second."""
        self._lines.count()
