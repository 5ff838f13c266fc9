"""W3C trace context as it comes from others: what is taken of it, and what is left out.

Nothing in it may fail a request. A parent that cannot be read is none, and a state that is not well-formed, or longer
than what is carried, is left out whole, as the specification allows (sections 3.2.2.5, 3.3.1.5 and 3.3.2).
"""

from __future__ import annotations

import re

from penstock.limits import MAX_NAME_BYTES

PARENT = re.compile(r"(?!ff)([0-9a-f]{2})-((?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
"""Version, ids, flags, and what later versions may have behind them. Ids of zeros name no trace."""

VERSION = "00"

SAMPLED = 1
"""The one flag that a later version has in common with ours."""

MAX_STATE_BYTES = MAX_NAME_BYTES
"""What the specification wants carried at least."""

MAX_MEMBERS = 32

MEMBER = re.compile(
    r"([a-z0-9][a-z0-9_\-*/]{0,255}(?:@[a-z0-9][a-z0-9_\-*/]{0,13})?)=[ -+\--<>-~]{0,255}[!-+\--<>-~]",
)
"""A vendor's key and its value: printable ASCII without comma and equals sign, ending with no space."""


def parent_of(traceparent: str) -> str:
    """Return the parent as version 00 says it; empty if it is malformed.

    Of a later version the first four fields are taken, whatever follows, and of its flags the one that is known.
    """
    found = PARENT.fullmatch(traceparent)
    if found is None:
        return ""
    version, ids, flags, more = found.groups()
    if version == VERSION:
        return "" if more else traceparent
    return f"{VERSION}-{ids}-{int(flags, 16) & SAMPLED:02x}"


def state_of(tracestate: str) -> str:
    """Return the vendors' state; empty if it is malformed or has more than MAX_STATE_BYTES."""
    if len(tracestate) > MAX_STATE_BYTES or not tracestate.isascii():
        return ""
    members = [member for each in tracestate.split(",") if (member := each.strip(" \t"))]
    found = [MEMBER.fullmatch(member) for member in members]
    keys = {match[1] for match in found if match is not None}
    return tracestate if 0 < len(keys) == len(members) <= MAX_MEMBERS else ""
