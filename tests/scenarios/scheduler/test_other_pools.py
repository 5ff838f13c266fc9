"""A request that names no model is in line in every pool: what happens in one makes others the first elsewhere."""

from __future__ import annotations

import pytest

from services.scheduler.core import messages as m
from services.scheduler.core.sharing.share import Share
from tests.support.scheduling import Rig, shape

POLICIES = ["virtual-channels", "predictive"]
BEHIND = 12
"""More than are looked at in a line at once."""

MINUTES_MS = 600_000


def rig_of_two_pools(shares: dict[str, Share], policy: str, small: int) -> Rig:
    """A worker of 100 blocks serves `a`, one of so many `b`."""
    rig = Rig(shares, policy)
    rig.open("of-a", shape(100), model="a", guaranteed_first=True)
    rig.open("of-b", shape(small), model="b", guaranteed_first=True)
    return rig


def run(rig: Rig, channel: str, blocks: int, model: str, milliseconds: int) -> None:
    """Have one request run for so long."""
    rig.announce(channel, blocks, model=model)
    rig.wait(milliseconds)
    rig.finish(rig.grants[-1])


@pytest.mark.parametrize("policy", POLICIES)
def test_who_is_behind_those_that_only_a_pausing_worker_could_hold_runs_elsewhere(policy: str) -> None:
    rig = rig_of_two_pools({"x": Share(), "y": Share()}, policy, 40)
    rig.announce("x", 90, model="a")
    rig.announce("x", 90, model="a")
    *_, small = rig.announce("y", *[60] * BEHIND, 10)
    assert len(rig.granted) == 1
    rig.release(rig.grants[0], m.ReleaseCause.UNCLAIMED)
    assert rig.granted[1:] == [small]


@pytest.mark.parametrize("policy", POLICIES)
def test_who_is_behind_those_that_lower_tiers_leave_no_room_runs_elsewhere(policy: str) -> None:
    """`front` has had the worker of `a` for longer than two usual hold times when somebody comes there."""
    rig = rig_of_two_pools({"front": Share(), "x": Share(tier=1), "y": Share(tier=1)}, policy, 40)
    run(rig, "front", 95, "a", MINUTES_MS)
    for _ in range(60):
        run(rig, "x", 90, "a", 1_000)
    rig.announce("x", 90, model="a")
    runs = rig.grants[-1]
    rig.announce("x", 90, model="a")
    *_, small = rig.announce("y", *[60] * BEHIND, 10)
    rig.wait(300)
    rig.tell(m.Gone(runs.request_id, m.GoneReason.CLAIMED))
    rig.announce("front", 95, 96, model="a")
    rig.release(runs)
    rig.wait(4_000)
    rig.announce("front", 97, model="a")
    assert rig.granted[-1] == small


@pytest.mark.parametrize("policy", POLICIES)
def test_who_is_behind_one_that_has_paid_to_wait_in_another_pool_has_its_turn(policy: str) -> None:
    """In each pool one of `x` saves and one of `y` has paid to wait, so the first without a model cannot pay yet."""
    rig = rig_of_two_pools({"x": Share(), "y": Share()}, policy, 100)
    for model in "ab":
        for channel in "xy":
            run(rig, channel, 50, model, MINUTES_MS)
    rig.announce("x", 90, model="a")
    runs = rig.grants[-1]
    for channel, blocks, model in (("x", 90, "a"), ("y", 80, "a"), ("x", 60, "b"), ("x", 70, "b"), ("y", 80, "b")):
        rig.announce(channel, blocks, model=model)
    _, small = rig.announce("y", 50, 5)
    assert small not in rig.granted
    rig.wait(1_000)
    rig.finish(runs)
    assert small in rig.granted, "the first has paid in the pool of `a`, where one of its channel saves now"
