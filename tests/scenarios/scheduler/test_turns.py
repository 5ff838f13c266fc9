"""Whose turn it is where engines are short of places, channels ask for several models, or a large head waits long."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from services.scheduler.core import messages as m
from services.scheduler.core.sharing.share import Share
from tests.support.flood import Flood
from tests.support.scheduling import Rig, shape
from tests.support.timeline import Call, Timeline

STEPS = 10
"""How long the small requests hold their blocks."""

MANY = 1_000


@pytest.mark.parametrize("policy", ["virtual-channels", "predictive"])
@pytest.mark.parametrize("weight", [1.0, 4.0])
def test_what_a_head_could_pay_is_not_spent_by_its_channels_other_line(policy: str, weight: float) -> None:
    """`both` has a full worker for another model, and asks now and then for the one of which all places are taken."""
    shares = {"flood": Share(weight), "both": Share()}
    flood = Flood(Timeline(shares, [100, 100], policy=policy, engines=[("m", 4), ("n", MANY)]))
    for step in range(600):
        flood.advance(
            (Call(step, "flood", 2, STEPS, "m"), 20),
            (Call(step, "both", 10, STEPS, "n"), 20),
            (Call(step, "both", 2, STEPS, "m"), 1),
        )
    assert flood.longest_wait("both", "m") <= 5 * STEPS
    assert flood.granted("flood", "m") > flood.granted("both", "m"), "it asks for one at a time"


@pytest.mark.parametrize("before", [100, 1_000])
def test_who_comes_later_waits_no_longer_the_longer_others_have_run(before: int) -> None:
    """What `first` gained while its heads saved, as `other` began rounds elsewhere, is not held against `later`."""
    shares = {"first": Share(), "later": Share(), "other": Share()}
    flood = Flood(Timeline(shares, [100, 100], policy="predictive", engines=[("m", 4), ("n", MANY)]))
    for step in range(before + 40 * STEPS):
        flood.advance(
            (Call(step, "first", 2, STEPS, "m"), 20),
            (Call(step, "other", 10, STEPS, "n"), 20),
            (Call(step, "later", 2, STEPS, "m"), 20 if step >= before else 0),
        )
    first_grant = min(flood.timeline.granted_at.get(name, MANY**2) for name in flood.asked["later", "m"])
    assert first_grant - before <= 5 * STEPS
    assert flood.granted("later", "m", before) >= 0.4 * 4 * 40, "two channels alike have half of the places each"


@pytest.mark.parametrize("capacities", [[100, 100], [100, 40]])
@pytest.mark.parametrize("weight", [1.0, 9.0])
def test_what_a_large_head_leaves_idle_is_divided_by_weight(capacities: list[int], weight: float) -> None:
    """`whale-1` has paid and waits until `whale-0` has begun and it can save; rounds go on for who fits meanwhile."""
    shares = {"whale-0": Share(), "whale-1": Share(), "heavy": Share(weight), "light": Share()}
    apart = capacities[0] == capacities[1]
    models = ("a", "b") if apart else ("b", "b")
    flood = Flood(Timeline(shares, capacities, engines=[(model, MANY) for model in models]))
    for step in range(1_500):
        flood.advance(
            *((Call(step, name, 60, 1_000, models[0]), 2) for name in ("whale-0", "whale-1")),
            *((Call(step, name, 10, STEPS, "b"), 20) for name in ("heavy", "light")),
        )
    granted_at = flood.timeline.granted_at
    at = sorted(granted_at[name] for name in flood.asked["light", "b"] if name in granted_at)
    assert max(later - earlier for earlier, later in pairwise(at)) <= 10 * STEPS
    part = flood.granted("heavy", "b") / (flood.granted("heavy", "b") + flood.granted("light", "b"))
    assert part == pytest.approx(weight / (weight + 1), abs=0.07)


@pytest.mark.parametrize("policy", ["virtual-channels", "predictive"])
def test_heads_that_wait_for_one_model_leave_no_other_idle(policy: str) -> None:
    """Three channels ask for each of many models, a worker each, in requests that share one and that do not."""
    models = [f"m{number}" for number in range(12)]
    flood = Flood(
        Timeline(dict.fromkeys("abc", Share()), [100] * 12, policy=policy, engines=[(x, MANY) for x in models])
    )
    choose = random.Random(1)
    for step in range(300):
        flood.advance(
            *(
                (Call(step, channel, choose.choice([10, 60, 70]), choose.randint(3, 12), model), 3)
                for channel in "abc"
                for model in models
            )
        )
    held = flood.timeline.block_steps
    assert sum(held.values()) >= 0.65 * 300 * 100 * len(models)
    assert min(held.values()) >= 0.9 * max(held.values())


@pytest.mark.parametrize("weight", [1.0, 4.0])
@pytest.mark.parametrize("beside", [0.0, 16.0])
def test_two_are_divided_by_weight_whoever_is_beside_them_on_another_model(weight: float, beside: float) -> None:
    shares = {"large": Share(), "small": Share(weight), "beside": Share(beside or 1.0)}
    flood = Flood(Timeline(shares, [100, 100], engines=[("a", MANY), ("b", MANY)]))
    for step in range(2_000):
        flood.advance(
            (Call(step, "large", 60, 3 * STEPS, "a"), 3),
            (Call(step, "small", 10, STEPS, "a"), 20),
            (Call(step, "beside", 10, STEPS, "b"), 20 if beside else 0),
        )
    held = flood.timeline.block_steps
    assert held["large"] / (held["large"] + held["small"]) == pytest.approx(1 / (1 + weight), abs=0.03)


def test_what_a_head_has_paid_comes_back_when_it_leaves() -> None:
    """`both` runs for one model, and has paid for a head of another whose places are all taken; that is cancelled."""
    flood = Flood(Timeline({"flood": Share(), "both": Share()}, [100, 100], engines=[("m k", 4), ("n k", MANY)]))
    machine = flood.timeline.rig.machine
    for step in range(20 * STEPS):
        flood.advance(
            (Call(step, "flood", 2, STEPS, "m"), 20),
            (Call(step, "both", 10, STEPS, "n"), 20),
            (Call(step, "both", 2, STEPS, "m"), 1),
        )
        if deposits := [
            one for one in machine._arbiter._deposits._by_request.values() if one.account.channel.name == "both"
        ]:
            break
    (deposit,) = deposits
    before_block_ns = deposit.account.deficit_block_ns
    machine.step(m.Gone(deposit.entry.request_id, m.GoneReason.ENDED), flood.timeline.rig.now_ns)
    machine._arbiter.begin(flood.timeline.rig.now_ns)
    assert deposit.account.deficit_block_ns == before_block_ns + deposit.paid_block_ns


def test_weights_divide_several_models_that_all_share() -> None:
    """A channel of whose heads one has paid gains in full, or those of little weight would catch up with it."""
    weights = {"a": 1.0, "b": 4.0, "c": 16.0}
    models = ("m", "n", "o")
    engines = [(model, MANY) for model in models]
    flood = Flood(Timeline({name: Share(weight) for name, weight in weights.items()}, [100] * 3, engines=engines))
    choose = random.Random(1)
    for step in range(1_500):
        flood.advance(
            *(
                (Call(step, channel, choose.choice([10, 60, 70]), choose.randint(3, 12), model), 3)
                for channel in weights
                for model in models
            )
        )
    held = flood.timeline.block_steps
    for name, weight in weights.items():
        assert held[name] / sum(held.values()) == pytest.approx(weight / 21, rel=0.2)


@pytest.mark.parametrize("policy", ["virtual-channels", "predictive"])
@pytest.mark.parametrize(("beside", "weight"), [(1, 1.0), (1, 16.0), (8, 1.0)])
def test_a_head_that_waits_for_the_large_worker_leaves_the_small_ones_to_those_behind_it(
    policy: str, beside: int, weight: float
) -> None:
    """`mixed` has one of 60, which others flood the only worker with that could hold it, and of 40 without end."""
    shares = {"mixed": Share(), **{f"crowd-{number}": Share(weight) for number in range(beside)}}
    timeline = Timeline(shares, [100, 50, 50, 50], policy=policy, engines=[("m", MANY)] * 4)
    before = 100
    for step in range(before + 50 * STEPS):
        calls = [Call(step, "mixed", 60, STEPS, "m")] if step == before else []
        for name in shares:
            size, least = (40, 20) if name == "mixed" else (60, 6)
            calls += [Call(step, name, size, STEPS, "m")] * (least - timeline.waiting[name])
        timeline.advance(calls)
        assert all(len(worker.ledger) for worker in timeline.workers[1:])
    (waited,) = (at - timeline.calls[name].step for name, at in timeline.granted_at.items() if is_large(timeline, name))
    assert waited <= (beside + 10) * STEPS


def is_large(timeline: Timeline, name: str) -> bool:
    """Return whether a request is the large one of `mixed`."""
    call = timeline.calls[name]
    return call.channel == "mixed" and call.blocks == 60


def test_a_channel_alone_keeps_nothing_from_its_own_but_for_its_head() -> None:
    """It has turns in hand, for its requests end sooner than expected. Until another comes nobody waits for its own."""
    timeline = Timeline({"one": Share(), "other": Share()}, [100] * 4, engines=[("m", MANY)] * 4)
    sizes = [(90, 100)] * 4 + [(90, 1)] * 4 + [(60, 100)] * 16
    timeline.advance([Call(0, "one", blocks, steps, "m") for blocks, steps in sizes])
    while len(timeline.granted_at) < 12:
        timeline.advance()
    savings = timeline.rig.machine._arbiter._savings
    assert [saving.channel.name for saving in savings] == ["one"]
    timeline.advance([Call(timeline.step, "other", 60, 100, "m")])
    assert [saving.channel.name for saving in savings].count("one") > 1


def test_who_saves_behind_a_head_that_waits_saves_once() -> None:
    """`mixed` waits with one of 60 for the large worker; of those of 40 behind it some save on small ones meanwhile."""
    shares = {"mixed": Share(4.0), **{f"crowd-{number}": Share() for number in range(8)}, "small": Share()}
    timeline = Timeline(shares, [100, 50, 50, 50], engines=[("m", MANY)] * 4)
    began: list[str] = []
    choose = random.Random(1)
    for step in range(300):
        calls = [Call(step, "mixed", 60, 15, "m")] if step == 50 else []
        for name in shares:
            size, hold = {"mixed": (40, choose.randint(5, 15)), "small": (30, choose.randint(5, 15))}.get(
                name, (60, 15)
            )
            calls += [Call(step, name, size, hold, "m")] * (12 - timeline.waiting[name])
        before = savers(timeline)
        timeline.advance(calls)
        began += savers(timeline) - before
    assert len(began) > 10
    assert len(set(began)) == len(began)


def savers(timeline: Timeline) -> set[str]:
    """Return the requests of `mixed` that save."""
    savings = timeline.rig.machine._arbiter._savings
    return {saving.entry.request_id for saving in savings if saving.channel.name == "mixed"}


@pytest.mark.parametrize("models", ["x", "x k"], ids=["as the first", "of another kind"])
def test_a_head_that_waits_saves_on_a_worker_that_comes(models: str) -> None:
    """`first` waits for the only worker, on which `before` saves, when a second comes; `crowd` asks for it later."""
    flood = Flood(Timeline({name: Share() for name in ("before", "first", "crowd")}, [100], engines=[("x", MANY)]))
    timeline = flood.timeline
    flood.advance((Call(0, "before", 90, 1_000, "x"), 1))
    flood.advance((Call(1, "before", 90, 10, "x"), 1))
    flood.advance((Call(2, "first", 60, 10, "x"), 1))
    model, *aliases = models.split()
    running = [m.Holding(f"old-{number}", "crowd", 10, 0, 1) for number in range(8)]
    epoch = timeline.rig.open("w1", shape(85, MANY), running, model=model, aliases=tuple(aliases))
    timeline.speeds[epoch] = 1.0
    choose = random.Random(1)
    for step in range(3, 60):
        if step >= 10 and running:
            ended = running.pop().request_id
            timeline.rig.tell(m.CompletionAck(epoch, epoch, ended, 10**6 + step, m.ReleaseCause.COMPLETED))
        flood.advance((Call(step, "crowd", 10, choose.randint(5, 15), "x"), 20))
    assert flood.granted("first", "x") == 1
    assert flood.longest_wait("first", "x") < 40


@pytest.mark.parametrize("small", [63, 64])
def test_a_head_saves_on_the_large_worker_however_many_small_ones_have_more_room(small: int) -> None:
    """Of small workers all sequences are taken, and most blocks are free. Others fill the large one all the time."""
    shares = {"tiny": Share(), "crowd": Share(), "own": Share()}
    engines = [("m", 4)] * small + [("m", MANY)]
    flood = Flood(Timeline(shares, [100] * small + [400], engines=engines))
    choose = random.Random(1)
    for step in range(300):
        calls = [(Call(step, "tiny", 1, choose.randint(20, 60), "m"), 4 * small if step == 0 else 16)]
        if step:
            calls.append((Call(step, "crowd", 8, choose.randint(20, 60), "m"), 60))
        if step == 200:
            calls.append((Call(step, "own", 300, 10, "m"), 1))
        flood.advance(*calls)
    assert flood.granted("own", "m") == 1


@pytest.mark.parametrize("policy", ["virtual-channels", "predictive"])
@pytest.mark.parametrize("saved_on", [8, 64, 80])
def test_a_head_saves_where_nobody_does_however_many_others_have_more_room(policy: str, saved_on: int) -> None:
    """What others save piles up, so the workers that have most room are those it may not have."""
    large = [f"large-{number}" for number in range(saved_on + 1)]
    rig = Rig({name: Share() for name in ("small", *large)}, policy)
    for number in range(saved_on + 1):
        rig.open(f"w-{number}", shape(100))
    rig.announce("small", 1)
    rig.wait(1_000)
    rig.finish(rig.grants.pop())
    rig.announce("small", *[10] * 10 * (saved_on + 1))
    runs: dict[str, list[m.Grant]] = {}
    for grant in rig.grants:
        runs.setdefault(grant.worker_id, []).append(grant)
    for name in large:
        for saving in rig.machine._arbiter._savings:
            if len(grants := runs[saving.worker.worker_id]) == 10:
                rig.finish(grants.pop())
        (last,) = rig.announce(name, 60)
    rig.announce("small", *[10] * 50)
    for grants in [grants for grants in runs.values() if len(grants) == 10]:
        for _ in range(6):
            rig.finish(grants.pop())
    assert last in rig.granted, "what ends there is kept for it"
