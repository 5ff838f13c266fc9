"""Who may use the console: pages that this gateway itself served to a browser, and nobody else's pages.

Whose key may use the console is the doorman's business. What is kept out here are web pages of others, opened in the
browser of somebody who can reach the gateway: they could otherwise make that browser, and the key it has been given,
drain workers (cross-site requests), or read the console through a name of their own that resolves to the gateway's
address (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping

from services.gateway.problem import Problem

HEADERS = {
    # Everything the page needs comes from here; nothing inline runs, nobody frames it, it sends no form anywhere.
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
"""Of every response of the console."""


def check_host(headers: Mapping[str, str], names: Collection[str]) -> None:
    """Raise Problem unless the host asked for is an IP address, localhost or one of `names`.

    An address cannot be rebound: a page whose origin is this address came from it.
    """
    name = host_name(headers.get("host", ""))
    if name in names or name == "localhost" or name.endswith(".localhost") or _is_address(name):
        return
    text = f"the console is not served as {name[:100]!r}; the setting console_hosts names the hosts it is served as"
    raise Problem(403, text, "host", "host_not_allowed")


def check_same_origin(headers: Mapping[str, str]) -> None:
    """Raise Problem unless the request was made by a page of this host.

    Browsers send `Origin` with every POST, and scripts cannot change it. The scheme is left out of the comparison:
    a proxy before the gateway may speak TLS for it.
    """
    scheme, _, origin = headers.get("origin", "").partition("://")
    same = scheme in {"http", "https"} and origin == headers.get("host", "") != ""
    if not same or headers.get("sec-fetch-site", "same-origin") != "same-origin":
        text = "this is for the console's own page; programs use `penstock drain` and `penstock dead requeue`"
        raise Problem(403, text, "origin", "cross_origin")


def host_name(host: str) -> str:
    """Return the name or address of "HOST[:PORT]", in lower case and without brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
