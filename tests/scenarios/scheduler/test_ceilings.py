"""A channel at its ceiling on a worker, with lines for more than one model of it."""

from __future__ import annotations

import random

import pytest

from services.scheduler.core.sharing.share import Share
from tests.support.flood import Flood
from tests.support.timeline import Call, Timeline

MANY = 1_000


@pytest.mark.parametrize(("others", "small"), [(70, 3), (75, 5)])
def test_a_head_that_has_paid_is_not_passed_at_its_ceiling_for_ever(others: int, small: int) -> None:
    """It pays while its channel holds little. Its other line may not keep the channel at its ceiling from then on."""
    flood = Flood(Timeline({"other": Share(), "capped": Share(1.0, 0.0, 0.6)}, [100], engines=[("x y", MANY)]))
    choose = random.Random(1)
    for step in range(2_000):
        flood.advance(
            (Call(step, "other", others, choose.randint(5, 15), "x"), 6),
            (Call(step, "capped", small, choose.randint(20, 40), "y"), 20),
            (Call(step, "capped", 50, 10, "x"), int(step >= 200)),
        )
    assert flood.longest_wait("capped", "x") < 400
    assert flood.granted("capped", "y") > 100


@pytest.mark.parametrize(("ceiling", "large", "small"), [(0.8, 75, 40), (0.8, 60, 20), (0.6, 50, 30)])
@pytest.mark.parametrize("waiting", [1, 4])
def test_what_was_paid_for_elsewhere_does_not_pass_a_head_at_its_ceiling(
    ceiling: float, large: int, small: int, waiting: int
) -> None:
    """`y` pays to wait for the second worker while `x` waits for its ceiling on the first, and fits there as well."""
    shares = {"other": Share(), "capped": Share(1.0, 0.0, ceiling)}
    flood = Flood(Timeline(shares, [100, 100], engines=[("x y", MANY), ("y z", MANY)]))
    choose = random.Random(1)
    for step in range(1_500):
        flood.advance(
            (Call(step, "other", 40, choose.randint(20, 40), "z"), 9),
            (Call(step, "capped", small, choose.randint(5, 15), "y"), waiting),
            (Call(step, "capped", large, 10, "x"), 3),
        )
    assert flood.longest_wait("capped", "x") < 250
    assert flood.granted("capped", "x") > 30
    assert flood.granted("capped", "y") > 90


@pytest.mark.parametrize("policy", ["virtual-channels", "predictive"])
def test_what_waits_for_its_channels_ceiling_keeps_no_worker_from_others(policy: str) -> None:
    """Of `capped` two save. One starts, and an older one than the other is its line's head, which the ceiling stops."""
    shares = {"other": Share(), "capped": Share(1.0, 0.0, 0.6)}
    flood = Flood(Timeline(shares, [100, 100], policy=policy, engines=[("x y", MANY)] * 2))
    choose = random.Random(1)
    timeline = flood.timeline
    timeline.advance([Call(0, "capped", 10, 1_000, "y")] * 2)
    for step in range(2, 200):
        if step == 20:
            later = [(20, "x"), (55, "x"), (45, "y")]
            timeline.advance([Call(step, "capped", blocks, 10, model) for blocks, model in later])
        waiting = 80 if step > 21 else 36 if step <= 3 else 0
        flood.advance((Call(step, "other", 5, choose.randint(5, 60), "x"), waiting))
    timeline.block_steps.clear()
    for step in range(200, 300):
        flood.advance((Call(step, "other", 5, choose.randint(5, 60), "x"), 80))
    assert timeline.block_steps["other"] >= 0.88 * 2 * 100 * 100


def test_what_was_paid_is_paid_back_for_an_older_one_once() -> None:
    """Of one channel `x` has a long line, all of it older than what comes for `y`: both have turns."""
    flood = Flood(Timeline({"other": Share(), "capped": Share(1.0, 0.0, 0.8)}, [100], engines=[("x y", MANY)]))
    choose = random.Random(1)
    for step in range(800):
        flood.advance(
            (Call(step, "other", 40, choose.randint(20, 40), "y"), 9),
            (Call(step, "capped", 30, choose.randint(5, 15), "y"), 1),
            (Call(step, "capped", 55, choose.randint(5, 15), "x"), 300),
        )
    assert flood.longest_wait("capped", "y") < 200
    assert flood.granted("capped", "x") > 15


@pytest.mark.parametrize("policy", ["virtual-channels", "predictive"])
@pytest.mark.parametrize("model", ["x", "y"])
def test_a_head_at_its_ceiling_keeps_out_of_no_worker_that_could_never_hold_it(policy: str, model: str) -> None:
    """Of two that only the large worker could hold one runs for long. What the small ones can run goes there."""
    shares, engines = {"capped": Share(1.0, 0.0, 0.9)}, [("x y", MANY)] * 4
    timeline = Timeline(shares, [200, 50, 50, 50], policy=policy, engines=engines)
    timeline.advance([Call(0, "capped", 150, 1_000, "x")] * 2)
    timeline.advance([Call(1, "capped", 30, 10, model)] * 9)
    for _ in range(100):
        timeline.advance()
    assert len(timeline.granted_at) == 10
    assert "capped-1" not in timeline.granted_at


@pytest.mark.parametrize("policy", ["virtual-channels", "predictive"])
def test_what_a_ceiling_keeps_out_of_a_large_worker_leaves_no_small_one_idle(policy: str) -> None:
    timeline = Timeline({"capped": Share(1.0, 0.0, 0.9)}, [200, 50, 50], policy=policy, engines=[("x y", MANY)] * 3)
    flood = Flood(timeline)
    held: list[int] = []
    for step in range(400):
        flood.advance((Call(step, "capped", 150, 20, "x"), 2), (Call(step, "capped", 5, 20, "y"), 20))
        held += [worker.ledger.held_blocks for worker in timeline.workers if worker.shape.capacity_blocks == 50]
    assert sum(held) > 0.8 * 50 * len(held)
    assert flood.granted("capped", "x") > 10


@pytest.mark.grid
@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("weight", [0.25, 1.0, 4.0])
def test_those_behind_a_head_at_its_ceiling_have_their_turns_on_workers_too_small_for_it(
    weight: float, heads: int, save: bool
) -> None:
    """What the ceiling waits for runs on; those behind need most of the small worker, of which others want a little."""
    shares = {"capped": Share(weight, 0.0, 0.6), "other": Share(), "third": Share()}
    flood = Flood(Timeline(shares, [30, 100], engines=[("x", MANY)] * 2))
    choose = random.Random(1)
    timeline = flood.timeline
    timeline.advance([Call(0, "capped", 31, 5_000, "x")])
    timeline.advance([Call(1, "other", 69, 5, "x")])
    timeline.advance([Call(2, "capped", 55, 10, "x")] * heads)
    for step in range(3, 1_500):
        flood.advance(
            (Call(step, "other", 3, choose.randint(8, 12), "x"), 10),
            (Call(step, "third", 26, 10, "x"), int(save)),
        )
        if step % 100 == 50:
            timeline.advance([Call(step, "capped", 25, 10, "x")])
    large = [name for name, call in timeline.calls.items() if call.blocks == 55]
    behind = [name for name, call in timeline.calls.items() if call.blocks == 25]
    assert not set(large) & timeline.granted_at.keys()
    waits = [timeline.granted_at.get(name, timeline.step) - timeline.calls[name].step for name in behind[:-1]]
    assert max(waits) < 150


@pytest.mark.parametrize("weight", [1.0, 4.0])
@pytest.mark.parametrize("model", ["x", "y"])
def test_a_head_at_its_ceiling_has_nobody_of_another_line_wait_behind_one_that_it_keeps_out(
    model: str, weight: float
) -> None:
    """The ceiling keeps 55 out of the large worker, and so 35, which is of either line; those of 25 fit the small."""
    flood = Flood(
        Timeline({"capped": Share(weight, 0.0, 0.7), "other": Share()}, [30, 100], engines=[("x y", MANY)] * 2)
    )
    choose = random.Random(1)
    timeline = flood.timeline
    timeline.advance([Call(0, "capped", 31, 5_000, "x")])
    timeline.advance([Call(1, "other", 69, 5, "x")])
    timeline.advance([Call(2, "capped", 55, 10, "x")])
    timeline.advance([Call(3, "capped", 35, 10, model)])
    for step in range(4, 700):
        flood.advance((Call(step, "other", 3, choose.randint(8, 12), "x"), 10))
        if step % 100 == 50:
            timeline.advance([Call(step, "capped", 25, 10, model)])
    behind = [name for name, call in timeline.calls.items() if call.blocks == 25]
    waits = [timeline.granted_at.get(name, timeline.step) - timeline.calls[name].step for name in behind[:-1]]
    assert max(waits) < 40
