"""The bounds of docs/scheduling.md, over virtual time."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.scheduler.core import messages as m
from services.scheduler.core.sharing.share import Share
from tests.support.effort import examples
from tests.support.scheduling import Rig, shape
from tests.support.timeline import Call, Timeline

CAPACITY = 60
LONGEST_STEPS = 40
bounded = settings(max_examples=examples(15), deadline=None)


class Scarce(NamedTuple):
    """What a worker of `size` blocks or sequences runs out of, and requests that want so much of it."""

    sequences: bool
    size: int

    def timeline(self, shares: dict[str, Share], policy: str = "virtual-channels") -> Timeline:
        """Return a worker with plenty of the other."""
        if not self.sequences:
            return Timeline(shares, [self.size], policy=policy)
        return Timeline(shares, [100 * self.size], policy=policy, engines=[("m", self.size)])

    def call(self, step: int, channel: str, wanted: int, steps: int, model: str = "") -> Call:
        """Return a request that wants so much."""
        if self.sequences:
            return Call(step, channel, 1, steps, model, wanted)
        return Call(step, channel, wanted, steps, model)


def drawn(draw: random.Random, step: int, channel: str, largest: int, longest: int = LONGEST_STEPS) -> Call:
    return Call(step, channel, draw.randint(1, largest), draw.randint(1, longest))


@st.composite
def weights_and_largest(draw: st.DrawFn) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return weights, and largest requests of which none leaves the other channel more than its part when it waits."""
    weights = draw(st.tuples(st.integers(1, 8), st.integers(1, 8)))
    parts = [CAPACITY * weight // sum(weights) for weight in weights]
    return weights, (draw(st.integers(1, parts[1] + 1)), draw(st.integers(1, parts[0] + 1)))


@settings(max_examples=examples(8), deadline=None)
@given(
    channels=weights_and_largest(),
    longest=st.tuples(st.integers(1, LONGEST_STEPS), st.integers(1, LONGEST_STEPS)),
    later=st.integers(0, 2 * LONGEST_STEPS),
    seed=st.integers(0, 2**32),
)
@example(channels=((1, 1), (1, 1)), longest=(1, 2), later=0, seed=0).via("its estimates are wrong both ways")
@example(channels=((1, 1), (1, 1)), longest=(1, 1), later=1, seed=0).via("one ran alone while no time was known")
def test_two_channels_with_work_never_drift_apart(
    channels: tuple[tuple[int, int], tuple[int, int]], longest: tuple[int, int], later: int, seed: int
) -> None:
    """From when both have work on: `b` comes some steps after `a`, to which all is new."""
    draw = random.Random(seed)
    names = ("a", "b")
    weights, largest = channels
    timeline = Timeline({name: Share(float(weight)) for name, weight in zip(names, weights, strict=True)}, [CAPACITY])
    costs = [blocks * steps / weight for blocks, steps, weight in zip(largest, longest, weights, strict=True)]
    running = CAPACITY * max(longest)
    bound = 2 * sum(costs) + 2 * running * sum(1 / weight for weight in weights)
    for _ in range(later):
        missing = CAPACITY + 20 - timeline.waiting["a"]
        timeline.advance([drawn(draw, timeline.step, "a", largest[0], longest[0]) for _ in range(missing)])
    before = [timeline.block_steps[name] for name in names]
    for _ in range(500):
        calls = [
            drawn(draw, timeline.step, name, size, steps)
            for name, size, steps in zip(names, largest, longest, strict=True)
            for _ in range(CAPACITY + 20 - timeline.waiting[name])
        ]
        timeline.advance(calls)
        since = [timeline.block_steps[name] - had for name, had in zip(names, before, strict=True)]
        had = [block_steps / weight for block_steps, weight in zip(since, weights, strict=True)]
        assert abs(had[0] - had[1]) <= bound


@bounded
@given(largest=st.integers(1, CAPACITY), workers=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_a_head_waits_no_longer_than_twice_the_longest_request(largest: int, workers: int, seed: int) -> None:
    draw = random.Random(seed)
    timeline = Timeline({"a": Share()}, [CAPACITY] * workers)
    for _ in range(400):
        timeline.advance([drawn(draw, timeline.step, "a", largest) for _ in range(draw.randint(0, 3))])
    while timeline.busy:
        timeline.advance()
    for name, since in timeline.head_since.items():
        assert timeline.granted_at[name] - since <= 2 * LONGEST_STEPS


@bounded
@given(size=st.integers(1, CAPACITY), weight=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_a_request_of_any_size_starts_within_the_bound_against_a_flood(size: int, weight: int, seed: int) -> None:
    # What its share has to cover is its own cost; the flood takes its weight's part of the capacity meanwhile.
    # The worker is never less than half full, and the flood pays its debts and what is running first.
    cost = size * LONGEST_STEPS
    until_paid = 2 * (2 * cost * (weight + 1) + 8 * LONGEST_STEPS * weight) / CAPACITY + LONGEST_STEPS
    bound = until_paid + 4 * LONGEST_STEPS
    draw = random.Random(seed)
    timeline = Timeline({"flood": Share(float(weight)), "large": Share(1.0)}, [CAPACITY])
    for step in range(int(bound) + 400):
        calls = [drawn(draw, step, "flood", 4) for _ in range(100 - timeline.waiting["flood"])]
        if not timeline.waiting["large"]:
            calls.append(Call(step, "large", size, LONGEST_STEPS))
        timeline.advance(calls)
    for name, since in timeline.head_since.items():
        if name.startswith("large"):
            assert timeline.granted_at.get(name, timeline.step) - since <= bound


LONGEST_SCARCE = 12
scarcity = st.tuples(st.integers(1, 6), st.sampled_from([1, 20, 1000]))
three_weights = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))


@bounded
@given(places=scarcity, weights=three_weights, large=st.integers(1, 100), every=st.integers(2, 30), seed=st.integers())
@example(places=(2, 1000), weights=(1, 1, 3), large=50, every=29, seed=1).via("blocks in hand were spent as sequences")
@example(places=(4, 1000), weights=(1, 1, 1), large=75, every=8, seed=2).via("blocks in hand were spent as sequences")
def test_who_comes_where_sequences_are_scarce_starts_within_the_bound(
    places: tuple[int, int], weights: tuple[int, int, int], large: int, every: int, seed: int
) -> None:
    """`a` and `c` have had work for long, small requests and now and then one of `large` hundredths of the cache."""
    draw, (sequences, blocks_each) = random.Random(seed), places
    capacity = sequences * blocks_each
    shares = {name: Share(float(weight)) for name, weight in zip("acb", weights, strict=True)}
    timeline = Timeline(shares, [capacity], engines=[("m", sequences)])

    def small(name: str) -> Call:
        return Call(timeline.step, name, 1, draw.randint(8, LONGEST_SCARCE))

    def missing(names: str) -> list[Call]:
        return [small(name) for name in names for _ in range(8 - timeline.waiting[name])]

    for _ in range(draw.randint(50, 400)):
        blocks = max(capacity * large // 100, 1)
        calls = missing("ac")
        timeline.advance([call if draw.randrange(every) else call._replace(blocks=blocks) for call in calls])
    came, first = timeline.step, f"b-{len(timeline.calls)}"
    others = sum(1 + weight / min(weights) for weight in weights[:2])
    bound = LONGEST_SCARCE * (sum(weights) / weights[2] + 2 * 3 + others)
    while first not in timeline.granted_at:
        timeline.advance([*missing("b"), *missing("ac")])
        assert timeline.step - came <= bound


@bounded
@given(sequences=st.booleans(), seed=st.integers(0, 2**32), steps=st.integers(2, 20))
def test_who_passes_does_not_delay_the_booked_start(sequences: bool, seed: int, steps: int) -> None:
    """Every request takes its channel's usual time, so estimates are right: the head starts as if it were alone."""

    def start_of_the_head(small_too: bool) -> int:
        draw, scarce = random.Random(seed), Scarce(sequences, CAPACITY)
        timeline = scarce.timeline({"a": Share(), "quick": Share()})
        timeline.advance([scarce.call(0, "quick", 1, 1), scarce.call(0, "a", 1, steps)])
        while timeline.busy:
            timeline.advance()
        for _ in range(5):
            timeline.advance([scarce.call(timeline.step, "a", draw.randint(5, 12), steps)])
        timeline.advance([scarce.call(timeline.step, "a", draw.randint(40, CAPACITY), steps)])
        (head,) = [name for name in timeline.calls if name not in timeline.granted_at] or [""]
        while head and head not in timeline.granted_at:
            small = [scarce.call(timeline.step, "quick", draw.randint(1, 9), 1) for _ in range(2)]
            timeline.advance(small if small_too else [])
        return timeline.granted_at.get(head, 0)

    assert start_of_the_head(small_too=True) == start_of_the_head(small_too=False)


@pytest.mark.parametrize("scarce", [Scarce(False, CAPACITY), Scarce(True, CAPACITY)], ids=["blocks", "sequences"])
@pytest.mark.parametrize("breaks", [False, True])
def test_a_short_request_passes_one_that_waits_for_its_booked_start(breaks: bool, scarce: Scarce) -> None:
    timeline = scarce.timeline({"a": Share(), "quick": Share()})
    timeline.advance([scarce.call(0, "quick", 1, 1), scarce.call(0, "a", 1, 30)])
    while timeline.busy:
        timeline.advance()
    timeline.advance([scarce.call(timeline.step, "a", 40, 30)])
    if breaks:
        timeline.reopen("w0")
    timeline.advance([scarce.call(timeline.step, "a", 50, 30)])
    timeline.advance([scarce.call(timeline.step, "quick", 20, 1)])
    assert len(timeline.granted_at) == 4
    timeline.advance([scarce.call(timeline.step, "a", 15, 30)])
    assert timeline.waiting == {"a": 2, "quick": 0}, "what would outlast the booked start and not fit beside it waits"
    for wanted, waiting in ((4, 2), (5, 2), (2, 3)):
        timeline.advance([scarce.call(timeline.step, "a", wanted, 30)])
        assert timeline.waiting["a"] == waiting, "the ten beside the head are for who comes first"


@pytest.mark.grid
@pytest.mark.parametrize("policy", ["virtual-channels", "predictive"])
@pytest.mark.parametrize("running", [40, 70, 150])
@pytest.mark.parametrize("sequences", [False, True])
def test_short_requests_pass_one_that_waits_for_long_ones_however_many_run(
    sequences: bool, running: int, policy: str
) -> None:
    scarce, choose = Scarce(sequences, running + 10 if sequences else 2_000), random.Random(3)
    timeline = scarce.timeline({"quick": Share(), "slow": Share()}, policy)
    quick = scarce.call(0, "quick", 1 if sequences else 2, 1, "m")
    slow = scarce.call(0, "slow", 1 if sequences else 1_900 // running, 0, "m")

    def slow_missing() -> int:
        return running - sum(name.startswith("slow") and name not in timeline.ended_at for name in timeline.calls)

    for _ in range(500):
        most = slow_missing() if timeline.step < 2 else max(running // 60, 1)
        timeline.advance(
            [slow._replace(steps=choose.randint(80, 120)) for _ in range(min(slow_missing(), most))] + [quick] * 10
        )
    timeline.advance([scarce.call(timeline.step, "slow", scarce.size * 2 // 3, 10, "m")])
    head, since = f"slow-{len(timeline.calls) - 1}", timeline.step
    while head not in timeline.granted_at and timeline.step - since < 120:
        timeline.advance([quick._replace(step=timeline.step)] * 10)
    waits = [
        timeline.granted_at.get(name, timeline.step) - call.step
        for name, call in timeline.calls.items()
        if call.channel == "quick" and call.step >= since
    ]
    assert max(waits) <= 15, "a start is booked a little early at most; the head has waited for three times as long"
    assert timeline.step - since >= 35


def test_a_start_is_booked_beside_the_sequences_that_a_guarantee_keeps() -> None:
    """It used them lately: the end of one request brings the head's, but not these."""
    shares = {"a": Share(), "quick": Share(), "kept": Share(1.0, 0.3)}
    timeline = Timeline(shares, [1_000], engines=[("m", 10)])
    timeline.advance([Call(0, "quick", 1, 1), Call(0, "a", 1, 30), Call(0, "kept", 1, 30, completions=3)])
    while timeline.busy:
        timeline.advance()
    timeline.advance([Call(timeline.step, "a", 1, 30)])
    for _ in range(10):
        timeline.advance()
    timeline.advance([Call(timeline.step, "a", 1, 30, completions=6)])
    timeline.advance([Call(timeline.step, "a", 1, 30, completions=4)])
    for _ in range(3):
        timeline.advance([Call(timeline.step, "quick", 1, 1)])
    while len(timeline.ended_at) < 7:
        timeline.advance()
    timeline.advance([Call(timeline.step, "quick", 1, 1)])
    assert timeline.waiting == {"a": 1, "quick": 0, "kept": 0}


def test_where_ends_bring_too_little_a_start_is_booked_by_the_longest_usual_time() -> None:
    """The engine holds more than the ledger knows of: when that ends nobody can tell, but others need not wait now."""
    rig = Rig({"a": Share(), "quick": Share()})
    epoch = rig.open("w", shape(CAPACITY))
    for channel, milliseconds in (("quick", 10), ("a", 300)):
        rig.announce(channel, 1)
        rig.wait(milliseconds)
        rig.finish(rig.grants[-1])
    rig.announce("a", 20)
    rig.wait(295)
    rig.tell(m.EngineReport(epoch, epoch, blocks_free=20))
    rig.announce("a", CAPACITY)
    rig.announce("quick", 5)
    assert rig.grants[-1].channel == "quick", "it ends long before the head could start"
    rig.wait(100)
    rig.announce("quick", 5)
    assert len(rig.grants) == 5, "the other one has not started yet"
    rig.wait(300)
    rig.announce("quick", 5)
    assert len(rig.grants) == 5, "the booked start has come"


@bounded
@given(seed=st.integers(0, 2**32), guarantee=st.floats(0.15, 0.5))
def test_a_lower_tier_goes_first_and_guarantees_hold_against_it(seed: int, guarantee: float) -> None:
    draw = random.Random(seed)
    shares = {"behind": Share(8.0, 0.0, 1.0, 1), "kept": Share(1.0, guarantee, 1.0, 1), "first": Share(1.0)}
    timeline = Timeline(shares, [CAPACITY])
    for step in range(300):
        calls = [drawn(draw, step, name, 5) for name in shares for _ in range(80 - timeline.waiting[name])]
        timeline.advance(calls)
        kept = shares["kept"].guaranteed_blocks(CAPACITY)
        held = timeline.workers[0].ledger.held_by("kept")
        assert held > kept - 5, "its head, of 5 blocks at most, would fit into its guarantee"
    # All that is left to the other tier beyond guarantees is what passes heads of the first.
    assert timeline.block_steps["behind"] <= 0.05 * 300 * CAPACITY
    assert timeline.block_steps["kept"] <= 300 * (kept + 0.05 * CAPACITY)
