"""Where engines run what is guaranteed first, it waits for nobody's completion: from the start, and whatever runs."""

from __future__ import annotations

import random

import pytest

from benchmarks.admission.isolation import BATCH, INTERACTIVE, LOADS, Run
from benchmarks.admission.stage import Stage
from services.scheduler.core import messages as m
from services.scheduler.core.sharing.share import Share
from tests.support.scheduling import SECOND_NS, Rig, announced, shape

STEP_MS = 20.0
"""Of the simulated engine while its cache is full: the time between two of its steps is less."""

SHARES = {"safe": Share(1.0, 0.3), "batch": Share()}


@pytest.mark.long
@pytest.mark.parametrize("load", LOADS)
def test_beside_any_flood_it_waits_for_some_steps_also_while_nothing_is_known(load: str) -> None:
    alone = Run("predictive", LOADS[load], 40, 0, (INTERACTIVE,)).waits().waits_ms
    beside = Run("predictive", LOADS[load], 100, 0, (INTERACTIVE, BATCH)).waits()
    for when in ("cold ", ""):
        assert beside.waits_ms[f"{when}grant p99"] <= 1.2 * alone["grant p99"] + STEP_MS
        assert beside.waits_ms[f"{when}ttft p99"] <= 1.2 * alone["ttft p99"] + 8 * STEP_MS
    assert beside.usage > 0.85


def full(policy: str = "predictive", guaranteed_first: bool = True) -> Rig:
    """Return a scheduler whose one worker has no block left."""
    rig = Rig(SHARES, policy)
    held = [m.Holding(f"long-{number}", "batch", 25, 1) for number in range(4)]
    rig.open("w", shape(100), held, guaranteed_first=guaranteed_first)
    return rig


def test_a_guarantee_is_granted_where_nothing_is_free_and_no_more() -> None:
    rig = full()
    safe = rig.announce("safe", 8, 8, 8, 8)
    rig.announce("batch", 1)
    assert rig.granted == safe[:3]
    assert all(grant.guaranteed for grant in rig.grants)
    assert rig.worker("w").ledger.overcommitted_blocks == 24
    rig.check()
    rig.finish(rig.grants[0])
    assert rig.granted == safe, "its own end makes room within its guarantee"


def test_what_is_in_its_place_waits_until_what_it_took_has_come_home() -> None:
    rig = full()
    rig.announce("safe", 8, 8)
    (batch,) = rig.announce("batch", 20)
    rig.tell(m.CompletionAck(1, 1, "long-0", 2, m.ReleaseCause.COMPLETED))
    assert batch not in rig.granted, "9 are free, and 6 may be booked ahead for some that are not in their place"
    for number in (1, 2, 3):
        rig.tell(m.CompletionAck(1, 1, f"long-{number}", 2, m.ReleaseCause.COMPLETED))
    assert rig.granted[2:] == [batch]
    assert not rig.grants[-1].guaranteed


@pytest.mark.parametrize(("policy", "guaranteed_first"), [("predictive", False), ("virtual-channels", True)])
def test_nothing_is_booked_beyond_what_is_free_where_engines_do_not_make_room(
    policy: str, guaranteed_first: bool
) -> None:
    rig = full(policy, guaranteed_first)
    rig.announce("safe", 8)
    assert not rig.grants


def test_a_place_that_is_free_anywhere_is_taken_before_one_that_is_not() -> None:
    rig = Rig(SHARES, "predictive")
    for name, held in (("full-1", 25), ("roomy", 18), ("full-2", 25)):
        holds = [m.Holding(f"{name}-{number}", "batch", held, 1) for number in range(4)]
        rig.open(name, shape(100), holds, guaranteed_first=True)
    rig.announce("safe", *([5] * 8))
    names = [grant.worker_id for grant in rig.grants]
    assert names[:5] == ["roomy"] * 5
    assert sorted(names[5:]) == ["full-1", "full-2", "roomy"], "of its guarantee there are 30, and 6 ahead of 28"


@pytest.mark.long
def test_who_goes_first_leaves_room_for_the_largest_request_it_passes() -> None:
    """Two channels, guaranteed half of the worker each and always busy, and one with prompts of two fifths of it."""
    stage = Stage("predictive", {"a": Share(1.0, 0.5), "b": Share(1.0, 0.5), "large": Share()}, 1_024)
    draw = random.Random(1)
    for half_seconds in range(1, 160):
        for name, most in (("a", 60), ("b", 60), ("large", 10)):
            for _ in range(most - stage.penstock.waiting(name)):
                if name == "large":
                    stage.ask(name, draw.randint(6_800, 7_000), draw.randint(300, 400), 400)
                else:
                    stage.ask(name, draw.randint(100, 200), draw.randint(100, 160), 160)
        stage.run_until(half_seconds / 2)
    granted_ns = stage.penstock.granted_ns
    waits_s = [
        ((life.first_ns if life.first_ns >= 0 else stage.clock.now_ns) - granted_ns[number]) / SECOND_NS
        for number, life in enumerate(stage.meter.lives)
        if stage.items[number].channel == "large" and number in granted_ns
    ]
    assert len(waits_s) > 10
    assert max(waits_s) < 5, "the longest request takes as long"


def test_a_head_that_waits_keeps_nobody_behind_it_from_going_first() -> None:
    """It is larger than the guarantee, and saves on one of the workers."""
    rig = Rig(SHARES, "predictive")
    for name in ("one", "two", "three"):
        holds = [m.Holding(f"{name}-{number}", "batch", 25, 1) for number in range(4)]
        rig.open(name, shape(100), holds, guaranteed_first=True)
    rig.announce("safe", 40)
    behind = rig.announce("safe", 8, 8, 8)
    assert rig.granted == behind
    assert {grant.worker_id for grant in rig.grants} == {"one", "two", "three"}


def test_a_channel_with_a_ceiling_does_not_go_first_past_its_own_older_request_for_ever() -> None:
    """It would stay too near to its ceiling for that one, for ever."""
    rig = Rig({"safe": Share(1.0, 0.3, 0.5), "batch": Share()}, "predictive")
    rig.open("w", shape(100), [m.Holding(f"long-{n}", "batch", 20, 1) for n in range(4)], guaranteed_first=True)
    rig.announce("safe", 8, 8)
    (large,) = rig.announce("safe", 40)
    for step in range(60):
        rig.announce("safe", *([8] * (4 - rig.machine.backlog.waiting["safe"])))
        if step < 4:
            rig.tell(m.CompletionAck(1, 1, f"long-{step}", 9, m.ReleaseCause.COMPLETED))
        rig.wait(100)
        running = [grant for grant in rig.grants if grant.request_id in rig.worker("w").ledger]
        if large in rig.granted:
            return
        if running:
            rig.finish(running[0])
    raise AssertionError("it never starts")


@pytest.mark.parametrize(
    ("shares", "sequences", "blocks", "completions", "guaranteed_first"),
    [
        ({"a": Share(4.0, 0.4), "b": Share(1.0, 0.4)}, 100, 50, 1, True),
        ({"a": Share(1.0, 0.4), "b": Share(1.0, 0.4)}, 100, 50, 1, False),
        ({"a": Share(4.0, 0.3)}, 100, 1, 80, True),
    ],
    ids=["blocks", "guarantees of credits", "sequences"],
)
def test_a_saving_head_is_not_kept_out_by_all_guarantees_together(
    shares: dict[str, Share], sequences: int, blocks: int, completions: int, guaranteed_first: bool
) -> None:
    """Beside its own channel's alone it would fit, and beside those of the others."""
    rig = Rig({**shares, "batch": Share()}, "predictive")
    rig.open("w", shape(100 if blocks > 1 else 10_000, sequences), guaranteed_first=guaranteed_first)
    large = ""
    for step in range(400):
        if step == 50:
            (large,) = rig.announce("a", blocks, n=completions)
        for name in (*shares, "batch"):
            rig.announce(name, *([4] * max(8 - rig.machine.backlog.waiting[name], 0)))
        rig.wait(20)
        if large in rig.granted:
            return
        running = [grant for grant in rig.grants if grant.request_id in rig.worker("w").ledger]
        for grant in running[:3]:
            rig.finish(grant)
    raise AssertionError("it never starts")


@pytest.mark.long
def test_what_goes_first_does_not_pass_its_own_channels_head_for_ever() -> None:
    """What passes is paid of what the head saves for, and is more than the channel's part by weight."""
    stage = Stage("predictive", {"chat": Share(1.0, 0.3)} | {f"batch-{n}": Share() for n in range(5)}, 1_024)
    draw = random.Random(1)
    large = -1
    for quarter in range(1, 320):
        for name, of, prompts, outputs in [("chat", 10, (100, 400), (100, 300))] + [
            (f"batch-{n}", 10, (100, 600), (200, 400)) for n in range(5)
        ]:
            for _ in range(of - stage.penstock.waiting(name)):
                stage.ask(name, draw.randint(*prompts), draw.randint(*outputs), outputs[1])
        if quarter == 120:
            large = stage.ask("chat", 3_000, 350, 400)
        stage.run_until(quarter / 4)
    assert large in stage.penstock.granted_ns
    assert stage.grant_wait_ns(large) < 30 * SECOND_NS


def test_a_higher_tier_keeps_its_guarantee_behind_a_head_that_lower_ones_keep_out() -> None:
    rig = Rig({"low": Share(), "high": Share(1.0, 0.2, tier=1)}, "predictive")
    rig.open("w", shape(100), guaranteed_first=True)
    small: list[str] = []
    for step in range(600):
        if step == 110:
            rig.announce("high", 50)
        rig.announce("low", *([4] * max(30 - rig.machine.backlog.waiting["low"], 0)))
        if step % 10 == 0:
            small += rig.announce("high", 4)
        assert set(small[:-1]) <= set(rig.granted)
        rig.wait(20)
        running = [grant for grant in rig.grants[-200:] if grant.request_id in rig.worker("w").ledger]
        for grant in running[:3]:
            rig.finish(grant)


def passed_by(rig: Rig, *sizes: int) -> int:
    """Return how many blocks of two channels' requests go first."""
    began = len(rig.grants)
    for name in ("a", "b"):
        rig.announce(name, *sizes)
    return sum(grant.booked_blocks for grant in rig.grants[began:] if grant.guaranteed)


@pytest.mark.parametrize("adopted", [False, True])
def test_what_a_passed_request_has_grown_to_is_left_free_also_if_a_worker_brought_it_along(adopted: bool) -> None:
    rig = Rig({"a": Share(1.0, 0.4), "b": Share(1.0, 0.4), "batch": Share()}, "predictive")
    holds = [m.Holding("x", "batch", 50, 1)] if adopted else []
    rig.open("w", shape(1_000), holds, guaranteed_first=True)
    name = "x" if adopted else rig.announce("batch", 50)[0]
    for seq, blocks in ((5, 300), (6, 700)):
        rig.tell(m.TokenizerAck(1, 1, name, seq, blocks))
    assert 200 < passed_by(rig, *([20] * 40)) < 300


def test_what_goes_first_and_a_worker_brought_along_is_not_among_what_is_passed() -> None:
    rig = Rig({"a": Share(1.0, 0.4), "b": Share(1.0, 0.4), "batch": Share()}, "predictive")
    rig.open("w", shape(1_000), [m.Holding("a-0", "a", 350, 1, guaranteed=True)], guaranteed_first=True)
    assert passed_by(rig, *([20] * 40)) == 400, "nothing is passed, so all of the guarantee of b goes first"


def test_completions_are_passed_one_by_one() -> None:
    rig = Rig({"a": Share(1.0, 0.4), "b": Share(1.0, 0.4), "batch": Share()}, "predictive")
    rig.open("w", shape(1_000), [m.Holding("x", "batch", 900, 1, 20)], guaranteed_first=True)
    assert passed_by(rig, *([20] * 40)) > 700


def test_a_standing_grant_of_an_earlier_stream_that_is_met_counts_once() -> None:
    rig = Rig(SHARES, "predictive", standing_ns=2 * SECOND_NS)
    rig.open("w", shape(100), [m.Holding("standing/1-1", "batch", 90, 1)], takes_standing=True, guaranteed_first=True)
    rig.tell(m.GrantUsed(1, 1, "standing/1-1", announced("x", "batch", 90)))
    behind = rig.machine._arbiter._precedence._behind
    assert behind.most_blocks(1) == 90
    rig.tell(m.CompletionAck(1, 1, "x", 9, m.ReleaseCause.COMPLETED))
    assert behind.most_blocks(1) == 0


@pytest.mark.parametrize("policy", ["predictive", "virtual-channels"])
def test_whoever_goes_beyond_its_guarantee_is_not_first(policy: str) -> None:
    rig = Rig(SHARES, policy)
    rig.open("w", shape(100), guaranteed_first=True)
    rig.announce("safe", 14, 14, 14)
    assert [grant.guaranteed for grant in rig.grants] == [True, True, False]
    rig.announce("batch", 14)
    assert [grant.guaranteed for grant in rig.grants[3:]] == [False]


@pytest.mark.parametrize(("slack", "first"), [(1.0, 10), (3.0, 8)])
def test_who_goes_first_leaves_a_sequence_where_more_are_granted_than_run(slack: float, first: int) -> None:
    """Two channels, guaranteed half of the worker each, on an engine that runs ten at once."""
    rig = Rig({"a": Share(1.0, 0.5), "b": Share(1.0, 0.5), "batch": Share()}, "predictive", slack)
    rig.open("w", shape(1_000, 10), guaranteed_first=True)
    for name in ("a", "b"):
        rig.announce(name, *([1] * 20))
    assert len(rig.grants) == 10 * slack
    assert sum(grant.guaranteed for grant in rig.grants) == first, "a half of nine is four"


@pytest.mark.parametrize(("share", "guaranteed"), [(0.3, True), (0.0, False)])
def test_a_standing_grant_within_a_guarantee_is_one(share: float, guaranteed: bool) -> None:
    rig = Rig({"safe": Share(1.0, share)}, "predictive", standing_ns=2 * SECOND_NS)
    rig.open("w", shape(100), takes_standing=True, guaranteed_first=True)
    rig.announce("safe", 2)
    rig.finish(rig.grants[-1])
    rig.wait(100)
    rig.tell(m.Tick())
    assert rig.grants[-1].standing is not None
    assert rig.grants[-1].guaranteed is guaranteed
