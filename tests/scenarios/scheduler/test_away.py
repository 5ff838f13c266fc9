"""What has paid to wait for workers that go away holds up nobody, itself included."""

from __future__ import annotations

import random

import pytest

from services.scheduler.core import messages as m
from services.scheduler.core.sharing.share import Share
from tests.support.flood import Flood
from tests.support.timeline import Call, Timeline

MANY = 1_000
POLICIES = ("virtual-channels", "predictive")
SHARES = {"small": Share(), "large": Share(), "own": Share()}


def paid(timeline: Timeline, model: str) -> list[str]:
    """Return the requests of `own` that have paid to wait for workers of the model."""
    deposits = [deposit for deposit in timeline.rig.machine._arbiter._deposits if model in deposit.account.pool.models]
    return [deposit.entry.request_id for deposit in deposits if deposit.account.channel.name == "own"]


def until_paid(flood: Flood, models: tuple[str, str], own: Call) -> str:
    """Have `small` and `large` fill the workers until a request of `own` has paid for the first's; return its name."""
    timeline, choose = flood.timeline, random.Random(1)
    while not paid(timeline, models[0]):
        assert timeline.step < 200
        calls = [(Call(timeline.step, "small", 5, choose.randint(5, 15), model), 40) for model in models]
        if timeline.step > 20:
            calls.append((Call(timeline.step, "large", 90, 20, models[0]), 2))
        if timeline.step > 25:
            calls.append((own._replace(step=timeline.step), 4 if not own.model else 1))
        flood.advance(*calls)
    return paid(timeline, models[0])[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_other_lines_of_its_channel_save_on_workers_that_are_there(policy: str) -> None:
    """`x` has paid for the first worker, which is drained. `y` saves on the second, which serves both of them too."""
    engines = [("x y", MANY), ("y z", MANY)]
    flood = Flood(Timeline(SHARES, [100, 100], policy=policy, engines=engines))
    until_paid(flood, ("x", "z"), Call(0, "own", 80, 20, "x"))
    timeline, choose = flood.timeline, random.Random(2)
    timeline.rig.tell(m.DrainRequested("w0"))
    timeline._start()
    for step in range(timeline.step, timeline.step + 500):
        flood.advance(
            (Call(step, "small", 5, choose.randint(5, 15), "z"), 40),
            (Call(step, "own", 60, 10, "y"), 1),
        )
    assert flood.granted("own", "y") > 20
    assert flood.longest_wait("own", "y") < 60


@pytest.mark.parametrize("policy", POLICIES)
def test_one_that_names_no_model_runs_elsewhere(policy: str) -> None:
    flood = Flood(Timeline(SHARES, [100, 100], policy=policy, engines=[("p", MANY), ("q", MANY)]))
    first = until_paid(flood, ("p", "q"), Call(0, "own", 60, 10))
    timeline, choose = flood.timeline, random.Random(2)
    timeline.rig.tell(m.DrainRequested("w0"))
    timeline._start()
    drained = timeline.step
    for step in range(drained, drained + 100):
        flood.advance(
            (Call(step, "small", 5, choose.randint(5, 15), "q"), 40),
            (Call(step, "own", 60, 10), 4),
        )
    assert timeline.granted_at[first] < drained + 60
