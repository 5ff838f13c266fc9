"""One figure of many values."""

from __future__ import annotations

from collections.abc import Iterable


def quantile(values: Iterable[float], share: float) -> float:
    """Return the value below which `share` of the values lie; 0 of none."""
    ordered = sorted(values)
    return float(ordered[min(int(share * len(ordered)), len(ordered) - 1)]) if ordered else 0.0
