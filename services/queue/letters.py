"""Says in the log of which requests the queue has given up, so that who looks for one there finds it."""

from __future__ import annotations

import logging
from typing import Final

from services.logs import about
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
        self._said = 0
        self._unsaid = 0

    def note(self, ended: Ended, code: str) -> None:
        """Say of which request, and of what it died; not the failure's message, which may quote what a client sent."""
        if self._said >= MOST_LINES:
            self._unsaid += 1
            return
        self._said += 1
        text = "%s is a dead letter after %d attempts: %s"
        name, trace = ended.request_id, about(ended.request_id, ended.meta.traceparent)
        log.warning(text, name, ended.attempts, shown(code), extra=trace)

    def count(self) -> None:
        """Say how many had no line since the last count, and have lines for as many again. To be called each second."""
        if self._unsaid:
            log.warning("%d more requests are dead letters", self._unsaid)
        self._said = self._unsaid = 0
