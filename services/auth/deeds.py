"""Says in the log who has had a service do what others will ask about: a worker drained, a batch cancelled."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from penstock.keys import Role
from services.auth.caller import CALLER, Caller


def note(
    log: logging.Logger, text: str, *values: object, anybodys: bool = False, extra: Mapping[str, str] | None = None
) -> None:
    """Say what the present call has done, and by which key: its name, never the key.

    One line for each call, however much it has done. What is `anybodys` clients may do with what is theirs, as often as
    they like, and where there are no keys nobody can be told from them: that is for the level debug. `extra` is as
    `logs.about` returns it.
    """
    caller = CALLER.get()
    is_theirs = anybodys and caller.role is not Role.OPERATOR
    log.log(logging.DEBUG if is_theirs else logging.INFO, f"{text} (%s)", *values, doer(caller), extra=extra)


def doer(caller: Caller) -> str:
    """Return who `caller` is, for a line of the log."""
    if caller.role is None:
        return f"no keys, tenant {caller.tenant}"
    proof = f"key {caller.key_id}" if caller.key_id else "a certificate"
    return f"{proof}, {caller.role}, tenant {caller.tenant}"
