"""Shares of every kind together: whatever they are, credits add up, and in the end everybody has run."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core import messages as m
from services.scheduler.core.sharing.share import Share
from tests.support.effort import examples, long
from tests.support.scheduling import Rig, shape


@st.composite
def shares(draw: st.DrawFn) -> dict[str, Share]:
    """Return three channels with weights, guarantees that add up to less than 1, ceilings and tiers."""
    found = {}
    for name in ("a", "b", "c"):
        guaranteed = draw(st.sampled_from([0.0, 0.0, 0.1, 0.3]))
        ceiling = max(draw(st.sampled_from([1.0, 1.0, 0.5, 0.2])), guaranteed)
        found[name] = Share(
            draw(st.sampled_from([0.5, 1.0, 4.0])), guaranteed, ceiling, draw(st.sampled_from([0, 0, 1]))
        )
    return found


@pytest.mark.parametrize("policy", [long("virtual-channels"), "predictive"])
@settings(max_examples=examples(25), deadline=None)
@given(channels=shares(), sequences=st.sampled_from([4, 16, 1_000]), seed=st.integers(0, 2**32))
def test_everybody_runs_once_no_more_come(policy: str, channels: dict[str, Share], sequences: int, seed: int) -> None:
    draw = random.Random(seed)
    rig = Rig(channels, policy)
    rig.open("large", shape(100, sequences), aliases=("alias",))
    rig.open("small", shape(50, sequences))
    running: list[m.Grant] = []
    asked: set[str] = set()
    for step in range(400):
        rig.wait(draw.randint(1, 20))
        for name in channels:
            if step < 100 and draw.random() < 0.3:
                sizes = [draw.choice([1, 3, 10, 45, 90]) for _ in range(draw.randint(1, 4))]
                model, n = draw.choice(["", "m", "alias"]), draw.choice([1, 1, 1, 4])
                asked.update(rig.announce(name, *(size if n == 1 else 1 for size in sizes), model=model, n=n))
        running += rig.grants
        rig.grants.clear()
        for _ in range(draw.randint(0, 4) if step < 100 else 8):
            if running:
                rig.finish(running.pop(draw.randrange(len(running))))
        rig.tell(m.Tick())
        rig.check()
    assert not rig.machine.backlog.names(), "somebody still waits, or runs"
    assert asked
