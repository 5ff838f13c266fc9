"""Counters whose series are there from the start.

Prometheus sees a series that begins at 16 as one that has not grown: `rate` and `increase` are blind to the first burst
of what is counted only in trouble, anew after each restart. So whatever values of a label are known get their series at
0 before anything happens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product

from prometheus_client import Counter


def begin(counter: Counter, *known: Iterable[str]) -> Counter:
    """Give `counter` a series at 0 for each combination of what is `known` of its labels, in their order; return it.

    One that is there stays as it is.
    """
    for values in product(*known):
        counter.labels(*values)
    return counter


def from_zero(known: Iterable[str], counted: Mapping[str, int]) -> dict[str, int]:
    """Return what was `counted` by a label's value, with 0 for each of its `known` values that was not."""
    return {**dict.fromkeys(known, 0), **counted}
