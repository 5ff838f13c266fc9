"""Whose the worker's name is: what its two streams know of it together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from services.rpc.names import ASK_S, NameTakenError


class Claim:
    """The name at one peer: whether it has let this instance in, or says that another has the name."""

    def __init__(self, ask_s: float = ASK_S, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """Ask for `ask_s` seconds for a name that another instance has, if this one was never let in."""
        self.let_in = asyncio.Event()
        """Set for good when the peer has taken this instance in."""
        self.ours = asyncio.Event()
        """Clear from when the peer says that the name is another's until it lets this instance in."""
        self.ours.set()
        self.on_lost: Callable[[], None] = lambda: None
        """Called whenever the peer says so."""
        self._ask_s = ask_s
        self._monotonic_s = monotonic_s
        self._asked_since_s: float | None = None

    def won(self) -> None:
        """Note that the peer lets this instance in."""
        self.let_in.set()
        self.ours.set()

    def lost(self, reason: str) -> None:
        """Note that the name is another's; raises NameTakenError when this instance has asked for long enough.

        One that was let in before goes on asking: it has work, and is the one that the name belongs to.
        """
        self.ours.clear()
        self.on_lost()
        now_s = self._monotonic_s()
        if self._asked_since_s is None:
            self._asked_since_s = now_s
        if not self.let_in.is_set() and now_s - self._asked_since_s >= self._ask_s:
            raise NameTakenError(reason)


class Name:
    """The name at both peers.

    There is no stream to the scheduler from when the queue says that the name is another instance's until it lets this
    one in: two instances that have both been let in once might hold one stream each, and neither do any work.
    """

    def __init__(self, ask_s: float = ASK_S) -> None:
        """Have asked nobody yet; `ask_s` as for each claim."""
        self.at_scheduler = Claim(ask_s)
        self.at_queue = Claim(ask_s)
