"""Penstock: credit-based flow control for vLLM fleets. The public package.

The names below are imported on first use, so that importing a wire module
(`penstock.queue.v1`) does not load the client, and the command begins at once.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in `typing`, whose import takes longer than all of this

if TYPE_CHECKING:
    from typing import Any

    from penstock.client import Client
    from penstock.errors import (
        InvalidRequest,
        NotFound,
        PenstockError,
        PermissionDenied,
        QuotaExceeded,
        ServiceError,
        Unauthenticated,
        Unavailable,
    )
    from penstock.fields import RequestFields
    from penstock.results import (
        Choice,
        Credits,
        FinishReason,
        Outcome,
        Progress,
        RequestError,
        RequestInfo,
        RequestState,
        Result,
        Submitted,
        Timings,
        TokenDelta,
        TokenLogprob,
        Usage,
    )
    from penstock.sync_client import SyncClient

__all__ = [
    "Choice",
    "Client",
    "Credits",
    "FinishReason",
    "InvalidRequest",
    "NotFound",
    "Outcome",
    "PenstockError",
    "PermissionDenied",
    "Progress",
    "QuotaExceeded",
    "RequestError",
    "RequestFields",
    "RequestInfo",
    "RequestState",
    "Result",
    "ServiceError",
    "Submitted",
    "SyncClient",
    "Timings",
    "TokenDelta",
    "TokenLogprob",
    "Unauthenticated",
    "Unavailable",
    "Usage",
]

_HOMES = {
    "Client": "penstock.client",
    "InvalidRequest": "penstock.errors",
    "NotFound": "penstock.errors",
    "PenstockError": "penstock.errors",
    "PermissionDenied": "penstock.errors",
    "QuotaExceeded": "penstock.errors",
    "ServiceError": "penstock.errors",
    "Unauthenticated": "penstock.errors",
    "Unavailable": "penstock.errors",
    "RequestFields": "penstock.fields",
    "Choice": "penstock.results",
    "Credits": "penstock.results",
    "FinishReason": "penstock.results",
    "Outcome": "penstock.results",
    "Progress": "penstock.results",
    "RequestError": "penstock.results",
    "RequestInfo": "penstock.results",
    "RequestState": "penstock.results",
    "Result": "penstock.results",
    "Submitted": "penstock.results",
    "Timings": "penstock.results",
    "TokenDelta": "penstock.results",
    "TokenLogprob": "penstock.results",
    "Usage": "penstock.results",
    "SyncClient": "penstock.sync_client",
}


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
