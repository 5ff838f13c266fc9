"""Types of command-line options: what cannot be measured is refused before anything is started."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection

POLICIES = ("worst-case", "tokenizer-ack", "virtual-channels", "predictive")
"""Of the scheduler. Whoever imports `services` to ask it has chosen gRPC's I/O, also for the clients he starts."""


def at_least(least: int) -> Callable[[str], int]:
    """Return a type for whole numbers from `least` on."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} on, not {text!r}")
        return value

    return read


count = at_least(1)
"""A type for numbers of things, of which there is one."""


def above(least: float) -> Callable[[str], float]:
    """Return a type for finite numbers above `least`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = least
        if not least < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be a number above {least:g}, not {text!r}")
        return value

    return read


def each(read: Callable[[str], int]) -> Callable[[str], tuple[int, ...]]:
    """Return a type for one or more numbers with commas between them."""
    return lambda text: tuple(read(part) for part in text.split(","))


def some_of(names: Collection[str], every: str = "") -> Callable[[str], list[str]]:
    """Return a type for one or more of `names` with commas between them; the word `every` means all of them."""

    def read(text: str) -> list[str]:
        if every and text == every:
            return list(names)
        found = list(dict.fromkeys(text.split(",")))
        for name in found:
            if name not in names:
                raise argparse.ArgumentTypeError(f"there is no {name!r}; choose from {', '.join(names)}")
        return found

    return read
