"""The life of a request as a table: (state, input) -> (next state, action). A pair that is absent is refused.

It ends with DONE: what is left then is a result, a row of the store, which is deleted as one.
"""

from __future__ import annotations

from enum import Enum, IntEnum


class Outcome(IntEnum):
    """How a request ended; the numbers are those of the wire's Outcome."""

    COMPLETED = 1
    REJECTED = 2
    CANCELLED = 3
    EXPIRED = 4
    DEAD = 5


class State(Enum):
    """Where a request is in its life."""

    __hash__ = object.__hash__  # as good for singletons as Enum's own, which is a call into Python at every look-up

    ABSENT = "absent"
    """Not in the store: never submitted, or a dead letter that was deleted."""
    READY = "ready"
    """Waits in its channel's line."""
    LEASED = "leased"
    """A worker has the exclusive right to run one attempt."""
    STOPPING = "stopping"
    """Leased, and asked to stop: by its client or by its deadline."""
    DONE = "done"
    """Ended: no longer here, but for its result."""
    DEAD = "dead"
    """Every attempt failed; kept as a dead letter."""


class Input(Enum):
    """What can happen to a request."""

    __hash__ = object.__hash__  # as good for singletons as Enum's own, which is a call into Python at every look-up

    SUBMIT = "submit"
    CLAIM = "claim"
    COMPLETE = "complete"
    """The worker sent a result."""
    FAIL = "fail"
    """The worker reported an error, and attempts are left."""
    LEASE_EXPIRED = "lease_expired"
    """The lease ran out, and attempts are left."""
    WORKER_LOST = "worker_lost"
    """The worker or its stream is gone, and attempts are left."""
    EXHAUST = "exhaust"
    """Any of the three above in the last attempt."""
    GIVE_BACK = "give_back"
    """The worker hands the request back unharmed, or was lost while nobody could hear of it."""
    CANCEL = "cancel"
    DEADLINE = "deadline"
    REJECT = "reject"
    """The scheduler found that no worker could ever hold it."""
    REQUEUE = "requeue"
    """An operator revives a dead letter."""
    DELETE = "delete"
    """A dead letter's result is deleted, by who has read it or because its time to live is over."""


class Action(Enum):
    """What the machine does on a transition."""

    __hash__ = object.__hash__  # as good for singletons as Enum's own, which is a call into Python at every look-up

    STORE = "store"
    """Write the request and put it in its line."""
    LEASE = "lease"
    """Leave the line, count an attempt, draw a fencing token, deliver."""
    RECORD = "record"
    """Write the worker's result and the completion log, drop the lease."""
    REQUEUE = "requeue"
    """Drop the lease and return to the front of the line; the attempt counts."""
    RETURN = "return"
    """Drop the lease and return to the front of the line; the attempt does not count."""
    STOP = "stop"
    """Remember why and tell the worker to stop, if it is connected."""
    END = "end"
    """Leave the line with a result that says why."""
    END_STOPPED = "end_stopped"
    """Drop the lease with the outcome that was asked for when it was stopped."""
    BURY = "bury"
    """Drop the lease, write the outcome DEAD and keep the request as a dead letter."""
    REVIVE = "revive"
    """Remove the dead letter's result and log entry and return to the line with fresh attempts."""
    FORGET_LETTER = "forget_letter"
    """Remove the request and its place among the dead letters; the result goes as every other one does."""
    KEEP = "keep"
    """Nothing changes: it is already being stopped."""


TABLE: dict[tuple[State, Input], tuple[State, Action]] = {
    (State.ABSENT, Input.SUBMIT): (State.READY, Action.STORE),
    (State.READY, Input.CLAIM): (State.LEASED, Action.LEASE),
    (State.READY, Input.CANCEL): (State.DONE, Action.END),
    (State.READY, Input.DEADLINE): (State.DONE, Action.END),
    (State.READY, Input.REJECT): (State.DONE, Action.END),
    (State.LEASED, Input.COMPLETE): (State.DONE, Action.RECORD),
    (State.LEASED, Input.FAIL): (State.READY, Action.REQUEUE),
    (State.LEASED, Input.LEASE_EXPIRED): (State.READY, Action.REQUEUE),
    (State.LEASED, Input.WORKER_LOST): (State.READY, Action.REQUEUE),
    (State.LEASED, Input.EXHAUST): (State.DEAD, Action.BURY),
    (State.LEASED, Input.GIVE_BACK): (State.READY, Action.RETURN),
    (State.LEASED, Input.CANCEL): (State.STOPPING, Action.STOP),
    (State.LEASED, Input.DEADLINE): (State.STOPPING, Action.STOP),
    (State.STOPPING, Input.COMPLETE): (State.DONE, Action.RECORD),
    (State.STOPPING, Input.FAIL): (State.DONE, Action.END_STOPPED),
    (State.STOPPING, Input.LEASE_EXPIRED): (State.DONE, Action.END_STOPPED),
    (State.STOPPING, Input.WORKER_LOST): (State.DONE, Action.END_STOPPED),
    (State.STOPPING, Input.EXHAUST): (State.DONE, Action.END_STOPPED),
    (State.STOPPING, Input.GIVE_BACK): (State.DONE, Action.END_STOPPED),
    (State.STOPPING, Input.CANCEL): (State.STOPPING, Action.KEEP),
    (State.STOPPING, Input.DEADLINE): (State.STOPPING, Action.KEEP),
    (State.DEAD, Input.REQUEUE): (State.READY, Action.REVIVE),
    (State.DEAD, Input.DELETE): (State.ABSENT, Action.FORGET_LETTER),
}


def transition(state: State, event: Input) -> tuple[State, Action] | None:
    """Return the next state and what to do, or None if `event` is refused in `state`."""
    return TABLE.get((state, event))
