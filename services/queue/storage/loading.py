"""A start that is still reading its store, while submits are accepted already.

A submit needs the counters and a look at the idempotency keys in the store, nothing else; every other message is about
requests that may not have been read yet, and waits in order until all of them have been.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from services.queue.core.entry import Entry, Recovered
from services.queue.core.messages import Adopt, Submit
from services.queue.storage.recovery import Recovery

if TYPE_CHECKING:
    from services.queue.items import Item

FIRST_REQUESTS = 20_000
"""Requests read before the queue serves at all: in about a quarter of a second, and with every check of their rows done
before the port is open. Only what is beyond is read while submits come in."""


class Loading:
    """The requests a start has not taken in yet, and the messages that wait for them."""

    def __init__(self, recovery: Recovery) -> None:
        """Read the first requests; raises StoreUnusableError if the store is damaged."""
        self._pages: Iterator[list[Entry]] = recovery.pages()
        self.first = Recovered(recovery.counters)
        self._held: list[Item] = []
        while len(self.first.entries) < FIRST_REQUESTS and (page := next(self._pages, None)) is not None:
            self.first.entries += page

    def read(self) -> Adopt | None:
        """Return the next requests, or None after the last. Blocks on the disk; raises StoreUnusableError."""
        page = next(self._pages, None)
        return None if page is None else Adopt(tuple(page))

    def admit(self, items: Sequence[Item]) -> list[Item]:
        """Return those of `items` that need no request to be known, and keep the others."""
        admitted: list[Item] = []
        for item in items:
            early = isinstance(item, Submit) or getattr(item, "submits", False)
            (admitted if early else self._held).append(item)
        return admitted

    @property
    def held(self) -> int:
        """Number of messages that are kept."""
        return len(self._held)

    def take_held(self) -> list[Item]:
        """Return, in order, what waited."""
        held, self._held = self._held, []
        return held
