"""How the command fails: one line to stderr and an exit status that scripts can tell apart."""

from __future__ import annotations

EX_USAGE = 2
"""Wrong options or arguments."""

EX_INCOMPLETE = 1
"""The command did its work, but something it was asked for has no good answer (unknown id, request not completed)."""

EX_NO_INPUT = 66
"""The input file cannot be read."""

EX_UNAVAILABLE = 69
"""A service does not answer, or a port or data directory cannot be had."""

EX_SOFTWARE = 70
"""A service that this command started has failed."""

EX_CANNOT_WRITE = 73
"""An output file cannot be written."""

EX_TEMPFAIL = 75
"""A quota is used up; the same command may succeed later (sysexits.h)."""

EX_NOPERM = 77
"""No API key, or one that is not good for this (sysexits.h)."""
EX_CONFIG = 78
"""The configuration is wrong."""

EX_INTERRUPTED = 130
"""Ctrl-C."""


class CommandError(Exception):
    """Ends the command with one line for the user and `status` as its exit status."""

    def __init__(self, message: str, status: int) -> None:
        """Say `message`, exit with `status`."""
        super().__init__(message)
        self.status = status


def one_line(text: str) -> str:
    """Return what others wrote, an error above all, as one line that a terminal shows and does not obey."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in " ".join(text.split()))
