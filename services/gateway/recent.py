"""The last requests this gateway was asked for: ids to look up, nothing that must not be lost."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

MOST_RECENT = 50
"""As many as somebody reads through; a request of before is found by its id."""


@dataclass(slots=True)
class Asked:
    """One request; of its content nothing is kept."""

    request_id: str
    path: str
    model: str
    """As asked for; may be empty."""
    channel: str
    """As asked for; empty is the queue's default."""
    begun_unix_s: float
    status: int = 0
    """HTTP status it was answered with; 0 while it is being answered."""
    seconds: float = 0.0
    """Until it was answered."""


class Recent:
    """At most MOST_RECENT requests, those that began last."""

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._asked: OrderedDict[str, Asked] = OrderedDict()

    def began(self, request_id: str, path: str, model: str, channel: str) -> None:
        """Remember a request that is durable now; one asked for again, under its key, is the latest again."""
        self._asked.pop(request_id, None)
        self._asked[request_id] = Asked(request_id, path, model, channel, time.time())
        if len(self._asked) > MOST_RECENT:
            self._asked.popitem(last=False)

    def ended(self, request_id: str, status: int) -> None:
        """Note how a request was answered, if it is still remembered."""
        asked = self._asked.get(request_id)
        if asked is not None:
            asked.status = status
            asked.seconds = round(time.time() - asked.begun_unix_s, 3)

    def latest_first(self) -> list[Asked]:
        """Return what is remembered."""
        return list(reversed(self._asked.values()))
