"""Types of command-line options: what cannot be measured is refused before anything is started."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Collection
from pathlib import Path

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


def above(least: float, most: float = math.inf) -> Callable[[str], float]:
    """Return a type for finite numbers above `least`, `most` being the largest."""
    bounds = f"above {least:g}" + (f", up to {most:g}" if most < math.inf else "")
    return _number(lambda value: least < value <= most, bounds)


def from_on(least: float, below: float = math.inf) -> Callable[[str], float]:
    """Return a type for finite numbers from `least` on, below `below`."""
    bounds = f"from {least:g} on" + (f", below {below:g}" if below < math.inf else "")
    return _number(lambda value: least <= value < below, bounds)


def _number(fits: Callable[[float], bool], bounds: str) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and fits(value)):
            raise argparse.ArgumentTypeError(f"must be a number {bounds}, not {text!r}")
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


def push_first(names: Collection[str]) -> Callable[[str], list[str]]:
    """Return a type for some of these policies, of which `push` is the first: the others are compared with it."""

    def read(text: str) -> list[str]:
        found = some_of(names, "all")(text)
        if found[0] != "push":
            raise argparse.ArgumentTypeError(f"the first has to be push, not {found[0]!r}")
        return found

    return read


def file(text: str) -> Path:
    """Return a file's path whose directory can be written to, made if it is missing."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a directory")
    folder(str(path.parent))
    return path


def folder(text: str) -> Path:
    """Return a directory that can be written to, made if it is missing: before the work whose outcome goes there."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot be made: {error}") from None
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written to")
    return path
