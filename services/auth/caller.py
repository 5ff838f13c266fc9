"""Who made the call that is being served."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from penstock.keys import DEFAULT_TENANT, Role

OPEN_ROLE = "open"
"""What everyone is at a service without a keys file."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a call is served for."""

    role: Role | None = None
    """None: there is no keys file, and everyone may do all."""
    tenant: str = DEFAULT_TENANT
    """Who owns what the call makes."""
    sees: str | None = None
    """The only tenant whose requests, files and batches there are for this caller; None: everybody's."""
    channels: frozenset[str] | None = None
    """Channels it may submit to; None: all."""
    key_id: str = ""
    """Name of the key; empty without one."""

    def may_use(self, channel: str) -> bool:
        """Whether requests may be submitted to a channel."""
        return self.channels is None or channel in self.channels


def open_caller(tenant: str) -> Caller:
    """Return who calls a service without a keys file: anyone, for the tenant it names, if it names one."""
    return Caller(tenant=tenant, sees=tenant) if tenant else Caller()


CALLER: ContextVar[Caller] = ContextVar("penstock_caller", default=Caller())  # noqa: B039 - it is frozen
"""Of the call that the present task serves; set before the servicer is asked."""
