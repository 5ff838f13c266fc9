"""One name, one worker, and one queue, one scheduler: what a second instance is answered, and how long it asks."""

from __future__ import annotations

from penstock.limits import KEEPALIVE_TIME_MS, KEEPALIVE_TIMEOUT_MS

ASK_S = 1.5 * (KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS) / 1000
"""How long a worker that begins asks for a name that is taken. The connection of an instance whose machine is gone is
noticed after the two times together; half as much again for the pauses between questions."""


SCHEDULER_TAKEN = (
    "another scheduler is connected to this queue, which takes one; this one stands by until that one has gone "
    "(one whose machine is gone is let go within half a minute), or has no worker while this one has some"
)
"""The text of the status (ALREADY_EXISTS) that answers a second scheduler, which asks for as long as it runs."""


class NameTakenError(Exception):
    """Another instance that is connected has the worker's name."""


def name_taken(worker_id: str) -> str:
    """Return the text of the status (ALREADY_EXISTS) that answers the second instance."""
    return (
        f"worker_id: another instance of {worker_id!r} is connected; give each worker an id of its own "
        "(one whose machine is gone is let go within half a minute)"
    )
