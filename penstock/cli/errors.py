"""How the command fails: one line to stderr and an exit status of `penstock.exits`."""

from __future__ import annotations


class CommandError(Exception):
    """Ends the command with one line for the user and `status` as its exit status."""

    def __init__(self, message: str, status: int) -> None:
        """Say `message`, exit with `status`."""
        super().__init__(message)
        self.status = status


def one_line(text: str) -> str:
    """Return what others wrote, an error above all, as one line that a terminal shows and does not obey."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in " ".join(text.split()))
