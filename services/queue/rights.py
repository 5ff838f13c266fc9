"""Which role may call which method of the queue."""

from __future__ import annotations

from penstock.keys import Role
from services.auth.guard import EVERYONE, Right

_CLIENTS = Right(EVERYONE, for_tenant=True)
_SUBMITTERS = Right(EVERYONE, for_tenant=True, submits=True)
_WATCHERS = Right(frozenset({Role.OPERATOR, Role.SERVICE}))
_OPERATORS = Right(frozenset({Role.OPERATOR}))
_SERVICES = Right(frozenset({Role.SERVICE}))

QUEUE_RIGHTS = {
    "Submit": _SUBMITTERS,
    "SubmitUnary": _CLIENTS,
    "Watch": _CLIENTS,
    # Also a service for no tenant: a gateway follows its clients' requests, which the queue has named to it, in one.
    "Follow": Right(EVERYONE),
    "Get": _CLIENTS,
    "GetMany": _CLIENTS,
    "Cancel": _CLIENTS,
    "Delete": _CLIENTS,
    "Identify": Right(EVERYONE),
    "Stats": Right(EVERYONE),
    "ListDead": _WATCHERS,
    "RequeueDead": _OPERATORS,
    "Backup": _OPERATORS,
    "Backlog": _SERVICES,
    "Work": _SERVICES,
}

FILES_RIGHTS = {
    "CreateFile": _CLIENTS,
    "AppendFile": _CLIENTS,
    "CloseFile": _CLIENTS,
    "GetFile": _CLIENTS,
    "ListFiles": _CLIENTS,
    "DeleteFile": _CLIENTS,
    "ReadFile": _CLIENTS,
    # A batch object says which lines are submitted for its tenant, on which channel: only gateways write them.
    "PutRecords": _SERVICES,
    "GetRecord": _SERVICES,
    "ListRecords": _SERVICES,
}

RIGHTS = {**QUEUE_RIGHTS, **FILES_RIGHTS}
"""The names of the two services' methods are apart."""
