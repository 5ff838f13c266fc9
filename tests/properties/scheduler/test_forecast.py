"""The forecast's sums are exactly the sums of its requests, and what they say is what a simulation of them shows."""

from __future__ import annotations

import math
import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.admission.estimate import need_blocks
from services.scheduler.core.admission.forecast import NO_DEMAND, Forecast, Size, horizons_of
from services.scheduler.core.admission.lengths import MOST_BINS, Curve, Kind, Lengths, bin_of, prompt_class
from services.scheduler.core.admission.predictive import Predictive
from services.scheduler.core.messages import CompletionAck, EngineShape, Grant, Holding, ReleaseCause, TokenizerAck
from services.scheduler.core.sharing.share import Share
from tests.support.effort import examples
from tests.support.scheduling import Rig, shape

SHAPE = EngineShape(1000, 16, 4096, 256)
KIND = Kind("m", "batch", 0)
ENDLESS = Curve((1.0,) * (MOST_BINS + 1))
"""All run to their limit."""

sizes = st.builds(
    lambda prompt, generated, left, n: Size(
        n * need_blocks(prompt + generated + 2, 16), prompt, generated, generated + left, n
    ),
    st.integers(1, 2000), st.integers(0, 1000), st.integers(1, 1000), st.integers(1, 3),
)  # fmt: skip


@cache
def geometric(mean: float) -> Curve:
    """Return the curve of outputs that end at each token with the same chance."""
    known = Lengths()
    rng = random.Random(1)
    for _ in range(5000):
        tokens = math.ceil(rng.expovariate(1 / mean)) or 1
        known.reached(KIND, 0, bin_of(tokens))
        known.ended(KIND, tokens)
    return known.curve(KIND)


@given(block_size=st.sampled_from([1, 16, 128]), window=st.integers(1, 200_000))
def test_looks_ahead_reach_from_near_to_the_whole_window(block_size: int, window: int) -> None:
    horizons = horizons_of(SHAPE.replace(block_size=block_size, max_model_len=window))
    assert list(horizons) == sorted(set(horizons))
    assert horizons[-1] == window
    assert horizons[0] >= 1
    assert len(horizons) < 40


@given(first=st.lists(sizes, max_size=10), later=st.lists(sizes, max_size=10), chosen=st.sampled_from([0, 1]))
def test_requests_leave_nothing_behind(first: list[Size], later: list[Size], chosen: int) -> None:
    curve = (ENDLESS, geometric(100))[chosen]
    forecast, fresh = Forecast(SHAPE), Forecast(SHAPE)
    gone = [forecast.demand(size, curve) for size in first]
    stays = [forecast.demand(size, curve) for size in later]
    for demand in (*gone, *stays):
        forecast.add(demand)
    for demand in gone:
        forecast.remove(demand)
    for demand in stays:
        fresh.add(demand)
    assert forecast.spare_blocks(NO_DEMAND, 2.0) == fresh.spare_blocks(NO_DEMAND, 2.0)
    for demand in stays:
        forecast.remove(demand)
    assert forecast.spare_blocks(NO_DEMAND, 2.0) == SHAPE.capacity_blocks


@given(known=st.lists(sizes, min_size=1, max_size=8), extra=sizes, part=st.floats(0, 1), deviations=st.floats(0, 6))
def test_what_is_shared_is_counted_once_and_no_less(
    known: list[Size], extra: Size, part: float, deviations: float
) -> None:
    curve = geometric(100)
    forecast = Forecast(SHAPE)
    for size in known:
        forecast.add(forecast.demand(size, curve))
    demand = forecast.demand(extra, curve)
    held = sum(size.held_blocks for size in known)
    shared = int(part * held)
    apart = {at: forecast.spare_blocks(demand, at) for at in (0.0, deviations)}
    forecast.share(shared, held, sum(size.completions for size in known))
    together = {at: forecast.spare_blocks(demand, at) for at in (0.0, deviations)}
    assert apart[0.0] <= together[0.0] <= apart[0.0] + shared
    assert apart[deviations] <= together[deviations] <= together[0.0]
    forecast.share(0, held, 1)
    assert forecast.spare_blocks(demand, deviations) == apart[deviations]
    spread = forecast.deviation_share(deviations)
    forecast.share(held, held, len(known))
    assert forecast.deviation_share(deviations) == 0 <= spread, "who ends frees what it alone has"


def test_what_is_shared_makes_room_for_others() -> None:
    forecast = Forecast(SHAPE)
    for _ in range(20):
        forecast.add(forecast.demand(Size(40, 638, 0, 100), geometric(50)))
    apart = forecast.spare_blocks(NO_DEMAND, 0.0)
    forecast.share(400, 800, 20)
    # Nearly all run at the first look, and are expected to share half of what they hold; later fewer do.
    assert apart + 360 <= forecast.spare_blocks(NO_DEMAND, 0.0) <= apart + 400


def test_what_is_shared_makes_room_below_what_all_hold_at_most() -> None:
    forecast = Forecast(SHAPE)
    for _ in range(20):
        forecast.add(forecast.demand(Size(40, 638, 0, 100), ENDLESS))
    apart = forecast.spare_blocks(NO_DEMAND, 1000.0)
    forecast.share(400, 800, 20)
    # They are largest a moment before the look, by which they would have gained more: a little less is taken off.
    assert apart + 380 <= forecast.spare_blocks(NO_DEMAND, 1000.0) <= apart + 400


def test_nobody_shares_what_is_yet_to_be_generated() -> None:
    forecast = Forecast(SHAPE.replace(capacity_blocks=10_000))
    half = Curve((1.0, 1.0, *(0.5,) * (MOST_BINS - 1)))
    sizes = [Size(138, 2046, 0, 2000) for _ in range(40)]
    for size in sizes:
        forecast.add(forecast.demand(size, half))
    forecast.share(39 * 128, 40 * 138, 40)
    # Half of them run on: each has its own 10 blocks and what 2,000 tokens fill, and all the same 128.
    left, grown = 20 * (10 + 2000 / 16), 128
    assert forecast.spare_blocks(NO_DEMAND, 0.0) == pytest.approx(10_000 - left - grown, abs=200)


@given(known=st.lists(sizes, max_size=5), extra=sizes, deviations=st.floats(0, 6))
def test_one_more_request_or_margin_never_leaves_more_room(known: list[Size], extra: Size, deviations: float) -> None:
    curve = geometric(100)
    forecast = Forecast(SHAPE)
    for size in known:
        forecast.add(forecast.demand(size, curve))
    demand = forecast.demand(extra, curve)
    alone = forecast.spare_blocks(NO_DEMAND, deviations)
    assert forecast.spare_blocks(demand, deviations) <= alone <= forecast.spare_blocks(NO_DEMAND, 0)
    forecast.add(demand)
    assert forecast.peak_blocks(deviations) >= SHAPE.capacity_blocks - alone


@given(known=st.lists(sizes, max_size=8), deviations=st.floats(0, 4))
def test_a_deviation_of_margin_costs_the_share_that_is_told(known: list[Size], deviations: float) -> None:
    forecast = Forecast(SHAPE)
    for size in known:
        forecast.add(forecast.demand(size, geometric(100)))
    one = forecast.deviation_share(deviations) * SHAPE.capacity_blocks
    wider = forecast.peak_blocks(deviations + 0.01) - forecast.peak_blocks(deviations)
    # Blocks are whole. What all of them hold at most bounds the peak but not the deviation, so that the fullest look
    # may be another for the one than for the other.
    widest = max(math.sqrt(variance / 1024) for variance in forecast._variances)
    assert one <= widest * (1 + 1e-9)
    assert wider <= 0.01 * widest + 1
    assert one >= 0
    assert (one == 0) == (not known or all(size.limit - size.generated <= 1 for size in known))


def test_of_many_requests_a_deviation_of_margin_costs_just_that_share() -> None:
    forecast = Forecast(SHAPE)
    for number in range(60):
        forecast.add(forecast.demand(Size(5, 64, 10 * (number % 3), 1000), geometric(100)))
    wider = forecast.peak_blocks(2.0) - forecast.peak_blocks(1.0)
    assert wider == pytest.approx(forecast.deviation_share(1.5) * SHAPE.capacity_blocks, rel=0.15)
    assert wider > 10


@given(known=st.lists(sizes, min_size=1, max_size=6))
def test_with_nothing_learned_every_request_is_expected_at_its_peak(known: list[Size]) -> None:
    """At its own last step each stands at its peak; the sum of the peaks is never exceeded."""
    forecast = Forecast(SHAPE)
    peaks = []
    for size in known:
        forecast.add(forecast.demand(size, ENDLESS))
        written = min(size.prompt_tokens + size.limit, SHAPE.max_model_len) - 1
        peaks.append(max(size.completions * need_blocks(written, 16), size.held_blocks))
    last = max(known, key=lambda size: size.limit - size.generated)
    peak = forecast.peak_blocks(0.0)
    assert peak <= sum(peaks)
    if last.limit - last.generated > 4:
        longest = last.completions * need_blocks(min(last.prompt_tokens + last.limit, 4096) - 1, 16)
        assert peak >= longest - last.completions, "it grows to its own peak, but for a block that is partly used"


def test_it_foresees_what_a_simulation_shows() -> None:
    """40 requests that end at each token with one chance in 100: mean and spread of their blocks, some steps on."""
    rng = random.Random(7)
    curve = geometric(100)
    forecast = Forecast(SHAPE)
    known = [Size(need_blocks(prompt + 2, 16), prompt, 0, 2000) for prompt in rng.choices(range(50, 400), k=40)]
    for size in known:
        forecast.add(forecast.demand(size, curve))
    for index in (2, 3, 5):
        steps = horizons_of(SHAPE)[index]
        totals = []
        for _ in range(1500):
            running = [size for size in known if rng.expovariate(1 / 100) > steps]
            totals.append(sum(size.held_blocks + steps / 16 for size in running))
        mean = sum(totals) / len(totals)
        spread = math.sqrt(sum((total - mean) ** 2 for total in totals) / len(totals))
        assert forecast._means[index] / 1024 == pytest.approx(mean, rel=0.05)
        assert math.sqrt(forecast._variances[index] / 1024) == pytest.approx(spread, rel=0.1)


@settings(max_examples=examples(60), deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["announce", "settle", "finish", "reconnect"]), st.integers(0, 50)), max_size=60
    )
)
def test_the_forecast_of_a_worker_counts_each_of_its_requests_once(steps: list[tuple[str, int]]) -> None:
    rig = Rig({"batch": Share()}, policy="predictive")
    rig.open("w", shape(200))
    running: list[Grant] = []
    for what, number in steps:
        if what == "announce":
            rig.announce("batch", *([1 + number % 20] * 3), max_tokens=30)
        elif what == "settle" and running:
            rig.settle(running[number % len(running)], 1 + number)
        elif what == "finish" and running:
            rig.finish(running.pop(number % len(running)))
        elif what == "reconnect":
            rig.open("w", shape(200), inventory=[Holding(one.request_id, "batch", 3, 0) for one in running[:5]])
            running = []
        running += [grant for grant in rig.grants if grant.epoch == rig.worker("w").epoch]
        rig.grants = []
        policy = rig.machine.policy
        assert isinstance(policy, Predictive)
        view = policy._views[rig.worker("w").epoch]
        assert set(view.flights) == set(rig.worker("w").ledger)
        summed = Forecast(view.forecast._shape)
        for flight in view.flights.values():
            summed.add(flight.demand)
        assert summed._means == view.forecast._means
        assert summed._variances == view.forecast._variances
        assert summed._mosts == view.forecast._mosts


def test_what_a_worker_brings_along_is_learned_by_completion() -> None:
    """Three outputs of 100 tokens are not one of 300."""
    lengths = []
    for completions in (1, 3):
        rig = Rig({"batch": Share()}, policy="predictive")
        brought = [Holding(f"r{n}", "batch", 30, 1, completions) for n in range(40)]
        epoch = rig.open("w", SHAPE, inventory=brought)
        for one in brought:
            rig.tell(TokenizerAck(epoch, epoch, one.request_id, 2, 30, 10))
            rig.tell(CompletionAck(epoch, epoch, one.request_id, 3, ReleaseCause.COMPLETED, 100 * completions))
        policy = rig.machine.policy
        assert isinstance(policy, Predictive)
        curve = policy._lengths.curve(Kind("m", "batch", prompt_class(10)))
        lengths.append(round(curve.reaching(150), 3))
    assert lengths[0] == lengths[1] < 0.5
