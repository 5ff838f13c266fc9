"""How deep JSON may be nested here, which depends on Python's version and on the caller's stack."""

from __future__ import annotations

import json

MARGIN_LEVELS = 80
"""More than the frames and the objects that lie between a test and the parser it means."""


def levels_around_the_limit() -> range:
    """Return numbers of nested lists of which some can be parsed and some cannot."""
    good, bad = 1, 200_000
    while bad - good > 1:
        levels = (good + bad) // 2
        try:
            json.loads("[" * levels + "]" * levels)
        except RecursionError:
            bad = levels
        else:
            good = levels
    return range(good - MARGIN_LEVELS, bad + 1)
