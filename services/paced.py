"""Lines of the log of which others decide how many there are: so many a second, and the number of the rest."""

from __future__ import annotations

import logging
from collections.abc import Mapping


class Paced:
    """Lines of one kind. Its owner calls `count` each second, and at a stop."""

    def __init__(self, log: logging.Logger, level: int, most: int, rest: str) -> None:
        """Have `most` lines between two counts, and of the others `rest`, in which "%d" is how many they are."""
        self._log = log
        self._level = level
        self._most = most
        self._rest = rest
        self._said = 0
        self._unsaid = 0

    def say(self, text: str, *values: object, extra: Mapping[str, str] | None = None) -> None:
        """Log a line, or count it."""
        if self._said >= self._most:
            self._unsaid += 1
            return
        self._said += 1
        self._log.log(self._level, text, *values, extra=extra)

    def count(self) -> None:
        """Say how many had no line since the last count, and have lines for as many again."""
        if self._unsaid:
            self._log.log(self._level, self._rest, self._unsaid)
        self._said = self._unsaid = 0
