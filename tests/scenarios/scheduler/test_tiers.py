"""What lower tiers leave is used, whatever waits in a higher one; what waits there starts when they leave it room."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from services.scheduler.core import messages as m
from services.scheduler.core.sharing.places import Places
from services.scheduler.core.sharing.savings import Saving
from services.scheduler.core.sharing.share import Share
from tests.support.scheduling import Rig, shape

STEP_MS = 20
LEAST_STEPS = 10
"""Requests run for ten to fourteen steps."""

POLICIES = ["virtual-channels", "predictive"]
ENGINE = shape(100)


class Load:
    """A fleet under a load that is topped up at every step; requests end by the steps that their names say."""

    def __init__(
        self,
        shares: Mapping[str, Share],
        policy: str,
        models: str = "m",
        engine: m.EngineShape = ENGINE,
        alias: str = "",
    ) -> None:
        """Open a worker of 100 blocks for each model; all answer to the alias as well, if there is one."""
        self.rig = Rig(shares, policy)
        aliases = (alias,) if alias else ()
        for model in models:
            self.rig.open(f"w-{model}", engine, model=model, aliases=aliases, guaranteed_first=True)
        self.step = 0
        self.lasts: dict[str, int] = {}
        """Steps for which requests of a channel run, where those are others than of most."""
        self._ends: dict[str, tuple[m.Grant, int]] = {}
        self._seen = 0

    def keep_waiting(self, channel: str, count: int, blocks: int, model: str = "m") -> None:
        """Have so many wait."""
        self.rig.announce(channel, *[blocks] * max(count - self.rig.machine.backlog.waiting[channel], 0), model=model)

    def keep_running(self, channel: str, count: int, blocks: int) -> None:
        """Have so many run or about to."""
        running = sum(grant.channel == channel for grant, _ in self._ends.values())
        missing = count - running - self.rig.machine.backlog.waiting[channel]
        self.rig.announce(channel, *[blocks] * max(missing, 0), model="m")

    def run(self, steps: int, top_up: Callable[[], None], until: str = "") -> int:
        """Run so many steps, or until a request has been granted; return how many it were."""
        for number in range(steps):
            top_up()
            self.rig.wait(STEP_MS)
            for grant in self.rig.grants[self._seen :]:
                least = self.lasts.get(grant.channel, LEAST_STEPS)
                lasts = least + int(grant.request_id.split("-")[-1]) % 5 * least // LEAST_STEPS
                self._ends[grant.request_id] = grant, self.step + lasts
            self._seen = len(self.rig.grants)
            if until in self.rig.granted:
                return number
            for name in [name for name, (_, end) in self._ends.items() if end <= self.step]:
                self.rig.finish(self._ends.pop(name)[0])
            self.step += 1
        self.rig.check()
        return steps


@pytest.mark.grid
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ceiling", [1.0, 0.7])
def test_a_head_that_lower_tiers_leave_no_room_keeps_nobody_from_what_they_do_leave(
    policy: str, ceiling: float
) -> None:
    load = Load({"front": Share(1, 0, ceiling), "batch": Share(tier=1), "other": Share(tier=1)}, policy)

    def top_up() -> None:
        if ceiling < 1:
            load.keep_waiting("front", 10, 5)
        else:
            load.keep_running("front", 14, 5)
        load.keep_waiting("batch", 10, 3)
        load.keep_waiting("other", 10, 3)

    load.run(200, top_up)
    (large,) = load.rig.announce("batch", 50, model="m")
    load.run(200, top_up)
    began = len(load.rig.grants)
    load.run(600, top_up)
    grants = [grant.channel for grant in load.rig.grants[began:]]
    assert large not in load.rig.granted
    assert 0.8 < grants.count("batch") / grants.count("other") < 1.25
    assert grants.count("batch") > 200, "30 blocks for some 12 steps of each make up for 500"
    assert load.run(100, lambda: load.keep_waiting("other", 10, 3), large) < 100, "once they leave it room it starts"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_head_that_saves_ends_that_when_lower_tiers_take_its_room(policy: str) -> None:
    load = Load({"front": Share(1, 0, 0.7), "batch": Share(tier=1), "other": Share(tier=1)}, policy)
    flooded = False

    def top_up() -> None:
        load.keep_waiting("other", 10, 3)
        if flooded:
            load.keep_waiting("front", 10, 5)

    load.run(100, top_up)
    (large,) = load.rig.announce("batch", 50, model="m")
    while (saving := saving_of(load)) is None or saving.entry.request_id != large:
        load.run(1, top_up)
    flooded = True
    load.run(200, top_up)
    began = len(load.rig.grants)
    load.run(200, top_up)
    assert large not in load.rig.granted
    assert sum(grant.channel == "other" for grant in load.rig.grants[began:]) > 60


def saving_of(load: Load) -> Saving | None:
    """Return the head that saves on the worker for m."""
    return load.rig.machine._arbiter._savings.on(load.rig.worker("w-m"))


@pytest.mark.parametrize("half", [6, 15, 40])
def test_a_head_starts_though_lower_tiers_leave_it_room_now_and_then_only(half: int) -> None:
    load = Load({"front": Share(), "batch": Share(tier=1), "other": Share(tier=1)}, "virtual-channels")

    def top_up() -> None:
        load.keep_running("front", 14 if (load.step // half) % 2 else 8, 5)
        load.keep_waiting("other", 10, 3)
        load.keep_waiting("batch", 10, 3)

    load.run(300, top_up)
    (large,) = load.rig.announce("batch", 50, model="m")
    assert load.run(400, top_up, large) < 8 * half + 100


@pytest.mark.grid
@pytest.mark.parametrize("short", ["lower tier", "other pool"])
@pytest.mark.parametrize("policy", POLICIES)
def test_short_requests_that_a_head_does_not_wait_for_have_it_give_way_no_sooner(policy: str, short: str) -> None:
    """Lower tiers leave it room for a third of the time; what runs beside it, and has to end, runs for long."""
    shares = {"front": Share(), "elsewhere": Share(), "batch": Share(tier=1)}
    load = Load(shares, policy, "mn")
    load.lasts = {"front": 2 if short == "lower tier" else 60, "elsewhere": 1, "batch": 600}

    def top_up() -> None:
        if load.step % 300 < 200:
            load.keep_running("front", 15, 5)
        load.keep_waiting("batch", 10, 5)
        if short == "other pool":
            load.keep_waiting("elsewhere", 4, 5, "n")

    load.run(900 - 100, top_up)
    (large,) = load.rig.announce("batch", 60, model="m", priority=-1)
    assert load.run(2_000, top_up, large) < 1_000, "what ran there when it came has ended"


@pytest.mark.parametrize("lower", ["none", "another model", "a ceiling"])
def test_lower_tiers_that_do_not_keep_a_head_out_let_nobody_pass_it_for_ever(lower: str) -> None:
    shares = {"chat": Share(1, 0.3, tier=1), "front": Share(1, 0, 0.2 if lower == "a ceiling" else 1)}
    shares |= {f"batch-{number}": Share(tier=1) for number in range(5)}
    load = Load(shares, "predictive", "mn")

    def top_up() -> None:
        if lower != "none":
            load.keep_waiting("front", 30, 5, "n" if lower == "another model" else "m")
        for number in range(5):
            load.keep_waiting(f"batch-{number}", 10, 5)
        load.keep_waiting("chat", 10, 4)

    load.run(200, top_up)
    (large,) = load.rig.announce("chat", 45, model="m")
    assert load.run(400, top_up, large) < 200


@pytest.mark.parametrize("kept_out", [False, True])
def test_a_head_for_another_model_does_not_wait_for_one_that_cannot_pay_yet(kept_out: bool) -> None:
    shares = {"chat": Share(1, 0.3, tier=1), "front": Share()}
    shares |= {f"batch-{number}": Share(tier=1) for number in range(5)}
    load = Load(shares, "predictive", "mn")

    def top_up() -> None:
        if kept_out:
            load.keep_waiting("front", 30, 5)
        for number in range(5):
            load.keep_waiting(f"batch-{number}", 20, 5, "mn"[(load.step + number) % 2])

    load.run(200, top_up)
    load.rig.announce("chat", 60, model="m")
    for _ in range(6):
        asked = load.rig.announce("chat", 4, 4, model="n")
        assert set(asked) <= set(load.rig.granted)
        load.run(20, top_up)


@pytest.mark.parametrize("guaranteed", [0.0, 0.3])
def test_what_will_outgrow_its_guarantee_has_room_beside_lower_tiers_or_waits_aside(guaranteed: float) -> None:
    load = Load({"front": Share(), "batch": Share(1, guaranteed, tier=1), "other": Share(tier=1)}, "predictive")
    teach_long_outputs(load.rig, "batch")

    def top_up() -> None:
        load.keep_running("front", 16, 5)
        load.keep_waiting("other", 10, 3)

    load.run(100, top_up)
    (long,) = load.rig.announce("batch", 4, max_tokens=80, model="m")
    load.run(100, top_up)
    began = len(load.rig.grants)
    load.run(200, top_up)
    assert long not in load.rig.granted
    assert sum(grant.channel == "other" for grant in load.rig.grants[began:]) > 60


def teach_long_outputs(rig: Rig, channel: str) -> None:
    """Have a dozen of the channel's requests write 45 tokens each."""
    for _ in range(12):
        (name,) = rig.announce(channel, 4, max_tokens=80, model="m")
        grant = rig.grants[-1]
        assert grant.request_id == name
        write(rig, grant, 45)


def write(rig: Rig, grant: m.Grant, tokens: int) -> None:
    """Have a request with a prompt of four tokens write so many, and end."""
    name, epoch = grant.request_id, grant.epoch
    rig.tell(m.Gone(name, m.GoneReason.CLAIMED))
    for written in range(1, tokens + 1):
        rig.wait(1)
        rig.tell(m.TokenizerAck(epoch, epoch, name, written, 5 + written, 4, written, 200))
    rig.tell(m.CompletionAck(epoch, epoch, name, tokens + 1, m.ReleaseCause.COMPLETED, tokens + 1))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_head_saves_on_the_worker_where_lower_tiers_leave_it_room(policy: str) -> None:
    shares = {"front": Share(1, 0, 0.6), "batch": Share(tier=1), "other": Share(tier=1)}
    load = Load(shares, policy, "xy", alias="m")

    def top_up() -> None:
        load.keep_waiting("front", 10, 5, "x")
        load.keep_waiting("other", 10, 3, "y")

    load.run(100, top_up)
    (large,) = load.rig.announce("batch", 50, model="m")
    assert load.run(100, top_up, large) < 100


@pytest.mark.parametrize("policy", POLICIES)
def test_a_guarantee_of_fewer_completions_does_not_make_a_head_wait_longer(policy: str) -> None:
    waits = []
    for guaranteed in (0.0, 0.3):
        shares = {"front": Share(), "batch": Share(1, guaranteed, tier=1), "other": Share(tier=1)}
        load = Load(shares, policy, engine=shape(100, 24))

        def top_up(load: Load = load) -> None:
            load.keep_running("front", 18, 2)
            load.keep_waiting("other", 10, 2)

        load.run(100, top_up)
        (several,) = load.rig.announce("batch", 2, n=8, model="m")
        waits.append(load.run(400, top_up, several))
    assert waits[1] <= waits[0] + 20, "8 of 24 sequences are more than 0.3 guarantees"


def test_who_is_aside_is_looked_at_again_when_less_is_expected_of_it() -> None:
    shares = {"front": Share(1, 0, 0.8), "batch": Share(tier=1), "other": Share(tier=1)}
    load = Load(shares, "predictive", engine=shape(200))

    def top_up() -> None:
        load.keep_waiting("front", 20, 5)
        load.keep_waiting("other", 20, 3)

    load.run(60, top_up)
    early = load.rig.announce("batch", 4, 4, max_tokens=190, model="m")
    load.run(100, top_up)
    assert not set(early) & set(load.rig.granted), "nothing is known of lengths: they may be long"
    for _ in range(40):
        (short,) = load.rig.announce("batch", 4, max_tokens=6, model="m")
        load.run(20, top_up, short)
        write(load.rig, load.rig.grants[-1], 5)
    load.run(100, top_up)
    assert set(early) <= set(load.rig.granted)


@pytest.mark.skipif("PENSTOCK_COMPILED" in os.environ, reason="nothing patches a compiled method")
@pytest.mark.parametrize("policy", POLICIES)
def test_what_ends_in_a_lower_tier_that_fills_the_workers_costs_no_look_at_who_is_aside(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    kept_out = Places.kept_out

    def counted(*arguments: Any) -> dict[Any, int]:
        nonlocal looks
        looks += 1
        return kept_out(*arguments)

    monkeypatch.setattr(Places, "kept_out", counted)
    load = Load({"front": Share(), "batch": Share(tier=1)}, policy)
    load.run(20, lambda: load.keep_waiting("front", 20, 5))
    load.rig.announce("batch", *[3] * 300, model="m")
    before, looks = len(load.rig.grants), 0
    load.run(100, lambda: load.keep_waiting("front", 20, 5))
    assert len(load.rig.grants) - before > 100
    assert looks < 3 * (len(load.rig.grants) - before)


def wait_beside_what_saves_for_long(rig: Rig, waits: str, last: str) -> None:
    """Have the head of `waits` wait beside a request of `front` that runs for minutes and one that saves.

    It had room until `last` ended; requests of `waits` run for a second.
    """
    rig.open("w", shape(1_000), model="m")
    for channel, blocks, milliseconds in [("front", 600, 600_000), *[(waits, 100, 1_000)] * 60]:
        rig.announce(channel, blocks, model="m")
        rig.wait(milliseconds)
        rig.finish(rig.grants[-1])
    rig.announce(last, 600, model="m")
    runs = rig.grants[-1]
    rig.tell(m.Gone(runs.request_id, m.GoneReason.CLAIMED))
    rig.announce(waits, 450, model="m")
    rig.announce("front", 600, 700, model="m")
    rig.release(runs)


@pytest.mark.parametrize(("seconds", "goes"), [(1, False), (2, True)])
def test_a_head_gives_way_two_usual_hold_times_after_it_had_room_though_nothing_else_happens(
    seconds: int, goes: bool
) -> None:
    """Its tier's run for a second, but the last; one of `front` for long, beside which another saves it has no room."""
    rig = Rig({"front": Share(), "batch": Share(tier=1)})
    wait_beside_what_saves_for_long(rig, "batch", "batch")
    (behind,) = rig.announce("batch", 100, model="m")
    assert behind not in rig.granted
    rig.wait(seconds * 1_000)
    rig.tell(m.Tick())
    assert (behind in rig.granted) is goes


def test_a_head_gives_way_though_what_took_its_room_asked_nobody() -> None:
    """Beside what saves for long, `mid` gives way by time, whereupon what it kept is taken beside the head of `low`."""
    rig = Rig({"front": Share(), "mid": Share(tier=1), "low": Share(tier=2)})
    wait_beside_what_saves_for_long(rig, "mid", "low")
    rig.announce("mid", 100, 250, model="m")
    rig.announce("low", 200, 350, model="m")
    (behind,) = rig.announce("low", 50, model="m")
    assert behind not in rig.granted
    for _ in range(30):
        rig.wait(200)
        rig.tell(m.Tick())
    assert behind in rig.granted


@pytest.mark.skipif("PENSTOCK_COMPILED" in os.environ, reason="nothing patches a compiled method")
@pytest.mark.parametrize("tier", [0, 1])
def test_heads_that_save_cost_no_look_at_lower_tiers_where_there_are_none(
    tier: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    has_room = Places.has_room_beside_lower

    def counted(*arguments: Any) -> bool:
        nonlocal looks
        looks += 1
        return has_room(*arguments)

    monkeypatch.setattr(Places, "has_room_beside_lower", counted)
    rig = Rig({"front": Share(), **{f"c{number}": Share(tier=tier) for number in range(4)}})
    for number in range(4):
        rig.open(f"w{number}", shape(100))
    rig.announce("c0", *[40] * 8)
    for number in range(4):
        rig.announce(f"c{number}", *[95] * 4)
    for _ in range(10):
        rig.wait(200)
        rig.tell(m.Tick())
    saving = [rig.machine._arbiter._savings.on(rig.worker(f"w{number}")) for number in range(4)]
    assert None not in saving
    looks = 0
    rig.finish(rig.grants[0])
    assert (looks > 0) is (tier > 0)
