"""What a pass costs where a ceiling keeps out heads of many lines: each of them is looked at a few times."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from services.scheduler.core.sharing.places import Places
from services.scheduler.core.sharing.share import Share
from tests.support.counting import count_calls
from tests.support.scheduling import Rig, shape

pytestmark = pytest.mark.skipif("PENSTOCK_COMPILED" in os.environ, reason="nothing patches a compiled method")

BEHIND = 3
"""Requests behind the head of each line."""


def crowded(lines: int) -> Rig:
    """A channel at its ceiling on the only worker, by requests that go on, and as many lines of it that wait."""
    names = tuple(f"adapter-{number}" for number in range(lines))
    rig = Rig({"capped": Share(1.0, 0.0, 0.5)}, "predictive")
    rig.open("w", shape(1_000), aliases=names)
    rig.announce("capped", *[10] * 45, model="m")
    for _ in range(1 + BEHIND):
        for name in names:
            rig.announce("capped", 60, model=name)
    assert len(rig.granted) == 45
    return rig


def of_a_growth(rig: Rig) -> None:
    rig.settle(rig.grants[0], 11)


def of_a_completion(rig: Rig) -> None:
    rig.finish(rig.grants.pop(0))


@pytest.mark.parametrize("happens", [of_a_growth, of_a_completion])
def test_heads_at_a_ceiling_are_looked_at_a_few_times_each(
    happens: Callable[[Rig], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = crowded(60)
    looks = count_calls(monkeypatch, Places, "could_save")
    happens(rig)
    assert len(rig.granted) == 45, "all of them still wait"
    assert 60 <= looks() <= 60 * (4 + 2 * BEHIND)


def test_savings_of_many_lines_cost_a_few_looks_at_each_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker has some adapters of its own; one head saves on each, and the others wait."""
    many = 20
    rig = Rig({"other": Share(), "capped": Share(1.0, 0.0, 0.9)})
    for number in range(many):
        rig.open(f"w{number}", shape(100), model="base", aliases=adapters(number))
    rig.announce("other", *[50] * 2 * many, model="base")
    for _ in range(1 + BEHIND):
        for name in [name for number in range(many) for name in adapters(number)]:
            rig.announce("capped", 80, model=name)
    rig.wait(50)
    for grant in rig.grants[:2]:
        rig.finish(grant)
    looks = count_calls(monkeypatch, Places, "could_save")
    rig.finish(rig.grants[2])
    assert 4 * many <= looks() <= 4 * many * 8


def adapters(number: int) -> tuple[str, ...]:
    return tuple(f"adapter-{number}-{each}" for each in range(4))
