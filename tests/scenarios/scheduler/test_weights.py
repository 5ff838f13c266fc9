"""That weights divide what is occupied, whatever else there is: more workers, more models, others elsewhere."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from itertools import count

import pytest

from services.scheduler.core import messages as m
from services.scheduler.core.sharing.share import Share
from tests.support.effort import long
from tests.support.flood import Flood
from tests.support.timeline import Call, Timeline

MANY = 1_000


def part(held: Mapping[str, int]) -> float:
    """Return what `light` occupied of what it and `heavy` did."""
    return held["light"] / (held["light"] + held["heavy"])


@pytest.mark.grid
@pytest.mark.parametrize("policy", ["virtual-channels", "predictive"])
@pytest.mark.parametrize(("workers", "blocks"), [(2, 60), long(4, 60), long(8, 60), (4, 25), (2, 10), long(4, 10)])
@pytest.mark.parametrize("weight", [1.0, 4.0, 16.0])
@pytest.mark.parametrize("order", [("light", "heavy"), ("heavy", "light")])
def test_weights_divide_several_workers(
    policy: str, workers: int, blocks: int, weight: float, order: tuple[str, str]
) -> None:
    """A channel has as many workers as its weight is worth, not one for each line, nor more as first in the ring."""
    shares = {name: Share(weight if name == "heavy" else 1.0) for name in order}
    flood = Flood(Timeline(shares, [100] * workers, policy=policy))
    choose, waiting = random.Random(1), 2 * workers * 100 // blocks
    for step in range(600):
        flood.advance(*((Call(step, name, blocks, choose.randint(5, 15), "m"), waiting) for name in order))
    assert part(flood.timeline.block_steps) == pytest.approx(1 / (1 + weight), abs=0.03)


@pytest.mark.parametrize("order", [("light", "heavy"), ("heavy", "light")])
def test_weights_divide_more_workers_than_a_line_saves_on(order: tuple[str, str]) -> None:
    """Of heads that have saved those go first whose channel has more to spare."""
    shares = {name: Share(9.0 if name == "heavy" else 1.0) for name in order}
    flood = Flood(Timeline(shares, [100] * 16))
    choose = random.Random(1)
    for step in range(250):
        flood.advance(*((Call(step, name, 60, choose.randint(5, 15), "m"), 64) for name in order))
    assert part(flood.timeline.block_steps) == pytest.approx(0.1, abs=0.03)


@pytest.mark.grid
@pytest.mark.parametrize("policy", ["virtual-channels", "predictive"])
@pytest.mark.parametrize("asked", [2, 8])
@pytest.mark.parametrize("weight", [1.0, 4.0])
def test_who_asks_for_more_models_of_a_worker_has_no_more_of_it(policy: str, asked: int, weight: float) -> None:
    names = [f"m{number}" for number in range(8)]
    shares = {"light": Share(), "heavy": Share(weight)}
    flood = Flood(Timeline(shares, [100], policy=policy, engines=[(" ".join(names), MANY)]))
    choose = random.Random(1)
    for step in range(1_000):
        flood.advance(
            *((Call(step, "light", 60, choose.randint(5, 15), name), 5) for name in names[:asked]),
            (Call(step, "heavy", 60, choose.randint(5, 15), names[0]), 20),
        )
    assert part(flood.timeline.block_steps) == pytest.approx(1 / (1 + weight), abs=0.03)


@pytest.mark.parametrize("models", [("x", "y"), ("x link", "y link")], ids=["apart", "linked"])
@pytest.mark.parametrize("beside", [0, 3, 7])
def test_a_worker_is_not_idle_while_its_channel_saves_up_for_another(beside: int, models: tuple[str, str]) -> None:
    """The oldest head of `both` cannot pay for long, as others alone on that model keep rounds from beginning."""
    crowd = [f"crowd-{number}" for number in range(beside)]
    shares = {"both": Share(), **{name: Share(4.0) for name in crowd}}
    flood = Flood(Timeline(shares, [100, 100], engines=[(model, MANY) for model in models]))
    for step in range(400):
        flood.advance(
            *((Call(step, name, 60, 10, "x"), 4) for name in ("both", *crowd)), (Call(step, "both", 10, 5, "y"), 40)
        )
    assert flood.granted("both", "y") * 10 * 5 >= 0.95 * 400 * 100
    assert flood.granted("both", "x") >= 0.5 * 400 / 10 / (1 + 4 * beside), "what it is lent elsewhere is no debt here"


@pytest.mark.parametrize("before", [60, 1_000])
def test_what_waits_for_a_worker_to_save_on_gains_no_more_the_longer_others_run(before: int) -> None:
    """`first` has a head that has paid for `x`, where a crowd saves, and others save on `y`; `later` comes there."""
    crowd = {f"crowd-{number}": f"of-{number}" for number in range(3)}
    shares = dict.fromkeys(("first", "other", "later", *crowd), Share())
    models = ("x", "y", "z", *crowd.values())
    capacities = [400 if model == "z" else 100 for model in models]
    flood = Flood(Timeline(shares, capacities, engines=[(model, MANY) for model in models]))
    choose = random.Random(1)
    for step in range(before + 100):
        flood.advance(
            *((Call(step, "first", 60, 10, model), 3) for model in ("x", "y")),
            *((Call(step, name, 60, 10, "x"), 3) for name in crowd),
            *((Call(step, name, 10, 10, own), 20) for name, own in crowd.items()),
            (Call(step, "other", 10, choose.randint(3, 7), "z"), 80),
            (Call(step, "later", 60, 10, "y"), 3 if step >= before else 0),
        )
    at = flood.timeline.granted_at
    assert min(at.get(name, step) for name in flood.asked["later", "y"]) - before <= 50


@pytest.mark.grid
@pytest.mark.parametrize("policy", ["virtual-channels", "predictive"])
@pytest.mark.parametrize("weight", [1.0, 4.0, 16.0])
@pytest.mark.parametrize("blocks", [(50, 50), (90, 20)])
def test_what_a_channel_has_of_another_model_changes_nothing_for_this_one(
    policy: str, weight: float, blocks: tuple[int, int]
) -> None:
    """Nobody else asks for `y`: `light` has all of it, and its part of `x` as if it had none."""
    shares = {"light": Share(), "heavy": Share(weight)}
    flood = Flood(Timeline(shares, [100, 100], policy=policy, engines=[("x", MANY), ("y", MANY)]))
    choose = random.Random(1)
    for step in range(2_000):
        flood.advance(
            *(
                (Call(step, name, size, choose.randint(5, 15), "x"), 20)
                for name, size in zip(shares, blocks, strict=True)
            ),
            (Call(step, "light", 10, choose.randint(5, 15), "y"), 20),
        )
    timeline = flood.timeline
    held: Counter[str] = Counter()
    for name in timeline.granted_at:
        call = timeline.calls[name]
        held[call.channel] += call.blocks * call.steps if call.model == "x" else 0
    assert part(held) == pytest.approx(1 / (1 + weight), abs=0.03)


@pytest.mark.grid
@pytest.mark.parametrize("workers", [1, long(4)])
@pytest.mark.parametrize("asked", [1, 8])
@pytest.mark.parametrize("blocks", [(60, 60), (30, 90)])
def test_rounds_that_others_begin_elsewhere_are_none_here(workers: int, asked: int, blocks: tuple[int, int]) -> None:
    names = [f"m{number}" for number in range(asked)]
    shares = {"light": Share(), "heavy": Share(4.0), "elsewhere": Share()}
    engines = [(" ".join(names), MANY)] * workers
    flood = Flood(Timeline(shares, [*[100] * workers, 400], engines=[*engines, ("z", MANY)]))
    choose = random.Random(1)
    for step in range(1_000):
        flood.advance(
            *((Call(step, "light", blocks[0], choose.randint(5, 15), name), 5 * workers) for name in names),
            (Call(step, "heavy", blocks[1], choose.randint(5, 15), names[0]), 20 * workers),
            (Call(step, "elsewhere", 10, choose.randint(3, 7), "z"), 80),
        )
    assert part(flood.timeline.block_steps) == pytest.approx(0.2, abs=0.03)


@pytest.mark.grid
@pytest.mark.parametrize("policy", ["virtual-channels", "predictive"])
@pytest.mark.parametrize(
    ("workers", "blocks", "weight"),
    [(1, 60, 1.0), long(4, 60, 1.0), (1, 10, 4.0), (1, 60, 0.25)],
)
def test_who_takes_any_model_has_its_part_of_each(policy: str, workers: int, blocks: int, weight: float) -> None:
    """Not only of the one where the first of them saves."""
    models = ("x", "y")
    shares = {"any": Share(weight), **dict.fromkeys(models, Share())}
    engines = [(model, MANY) for model in models for _ in range(workers)]
    flood = Flood(Timeline(shares, [100] * len(engines), policy=policy, engines=engines))
    choose = random.Random(1)
    held: dict[str, Counter[str]] = {model: Counter() for model in models}
    for step in range(1_500):
        flood.advance(
            (Call(step, "any", blocks, choose.randint(5, 15)), 30),
            *((Call(step, model, 10, choose.randint(5, 15), model), 30) for model in models),
        )
        for worker in flood.timeline.workers:
            held[worker.models[0]].update(worker.ledger.held_by_channel())
    for model in models:
        of_any = held[model]["any"] / held[model].total()
        assert of_any == pytest.approx(weight / (1 + weight), abs=0.03)


@pytest.mark.parametrize("weight", [1.0, 16.0])
def test_what_one_pool_cannot_hold_keeps_nobody_from_it(weight: float) -> None:
    """The first of `any` runs on the larger worker alone; those behind it start on the other, which is idle."""
    shares = {"any": Share(), "x": Share(weight)}
    flood = Flood(Timeline(shares, [100, 50], engines=[("x", MANY), ("y", MANY)]))
    choose = random.Random(1)
    for step in range(200):
        flood.advance((Call(step, "x", 45, choose.randint(50, 100), "x"), 6))
    timeline = flood.timeline
    timeline.advance([Call(200, "any", 80, 100), *[Call(200, "any", 20, 100)] * 5])
    small = [name for name, call in timeline.calls.items() if (call.channel, call.blocks) == ("any", 20)]
    assert [timeline.granted_at.get(name) for name in small[:2]] == [timeline.step] * 2


@pytest.mark.grid
@pytest.mark.parametrize("every", [0, 10, 15, 100])
@pytest.mark.parametrize("weight", [1.0, 16.0])
def test_a_stream_that_breaks_takes_nobodys_turn(every: int, weight: float) -> None:
    """`light` saves up for longer than the stream of the only worker lasts."""
    flood = Flood(Timeline({"light": Share(), "heavy": Share(weight)}, [100]))
    choose = random.Random(1)
    for step in range(3_000):
        if every and step % every == every - 1:
            flood.timeline.reopen("w0")
        flood.advance(
            (Call(step, "light", 100, choose.randint(5, 15), "m"), 3),
            (Call(step, "heavy", 10, choose.randint(5, 15), "m"), 20),
        )
    fair = 1 / (1 + weight)
    assert part(flood.timeline.block_steps) == pytest.approx(fair, abs=0.1 if weight == 1.0 else 0.03)


@pytest.mark.parametrize("policy", ["virtual-channels", "predictive"])
def test_a_stream_that_breaks_gives_nothing_away(policy: str) -> None:
    """What `light` has running when it breaks runs on: it is paid for as if nothing had happened."""
    flood = Flood(Timeline({"light": Share(), "heavy": Share()}, [100], policy=policy))
    choose = random.Random(1)
    for step in range(3_000):
        if step % 20 == 19:
            flood.timeline.reopen("w0")
        if step == 500:
            flood.timeline.block_steps.clear()
        flood.advance((Call(step, "light", 5, choose.randint(80, 120), "m"), 20), (Call(step, "heavy", 5, 5, "m"), 20))
    assert part(flood.timeline.block_steps) == pytest.approx(0.5, abs=0.05)


def test_who_takes_any_model_goes_where_there_is_room() -> None:
    """Its head saves on one worker, and starts on another of another model as soon as that has room."""
    flood = Flood(
        Timeline({"any": Share(), "x": Share(), "y": Share()}, [100, 100], engines=[("x", MANY), ("y", MANY)])
    )
    flood.advance((Call(0, "x", 90, 1_000, "x"), 1), (Call(0, "y", 90, 50, "y"), 1))
    flood.advance((Call(1, "any", 60, 10, ""), 2))
    for _ in range(70):
        flood.advance()
    machine = flood.timeline.rig.machine
    assert flood.granted("any", "") == 2
    assert not list(machine._arbiter._savings)
    assert not machine._arbiter._deposits._by_request


@pytest.mark.grid
@pytest.mark.parametrize("policy", ["virtual-channels", "predictive"])
@pytest.mark.parametrize(("size", "beside"), [(20, 3), (60, 3), (60, 6)])
@pytest.mark.parametrize("models", [("x", "y"), ("x link", "y link")], ids=["apart", "linked"])
def test_what_waits_for_one_model_divides_no_other_by_size(
    policy: str, size: int, beside: int, models: tuple[str, str]
) -> None:
    """A head of the crowd always waits for `x`. On `y` the large requests of `large` fit less often than small ones."""
    crowd = [f"crowd-{number}" for number in range(beside)]
    shares = dict.fromkeys(("large", "small", *crowd), Share())
    flood = Flood(Timeline(shares, [100, 100], policy=policy, engines=[(model, MANY) for model in models]))
    choose = random.Random(1)
    for step in range(1_000):
        flood.advance(
            *((Call(step, name, 60, 10, "x"), 3) for name in crowd),
            (Call(step, "large", size, choose.randint(5, 15), "y"), 5),
            (Call(step, "small", 10, choose.randint(5, 15), "y"), 20),
        )
    held = flood.timeline.block_steps
    assert held["large"] / (held["large"] + held["small"]) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("hold", [10, 400])
def test_how_long_others_hold_elsewhere_says_nothing_about_a_turn_here(hold: int) -> None:
    """What `first` may have in hand when `later` comes is bounded by how long requests hold blocks in their pool."""
    shares = dict.fromkeys(("first", "later", "other", "elsewhere"), Share())
    flood = Flood(Timeline(shares, [100] * 3, engines=[("m k", 4), ("n k", MANY), ("z", MANY)]))
    before = 1_000
    for step in range(before + 100):
        flood.advance(
            (Call(step, "first", 2, 10, "m"), 20),
            (Call(step, "other", 10, 10, "n"), 20),
            (Call(step, "elsewhere", 10, hold, "z"), 20),
            (Call(step, "later", 2, 10, "m"), 20 if step >= before else 0),
        )
    at = flood.timeline.granted_at
    assert min(at.get(name, step) for name in flood.asked["later", "m"]) - before <= 20


def test_long_requests_of_one_model_keep_a_channel_from_no_turn_at_another() -> None:
    flood = Flood(Timeline(dict.fromkeys(("both", "other"), Share()), [100, 100], engines=[("x", MANY), ("y", MANY)]))
    choose, before = random.Random(1), 2_100
    for step in range(before + 400):
        flood.advance(
            (Call(step, "both", 50, 1_000, "x"), 4),
            (Call(step, "both", 10, choose.randint(5, 15), "y"), 20 if step >= before else 0),
            (Call(step, "other", 10, choose.randint(5, 15), "y"), 20),
        )
    at = flood.timeline.granted_at
    assert min(at.get(name, step) for name in flood.asked["both", "y"]) - before <= 20
    granted = [flood.granted(name, "y", before) for name in ("both", "other")]
    assert granted[0] / sum(granted) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("weight", [1.0, 4.0])
def test_who_names_no_model_leaves_no_worker_idle_where_a_larger_one_is_drained(weight: float) -> None:
    """One in nine of `any` fits only the drained worker of `x`, or that of `y` which others flood."""
    shares = {"any": Share(), "flood": Share(weight)}
    timeline = Timeline(shares, [100, 50, 100], engines=[("x", MANY), ("x", MANY), ("y", MANY)])
    for step in range(100):
        timeline.advance([Call(step, "flood", 60, 10, "y")] * (6 - timeline.waiting["flood"]))
    timeline.rig.tell(m.DrainRequested("w0", False))
    number = count()
    for step in range(400):
        sizes = [60 if next(number) % 9 == 0 else 40 for _ in range(20 - timeline.waiting["any"])]
        timeline.advance(
            [
                *([Call(step, "flood", 60, 10, "y")] * (6 - timeline.waiting["flood"])),
                *(Call(step, "any", size, 10) for size in sizes),
            ]
        )
        (small,) = (worker for worker in timeline.workers if worker.worker_id == "w1")
        assert len(small.ledger)


@pytest.mark.grid
@pytest.mark.parametrize("policy", ["virtual-channels", "predictive"])
@pytest.mark.parametrize(("weight", "workers"), [(4.0, 1), (16.0, 1), (16.0, 4)])
@pytest.mark.parametrize("left", [10, 40])
def test_who_takes_what_is_left_changes_nothing_between_those_that_wait(
    policy: str, weight: float, workers: int, left: int
) -> None:
    """`small` has its turns all the time, in blocks that are too few for a request of the others."""
    shares = {"light": Share(), "heavy": Share(weight), "small": Share()}
    flood = Flood(Timeline(shares, [100] * workers, policy=policy))
    for step in range(1_500):
        flood.advance(
            *((Call(step, name, 60, 10), 3 * workers) for name in ("light", "heavy")),
            (Call(step, "small", left, 10), 8 * workers),
        )
    assert part(flood.timeline.block_steps) == pytest.approx(1 / (1 + weight), abs=0.02)


@pytest.mark.parametrize("policy", ["virtual-channels", "predictive"])
@pytest.mark.parametrize("order", [("large", "light", "heavy"), ("heavy", "large", "light")])
def test_those_that_take_what_is_left_share_it_by_what_they_occupy(policy: str, order: tuple[str, ...]) -> None:
    """Beside `large`, which can never have what its weight is worth: of two alike one holds three times as long."""
    shares = {name: Share(16.0 if name == "large" else 1.0) for name in order}
    flood = Flood(Timeline(shares, [100], policy=policy))
    choose = random.Random(1)
    for step in range(2_000):
        flood.advance(
            (Call(step, "large", 60, 10), 6),
            (Call(step, "light", 40, choose.randint(20, 40)), 6),
            (Call(step, "heavy", 40, choose.randint(5, 15)), 6),
        )
    assert part(flood.timeline.block_steps) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(("before", "after"), [(16.0, 1.0), (64.0, 1.0), (16.0, 4.0)])
@pytest.mark.parametrize("workers", [1, 3])
def test_what_a_larger_weight_has_earned_is_worth_no_more_turns_by_a_smaller_one(
    before: float, after: float, workers: int
) -> None:
    """Who waits has turns in hand, of a larger weight larger ones. From the change on the new weights divide."""
    shares = {"light": Share(), "heavy": Share(before), "small": Share()}
    flood = Flood(Timeline(shares, [100] * workers))
    timeline, changed = flood.timeline, 800
    for step in range(changed + 600):
        if step == changed:
            timeline.rig.tell(m.Reconfigure({**shares, "heavy": Share(after)}))
            timeline.block_steps.clear()
        flood.advance(
            (Call(step, "light", 60, 10), 3 * workers),
            (Call(step, "heavy", 60, 10), 3 * workers),
            (Call(step, "small", 40, 10), 8 * workers),
        )
    part = timeline.block_steps["heavy"] / timeline.block_steps["light"]
    assert part == pytest.approx(after, rel=0.1)


@pytest.mark.grid
@pytest.mark.parametrize("every", [10, 30])
@pytest.mark.parametrize("changes", ["idle", "small-0"])
def test_reloads_take_nothing_away_from_what_is_saved_up_for_a_large_request(every: int, changes: str) -> None:
    shares = {"big": Share(), **{f"small-{number}": Share() for number in range(9)}, "idle": Share()}
    flood = Flood(Timeline(shares, [100]))
    choose = random.Random(1)
    for step in range(2_000):
        if step and step % every == 0:
            weight = 1.0 + (step // every) % 2
            flood.timeline.rig.tell(m.Reconfigure({**shares, changes: Share(weight)}))
        small = [(Call(step, name, 20, choose.randint(5, 15)), 3) for name in shares if name.startswith("small")]
        flood.advance((Call(step, "big", 90, 30), 2), *small)
    assert flood.granted("big", "") >= 5


@pytest.mark.grid
@pytest.mark.parametrize("policy", ["virtual-channels", "predictive"])
@pytest.mark.parametrize(("weight", "idle"), [(1.0, 1e-3), (1e3, 1e-3), (1.0, 1e3), (1e-3, 1e3)])
def test_a_weight_far_from_theirs_of_one_that_asks_for_nothing_ends_nobodys_turns(
    policy: str, weight: float, idle: float
) -> None:
    shares = {"one": Share(weight), "other": Share(weight), "idle": Share(idle)}
    timeline = Timeline(shares, [100], policy=policy)
    flood = Flood(timeline)
    choose = random.Random(1)
    for step in range(500):
        flood.advance(*((Call(step, name, 10, choose.randint(5, 15)), 25) for name in ("one", "other")))
    for name in ("one", "other"):
        assert timeline.block_steps[name] > 0.45 * timeline.block_steps.total()
        assert flood.longest_wait(name, "") < 120  # behind 24 others, half a one starting in a step


def test_weights_a_million_apart_divide_by_weight() -> None:
    """What the light one gets is a request now and then, and no more."""
    timeline = Timeline({"heavy": Share(1e3), "light": Share(1e-3)}, [100])
    flood = Flood(timeline)
    choose = random.Random(1)
    for step in range(1_000):
        flood.advance(*((Call(step, name, 10, choose.randint(5, 15)), 25) for name in ("heavy", "light")))
    assert timeline.block_steps["light"] < 0.01 * timeline.block_steps.total()


def test_light_weights_are_held_beside_a_heavy_one_that_asks_for_nothing() -> None:
    timeline = Timeline({"one": Share(1e-3), "other": Share(1.5e-3), "idle": Share(1e3)}, [100])
    flood = Flood(timeline)
    choose = random.Random(1)
    for step in range(1_000):
        flood.advance(*((Call(step, name, 10, choose.randint(5, 15)), 25) for name in ("one", "other")))
    assert abs(timeline.block_steps["other"] / timeline.block_steps["one"] - 1.5) < 0.1
