"""Which role may call which method of the scheduler."""

from __future__ import annotations

from penstock.keys import Role
from services.auth.guard import EVERYONE, Right

RIGHTS = {
    "Credits": Right(frozenset({Role.SERVICE})),
    "Status": Right(EVERYONE),  # clients for names alone
    "DrainWorker": Right(frozenset({Role.OPERATOR})),
    "UndrainWorker": Right(frozenset({Role.OPERATOR})),
}
