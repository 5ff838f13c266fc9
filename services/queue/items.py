"""What the committer is given: messages for the machine, or what makes one of them after a look into the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from services.queue.core.messages import Message
from services.queue.storage.store import Store


class Lookup(NamedTuple):
    """A message that needs the store first; `read` runs off the loop, unless `glance` knows enough without the disk."""

    ticket: int
    read: Callable[[Store], Message]
    glance: Callable[[Store], Message | None] = lambda _store: None
    submits: bool = False
    """Whether the message is a Submit: it can be handled while the store is still being loaded."""


Item: TypeAlias = Message | Lookup
