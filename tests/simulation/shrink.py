"""Make a failing plan small: cut faults, then requests, as long as it fails in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from tests.simulation.plan import Plan
from tests.simulation.run import Simulation

MOST_RUNS = 300
"""Plays spent on one failure: some tens of seconds."""


def failure_of(plan: Plan) -> str | None:
    """Play a plan; return how it failed, or None."""
    try:
        Simulation(plan).run()
    except Exception as error:  # whatever a core raises is a failure
        return f"{type(error).__name__}: {error}"
    return None


def kind_of(failure: str) -> str:
    """Return what two failures of one cause have in common: the words up to the first value."""
    return re.split(r"[\d\[{'\"]", failure, maxsplit=1)[0]


def shrink(plan: Plan, failure: str) -> tuple[Plan, str]:
    """Return the smallest plan found that fails in the same way, and how it fails."""
    kind, runs = kind_of(failure), 0
    best: tuple[Plan, str] = (plan, failure)

    def fails(smaller: Plan) -> bool:
        nonlocal runs, best
        runs += 1
        found = failure_of(smaller) if runs <= MOST_RUNS else None
        if found is None or kind_of(found) != kind:
            return False
        best = (smaller, found)
        return True

    faults = _least([f.number for f in plan.faults], lambda kept: fails(plan.cut(faults=kept)))
    cut = plan.cut(faults=faults)
    _least([w.number for w in plan.requests], lambda kept: fails(cut.cut(requests=kept)))
    return best


def _least(numbers: Sequence[int], fails: Callable[[Sequence[int]], bool]) -> Sequence[int]:
    """Return a subset that still fails and of which no part can go (Zeller's ddmin, complements only)."""
    parts = 2
    while numbers:
        size = max(len(numbers) // parts, 1)
        for start in range(0, len(numbers), size):
            rest = [*numbers[:start], *numbers[start + size :]]
            if fails(rest):
                numbers, parts = rest, max(parts - 1, 2)
                break
        else:
            if size == 1:
                break
            parts = min(parts * 2, len(numbers))
    return numbers
