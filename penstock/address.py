"""Where a service is: what an address may be, for the client and for the services' settings."""

from __future__ import annotations

import re

from penstock.errors import PenstockError

DEFAULT_QUEUE_ADDRESS = "127.0.0.1:7410"
"""Where a queue listens, and is looked for, unless told otherwise."""

DEFAULT_SCHEDULER_ADDRESS = "127.0.0.1:7420"
"""The same of a scheduler."""

MOST_PORT = 65535
"""TCP has 16 bits for it."""

_HOST_AND_PORT = re.compile(r"(\[[0-9a-fA-F:.]+(?:%[^\]\s]+)?\]|[^:/\s\[\]]+):([0-9]{1,5})")
_LISTENING = re.compile(r"(?:\[[0-9a-fA-F:]+\]|[^:\s]*):([0-9]{1,5})")
_LIKE_IPV6 = re.compile(r"[0-9a-fA-F:.\[\]]*:[0-9a-fA-F.]*:[0-9a-fA-F:.\[\]]*")
_NAMED = re.compile(r"(dns|ipv4|ipv6|unix|unix-abstract|vsock|xds):\S+")
"""What gRPC has other resolvers for (its document on naming)."""


class AddressError(PenstockError, ValueError):
    """An address that nothing could be at."""


def check_address(address: str, name: str = "") -> str:
    """Return `address`; raises AddressError, which begins with `name` if there is one, unless it can be connected to.

    HOST:PORT, the host an IPv6 address in brackets or anything else, or a name with a scheme as gRPC takes it
    (`dns:///queue:7410`). gRPC itself takes port 443 where none is given, and 34463 for 99999.
    """
    if _NAMED.fullmatch(address):
        return address
    found = _HOST_AND_PORT.fullmatch(address)
    if found is not None and 1 <= int(found[2]) <= MOST_PORT:
        return address
    text = f"port {found[2]} is out of range: 1 to {MOST_PORT}" if found is not None else _no_address(address)
    raise AddressError(f"{name}: {text}" if name else text)


def check_listening(address: str) -> str:
    """Return `address`; raises AddressError unless it is HOST:PORT, at which one can listen.

    The host may be empty, which is every address of the machine, and the port 0, which is any that is free.
    """
    found = _LISTENING.fullmatch(address)
    if found is None:
        raise AddressError(_no_address(address))
    if int(found[1]) > MOST_PORT:
        raise AddressError(f"port {found[1]} is out of range: at most {MOST_PORT}")
    return address


def _no_address(text: str) -> str:
    """Return why a text is no address."""
    if not text:
        return "is empty; must be HOST:PORT"
    return f"{text!r} is not HOST:PORT" + (", IPv6 in brackets" if _LIKE_IPV6.fullmatch(text) else "")
