"""The life of a request between its announcement and its claim: states, inputs, and the table that moves it.

    absent ── announced ──▶ waiting ── booked ──▶ granted ── claimed ──▶ absent

The two streams a request is heard of on, Backlog and Credits, are ordered each
in itself but not with each other, and both can break. Three more states keep that
harmless. The rule behind them: *a request may wait only if the queue announced
it on the present Backlog stream*, because only then will `Gone` tell of its end.

- unlisted: a worker holds credits for it, the queue has not announced it on the present stream
  (it was granted under an earlier one, or is known from a worker's inventory only);
- relisted: a worker holds credits for it, and the queue has announced it since. If the credits come home for
  whatever reason and the queue has not said `Gone`, it still waits. A claim too many is refused by the queue;
  a request forgotten here would wait for ever;
- parted: its credits came home as if it had been claimed, and the queue's `Gone` is on its way. If that does not
  come, the worker was wrong, and it still waits.
"""

from __future__ import annotations

import enum
from typing import Final


class State(enum.Enum):
    """Where a request is between its announcement and its claim."""

    __hash__ = object.__hash__  # as good for singletons as Enum's own, which is a call into Python at every look-up

    ABSENT = "absent"
    WAITING = "waiting"
    GRANTED = "granted"
    UNLISTED = "unlisted"
    RELISTED = "relisted"
    PARTED = "parted"


class Event(enum.Enum):
    """What can happen to it."""

    __hash__ = object.__hash__  # as good for singletons as Enum's own, which is a call into Python at every look-up

    ANNOUNCED = "announced"  # for the first time, or again with the attempt that is known
    REATTEMPTED = "reattempted"  # announced with a higher attempt: the granted one has failed meanwhile
    BOOKED = "booked"
    ADOPTED = "adopted"  # a worker's inventory names it
    CLAIMED = "claimed"
    ENDED = "ended"
    RETURNED = "returned"  # its credits came home and nobody has claimed it
    RELEASED = "released"  # its credits came home after the claim, or because the claim was refused
    BACKLOG_LOST = "backlog_lost"
    OVERDUE = "overdue"  # the queue has not said that a parted one is gone


LIFECYCLE: Final[dict[tuple[State, Event], State]] = {
    (State.ABSENT, Event.ANNOUNCED): State.WAITING,
    (State.ABSENT, Event.ADOPTED): State.UNLISTED,
    (State.WAITING, Event.ANNOUNCED): State.WAITING,
    (State.WAITING, Event.BOOKED): State.GRANTED,
    (State.WAITING, Event.ADOPTED): State.RELISTED,
    (State.WAITING, Event.CLAIMED): State.ABSENT,
    (State.WAITING, Event.ENDED): State.ABSENT,
    (State.WAITING, Event.BACKLOG_LOST): State.ABSENT,
    (State.GRANTED, Event.ANNOUNCED): State.RELISTED,
    (State.GRANTED, Event.REATTEMPTED): State.WAITING,
    (State.GRANTED, Event.CLAIMED): State.ABSENT,
    (State.GRANTED, Event.ENDED): State.ABSENT,
    (State.GRANTED, Event.RETURNED): State.WAITING,
    (State.GRANTED, Event.RELEASED): State.PARTED,
    (State.GRANTED, Event.BACKLOG_LOST): State.UNLISTED,
    (State.UNLISTED, Event.ANNOUNCED): State.RELISTED,
    (State.UNLISTED, Event.REATTEMPTED): State.WAITING,
    (State.UNLISTED, Event.RETURNED): State.ABSENT,
    (State.UNLISTED, Event.RELEASED): State.ABSENT,
    (State.UNLISTED, Event.BACKLOG_LOST): State.UNLISTED,
    (State.RELISTED, Event.ANNOUNCED): State.RELISTED,
    (State.RELISTED, Event.REATTEMPTED): State.WAITING,
    (State.RELISTED, Event.CLAIMED): State.ABSENT,
    (State.RELISTED, Event.ENDED): State.ABSENT,
    (State.RELISTED, Event.RETURNED): State.WAITING,
    (State.RELISTED, Event.RELEASED): State.WAITING,
    (State.RELISTED, Event.BACKLOG_LOST): State.UNLISTED,
    (State.PARTED, Event.ANNOUNCED): State.WAITING,
    (State.PARTED, Event.REATTEMPTED): State.WAITING,
    (State.PARTED, Event.ADOPTED): State.RELISTED,
    (State.PARTED, Event.CLAIMED): State.ABSENT,
    (State.PARTED, Event.ENDED): State.ABSENT,
    (State.PARTED, Event.BACKLOG_LOST): State.ABSENT,
    (State.PARTED, Event.OVERDUE): State.WAITING,
}
"""(state, event) -> next state. A pair that is absent is refused: it changes nothing and is counted.

What else happens follows from the states, in `Backlog`: one that waits is in its line, and counted; one for which a
worker holds credits names the epoch; of one that parted it is noted since when; of an absent one nothing is kept. And
what ends while a worker holds credits for it is recalled from there.
"""
