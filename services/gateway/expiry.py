"""`expires_after`: how long after its beginning a file is deleted."""

from __future__ import annotations

from services.gateway.problem import Problem

LEAST_S, MOST_S = 3600, 2_592_000
"""An hour and thirty days, as OpenAI allows."""


def read_expiry(name: str, given: object) -> int:
    """Return the seconds in an object `{"anchor": "created_at", "seconds": n}`, 0 if it is None; raises Problem."""
    if given is None:
        return 0
    if not isinstance(given, dict) or given.keys() - {"anchor", "seconds"}:
        raise _refusal(name, "must be an object with anchor and seconds")
    if given.get("anchor") != "created_at":
        raise _refusal(f"{name}.anchor", "must be 'created_at'")
    seconds = given.get("seconds")
    if not isinstance(seconds, int) or isinstance(seconds, bool) or not LEAST_S <= seconds <= MOST_S:
        raise _refusal(f"{name}.seconds", f"must be a whole number from {LEAST_S} to {MOST_S}")
    return seconds


def _refusal(name: str, text: str) -> Problem:
    return Problem(400, f"{name}: {text}", name, "invalid_value")
