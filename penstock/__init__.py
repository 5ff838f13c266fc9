"""Penstock: credit-based flow control for vLLM fleets. The public package.

The names below are imported on first use, so that importing a wire module
(`penstock.queue.v1`) does not load the client, and the command begins at once.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in `typing`, whose import takes longer than all of this

if TYPE_CHECKING:
    from typing import Any

    from penstock.address import AddressError
    from penstock.client import Client
    from penstock.errors import (
        InvalidRequest,
        NotFound,
        NotPossibleNow,
        PenstockError,
        PermissionDenied,
        QuotaExceeded,
        ServiceError,
        Unauthenticated,
        Unavailable,
        WrongService,
    )
    from penstock.fields import RequestFields
    from penstock.keys import KeysError
    from penstock.results import (
        Cancelled,
        Choice,
        Credits,
        DeadLetter,
        FinishReason,
        Outcome,
        Progress,
        RequestError,
        RequestInfo,
        RequestState,
        Requeued,
        Result,
        Submitted,
        Timings,
        TokenDelta,
        TokenLogprob,
        Usage,
    )
    from penstock.sync_client import SyncClient
    from penstock.tls import TlsError, TlsFiles
    from penstock.tracing_variables import TracingError

__all__ = [
    "AddressError",
    "Cancelled",
    "Choice",
    "Client",
    "Credits",
    "DeadLetter",
    "FinishReason",
    "InvalidRequest",
    "KeysError",
    "NotFound",
    "NotPossibleNow",
    "Outcome",
    "PenstockError",
    "PermissionDenied",
    "Progress",
    "QuotaExceeded",
    "RequestError",
    "RequestFields",
    "RequestInfo",
    "RequestState",
    "Requeued",
    "Result",
    "ServiceError",
    "Submitted",
    "SyncClient",
    "Timings",
    "TlsError",
    "TlsFiles",
    "TokenDelta",
    "TokenLogprob",
    "TracingError",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "WrongService",
]

_HOMES = {
    "AddressError": "penstock.address",
    "Client": "penstock.client",
    "InvalidRequest": "penstock.errors",
    "NotFound": "penstock.errors",
    "NotPossibleNow": "penstock.errors",
    "PenstockError": "penstock.errors",
    "PermissionDenied": "penstock.errors",
    "QuotaExceeded": "penstock.errors",
    "ServiceError": "penstock.errors",
    "TracingError": "penstock.tracing_variables",
    "Unauthenticated": "penstock.errors",
    "Unavailable": "penstock.errors",
    "WrongService": "penstock.errors",
    "RequestFields": "penstock.fields",
    "KeysError": "penstock.keys",
    "Cancelled": "penstock.results",
    "Choice": "penstock.results",
    "Credits": "penstock.results",
    "DeadLetter": "penstock.results",
    "FinishReason": "penstock.results",
    "Outcome": "penstock.results",
    "Progress": "penstock.results",
    "RequestError": "penstock.results",
    "RequestInfo": "penstock.results",
    "RequestState": "penstock.results",
    "Requeued": "penstock.results",
    "Result": "penstock.results",
    "Submitted": "penstock.results",
    "Timings": "penstock.results",
    "TokenDelta": "penstock.results",
    "TokenLogprob": "penstock.results",
    "Usage": "penstock.results",
    "SyncClient": "penstock.sync_client",
    "TlsError": "penstock.tls",
    "TlsFiles": "penstock.tls",
}


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the public names as well before their first use, for whoever completes them."""
    return sorted({*globals(), *__all__})
