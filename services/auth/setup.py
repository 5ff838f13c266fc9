"""A service's guard, as its settings describe it."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from penstock.exits import EX_CONFIG
from penstock.keys import KeysError
from services.auth.guard import Guard, Right
from services.auth.keyring import Keyring, Reason
from services.born import begin
from services.clock import Clock
from services.config import ChannelledSettings


class AuthMetrics:
    """Refusals and unreadable keys files; never a key."""

    def __init__(self, service: str, registry: CollectorRegistry = REGISTRY) -> None:
        """Register with `registry`, under the name of the service."""
        self.refused = Counter(
            f"penstock_{service}_auth_refused_total",
            "Calls refused because of who made them, by reason.",
            ["reason"],
            registry=registry,
        )
        begin(self.refused, Reason)
        self.reload_errors = Counter(
            f"penstock_{service}_keys_reload_errors_total",
            "Times the keys file changed into one that cannot be read.",
            registry=registry,
        )
        self.keys_refused = Gauge(
            f"penstock_{service}_keys_refused",
            "1 while the keys file is none to go by, and its last good content stays in force; else 0.",
            registry=registry,
        )


def keyring_of(settings: ChannelledSettings, clock: Clock, metrics: AuthMetrics) -> Keyring | None:
    """Return the keys that the settings name, if any; raises SystemExit(78), with the reason printed, if no good."""
    if settings.keys is None:
        return None
    try:
        keyring = Keyring(settings.keys, clock.now_ns, metrics.reload_errors.inc)
    except KeysError as error:
        print(error, file=sys.stderr)
        raise SystemExit(EX_CONFIG) from None
    metrics.keys_refused.set_function(lambda: keyring.is_refused)
    return keyring


def guard_of(keyring: Keyring | None, rights: Mapping[str, Right], metrics: AuthMetrics) -> Guard:
    """Return the guard of a service."""
    return Guard(keyring, rights, lambda reason: metrics.refused.labels(reason).inc())
