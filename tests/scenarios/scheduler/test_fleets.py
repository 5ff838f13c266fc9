"""Isolation against a flood, and fleets of unequal workers, over virtual time."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from services.scheduler.core import messages as m
from services.scheduler.core.fleet import Worker
from services.scheduler.core.sharing.share import Share
from tests.support.effort import long
from tests.support.scheduling import WINDOW_TOKENS, Rig, shape
from tests.support.timeline import Call, Timeline

CAPACITY = 1_000
WARM_UP_STEPS = 600


def p99_wait_steps(flooded: bool, share: float, load: float) -> int:
    """Return the 99th percentile of the steps an interactive request waits for its grant.

    It comes with `load` times the traffic that its share of the worker could carry; alone on a worker as large as its
    share, or beside a batch channel with a hundred requests waiting for each that it runs.
    """
    draw, flood = random.Random(1), random.Random(2)
    part = int(CAPACITY * share)
    shares = {"interactive": Share(4.0, share if flooded else 0.0), "batch": Share(1.0)}
    timeline = Timeline(shares, [CAPACITY if flooded else part])
    mean_blocks, mean_steps = 4, 60
    rate = load * part / (mean_blocks * mean_steps)
    next_step = 0.0
    for step in range(3_000):
        calls = []
        while next_step <= step:
            calls.append(Call(step, "interactive", draw.randint(2, 6), draw.randint(30, 90)))
            next_step += draw.expovariate(rate)
        if flooded:
            missing = 100 * max(timeline.workers[0].ledger.reservations_by_channel()["interactive"], 1)
            missing -= timeline.waiting["batch"]
            calls += [Call(step, "batch", flood.randint(5, 15), flood.randint(50, 300)) for _ in range(missing)]
        timeline.advance(calls)
    waits = sorted(
        timeline.granted_at.get(name, timeline.step) - call.step - 1
        for name, call in timeline.calls.items()
        if call.channel == "interactive" and call.step > WARM_UP_STEPS
    )
    return waits[int(0.99 * len(waits))]


@pytest.mark.grid
@pytest.mark.parametrize(("share", "load"), [(0.3, 0.9), (0.3, 0.5), (0.1, 0.6)])
def test_a_flood_of_batch_costs_interactive_a_step_at_most(share: float, load: float) -> None:
    assert p99_wait_steps(True, share, load) <= 1.2 * p99_wait_steps(False, share, load) + 1


SIZES = {2: [300, 500], 4: [200, 300, 400, 600]}


@pytest.mark.parametrize("workers", [2, long(4)])
def test_workers_of_any_size_and_speed_end_together(workers: int) -> None:
    """Skewed lengths; the makespan stays near its lower bound, the work over what the fleet can do or the longest.

    Lengths are not known before, so at the end the longest still run while the rest is idle: the backlog is twenty
    times as long as the longest.
    """
    draw = random.Random(workers)
    rates = [1.0 + number / workers for number in range(workers)]
    timeline = Timeline({"a": Share()}, SIZES[workers], rates)
    calls = [
        Call(0, "a", draw.randint(5, 25), min(int(draw.lognormvariate(3.6, 0.8)), 120)) for _ in range(2_500 * workers)
    ]
    timeline.advance(calls)
    while timeline.busy:
        timeline.advance()
    work = sum(call.blocks * call.steps for call in calls)
    able = sum(capacity * rate for capacity, rate in zip(SIZES[workers], rates, strict=True))
    bound = max(work / able, max(call.steps for call in calls) / max(rates))
    assert timeline.step <= 1.05 * bound


def test_a_full_worker_holds_back_no_other() -> None:
    rig = Rig({"a": Share()})
    for worker_id in ("full", "free"):
        rig.open(worker_id, shape(10, 100))
    rig.announce("a", 9, 9, 8, *([1] * 2))
    assert [grant.booked_blocks for grant in rig.grants] == [9, 9, 1], "8 saves on one worker, 1 goes to the other"


@pytest.mark.parametrize("policy", ["virtual-channels", "predictive"])
def test_the_roomiest_worker_takes_a_request_whatever_else_others_serve(policy: str) -> None:
    rig = Rig({"a": Share()}, policy)
    for worker_id, aliases in (("first", ()), ("second", ()), ("third", ("k",)), ("fourth", ("j", "k"))):
        rig.open(worker_id, shape(1_000), aliases=aliases)
    rig.announce("a", *[10] * 60, model="m")
    taken = Counter(grant.worker_id for grant in rig.grants)
    assert sorted(taken.values()) == [15, 15, 15, 15]


def test_of_other_block_sizes_the_roomiest_holds_most_of_the_request() -> None:
    rig = Rig({"a": Share()})
    rig.open("fine", shape(600))
    rig.open("coarse", m.EngineShape(400, 2, WINDOW_TOKENS, 100))
    rig.announce("a", *[20] * 14)
    taken = Counter(grant.worker_id for grant in rig.grants)
    assert taken == {"fine": 2, "coarse": 12}, "30 and 40 of them fit, then 28 into each"


def test_a_grant_does_not_look_at_every_worker_of_a_large_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = 512
    rig = Rig({"a": Share(), "b": Share(2.0)})
    for number in range(workers):
        rig.open(f"w{number}", shape(10))
    rig.announce("a", *([5] * 4 * workers))
    rig.announce("b", *([5] * 4 * workers))
    assert len(rig.grants) == 2 * workers
    looks = 0
    policy = type(rig.machine.policy)

    def counting(_self: object, _request: m.Announced, worker: Worker, _blocks: int) -> int:
        nonlocal looks
        looks += 1
        return worker.usable_blocks

    monkeypatch.setattr(policy, "room_blocks", counting)
    for grant in list(rig.grants):
        rig.finish(grant)
    assert len(rig.grants) == 4 * workers
    assert looks <= 4 * 2 * workers, "a completion makes each channel look at its worker, and at few others"
