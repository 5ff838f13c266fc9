"""Who is aside costs no look until a worker comes that could hold it, and none of them is forgotten."""

from __future__ import annotations

import os
from collections.abc import Callable
from random import Random

import pytest

from services.scheduler.core import messages as m
from services.scheduler.core.sharing import aside
from services.scheduler.core.sharing.line import Line
from services.scheduler.core.sharing.places import Places
from services.scheduler.core.sharing.savings import Savings
from services.scheduler.core.sharing.share import Share
from tests.support.counting import count_calls
from tests.support.scheduling import Rig, announced, shape

pytestmark = pytest.mark.skipif("PENSTOCK_COMPILED" in os.environ, reason="nothing patches a compiled method")

ADAPTERS = tuple(f"adapter-{number}" for number in range(8))
MANY = 300


def rig_with_large_one_drained(shares: dict[str, Share]) -> Rig:
    """A large worker is drained. For a small one older heads of the last channel wait, in a line for each adapter."""
    rig = Rig(shares)
    for worker_id, blocks in (("large", 100), ("small", 40)):
        rig.open(worker_id, shape(blocks), aliases=ADAPTERS)
    rig.tell(m.DrainRequested("large"))
    rig.announce(next(iter(shares)), 20, 20, model="m")
    for model in ADAPTERS:
        rig.announce(list(shares)[-1], 30, model=model)
    return rig


def test_setting_aside_looks_at_nobody_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_with_large_one_drained({"chat": Share(), "batch": Share()})
    looks = count_calls(monkeypatch, Places, "find")
    rig.announce("batch", *[60] * MANY, model="m")
    assert rig.machine.channel("batch").lines["m"].aside == MANY
    assert looks() < MANY


def pause_ends(rig: Rig) -> None:
    rig.release(rig.grants[-1], m.ReleaseCause.UNCLAIMED)
    rig.wait(600)
    rig.tell(m.Tick())


def opens_again(rig: Rig) -> None:
    rig.tell(m.WorkerClosed(rig.worker("small").epoch))
    rig.open("small", shape(40), aliases=ADAPTERS)


def another_comes(rig: Rig) -> None:
    rig.open("other", shape(41), aliases=ADAPTERS)


def weights_change(rig: Rig) -> None:
    rig.tell(m.Reconfigure({"chat": Share(), "batch": Share(2)}))


@pytest.mark.parametrize("happens", [pause_ends, opens_again, another_comes, weights_change])
def test_what_brings_no_worker_large_enough_costs_no_look_at_who_is_out_of_reach(
    happens: Callable[[Rig], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rig_with_large_one_drained({"chat": Share(), "batch": Share()})
    rig.announce("batch", *[60] * MANY, model="m")
    looks = count_calls(monkeypatch, Places, "find")
    happens(rig)
    assert rig.machine.channel("batch").lines["m"].aside == MANY
    assert looks() < MANY


def test_looking_again_at_whom_lower_tiers_keep_out_costs_none_at_who_is_out_of_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = rig_with_large_one_drained({"chat": Share(), "batch": Share(tier=1)})
    rig.announce("batch", 39, *[60] * MANY, model="m")
    assert rig.machine.channel("batch").lines["m"].aside == MANY + 1
    looks = count_calls(monkeypatch, Places, "kept_out")
    found = count_calls(monkeypatch, Places, "find")
    for _ in range(3):
        rig.wait(1_000)
        rig.announce("chat", 40, model="m")
    assert looks() >= 3, "it is looked at"
    assert found() < MANY


def test_a_worker_brings_back_whom_it_could_hold_and_no_others() -> None:
    rig = Rig({"batch": Share()})
    for worker_id, blocks in (("largest", 100), ("large", 70), ("small", 40)):
        rig.open(worker_id, shape(blocks))
    rig.tell(m.DrainRequested("largest"), m.DrainRequested("large"))
    first, larger, second, small = rig.announce("batch", 60, 90, 65, 30)
    line = rig.machine.channel("batch").lines[""]
    assert (rig.granted, line.aside) == ([small], 3)
    rig.tell(m.DrainRequested("large", True))
    assert (rig.granted, line.aside) == ([small, first], 1)
    rig.finish(rig.grants[-1])
    assert rig.granted[-1] == second
    rig.tell(m.DrainRequested("largest", True))
    assert (rig.granted[-1], line.aside) == (larger, 0)


def opens_again_while_it_drains(rig: Rig) -> None:
    rig.finish(rig.grants[0])
    rig.tell(m.WorkerClosed(rig.worker("large").epoch))
    rig.open("large", shape(100))


def has_its_pause_end_while_it_drains(rig: Rig) -> None:
    rig.release(rig.grants[0], m.ReleaseCause.UNCLAIMED)
    rig.wait(600)
    rig.tell(m.Tick())


def has_its_pause_end_while_it_is_away(rig: Rig) -> None:
    rig.release(rig.grants[0], m.ReleaseCause.UNCLAIMED)
    rig.tell(m.WorkerClosed(rig.worker("large").epoch))
    rig.wait(600)
    rig.tell(m.Tick())
    rig.open("large", shape(100))


@pytest.mark.parametrize(
    "happens", [opens_again_while_it_drains, has_its_pause_end_while_it_drains, has_its_pause_end_while_it_is_away]
)
def test_a_worker_that_drains_brings_back_nobody_before_it_is_to_drain_no_more(
    happens: Callable[[Rig], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig({"batch": Share()})
    rig.open("large", shape(100))
    rig.open("small", shape(40))
    rig.announce("batch", 60)
    rig.tell(m.DrainRequested("large"))
    rig.announce("batch", *[60] * MANY)
    (passes,) = rig.announce("batch", 30)
    assert rig.granted == ["batch-1", passes]
    brought_back = count_calls(monkeypatch, Line, "bring_back")
    happens(rig)
    assert (brought_back(), len(rig.grants)) == (0, 2)
    rig.tell(m.DrainRequested("large", True))
    assert brought_back() >= MANY
    assert (rig.grants[-1].worker_id, len(rig.grants)) == ("large", 3)


def test_a_model_that_only_a_worker_which_drains_serves_is_served_when_it_drains_no_more() -> None:
    rig = Rig({"batch": Share()})
    rig.open("apart", shape(100), model="x")
    rig.tell(m.DrainRequested("apart"), m.WorkerClosed(rig.worker("apart").epoch))
    rig.wait(4_000)
    rig.tell(m.Tick())
    (waits,) = rig.announce("batch", 10, model="x")
    rig.open("apart", shape(100), model="x")
    assert rig.granted == []
    rig.tell(m.DrainRequested("apart", True))
    assert rig.granted == [waits]


def test_who_leaves_while_aside_is_forgotten() -> None:
    rig = Rig({"batch": Share()})
    rig.open("large", shape(100))
    rig.open("small", shape(40))
    rig.tell(m.DrainRequested("large"))
    gone, stays = rig.announce("batch", 60, 60)
    channel = rig.machine.channel("batch")
    rig.tell(m.Gone(gone, m.GoneReason.ENDED))
    assert (len(channel.beyond), channel.lines[""].aside) == (1, 1)
    rig.tell(m.DrainRequested("large", True))
    assert (rig.granted, len(channel.beyond)) == ([stays], 0)


def is_back(rig: Rig) -> None:
    """The stream of the large worker, which is alone in its group, opens again as it was."""
    rig.open("large", shape(180), aliases=("own",))


def has_a_successor(rig: Rig) -> None:
    """Another comes that is of no group there was."""
    rig.open("next", shape(180), aliases=("another",))


def is_back_after_another(rig: Rig) -> None:
    """A small one that is alone in its group too comes first, larger than it was."""
    rig.open("other", shape(21), aliases=("other",))
    is_back(rig)


RETURNS = [is_back, has_a_successor, is_back_after_another]


def rig_without_the_large_one(shares: dict[str, Share]) -> Rig:
    """The stream of the only worker that could hold 60 blocks has broken."""
    rig = Rig(shares)
    rig.open("large", shape(180), aliases=("own",))
    rig.open("small", shape(40))
    rig.open("other", shape(20), aliases=("other",))
    rig.tell(m.WorkerClosed(rig.worker("large").epoch))
    return rig


def pass_until_finished(rig: Rig) -> int:
    """Let passes follow as the runner does; return how many it took."""
    passes = 0
    while rig.machine.unfinished:
        rig.tell()
        passes += 1
    return passes


def few_looks(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Have passes set aside no more than `most` by who comes first, and one of each line."""
    monkeypatch.setattr(aside, "MOST_LOOKS", most)


def channels_of(rig: Rig) -> list[str]:
    return [grant.channel for grant in rig.grants]


@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize(("tier", "granted"), [(1, ["chat"] * 3), (0, ["batch", "chat", "batch"])])
def test_who_comes_back_is_granted_by_tiers_and_weights(
    tier: int, granted: list[str], returns: Callable[[Rig], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    few_looks(monkeypatch, 4)
    rig = rig_without_the_large_one({"batch": Share(tier=tier), "chat": Share()})
    for channel, count in (("batch", 20), ("chat", 5)):
        for _ in range(count):
            rig.announce(channel, 60)
    returns(rig)
    assert channels_of(rig) == granted


@pytest.mark.parametrize("returns", RETURNS)
def test_who_comes_back_is_granted_by_priority_and_position(
    returns: Callable[[Rig], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    few_looks(monkeypatch, 4)
    rig = rig_without_the_large_one({"batch": Share()})
    first, second = [rig.announce("batch", 60)[0] for _ in range(20)][:2]
    (urgent,) = rig.announce("batch", 60, priority=-1)
    returns(rig)
    assert rig.granted == [urgent, first, second]


def test_those_that_may_need_something_else_take_no_look_from_another_channel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few_looks(monkeypatch, 4)
    rig = rig_without_the_large_one({"batch": Share(), "chat": Share()})
    for _ in range(40):
        rig.announce("batch", 60)
    rig.machine.step(m.WorkerClosed(rig.worker("other").epoch), rig.now_ns)
    rig.open("another", shape(20), aliases=("another",))
    _, small = rig.announce("chat", 60, 30)
    assert rig.granted == [small]


def test_a_worker_alone_in_its_group_that_opens_its_stream_again_costs_no_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = rig_without_the_large_one({"batch": Share()})
    for _ in range(20):
        rig.announce("batch", 60)
    looks = count_calls(monkeypatch, aside.Aside, "_needed_blocks")
    rig.open("other", shape(20), aliases=("other",))
    assert looks() == 0
    rig.open("other", shape(21), aliases=("other",))
    assert looks() == 20, "it is larger"


@pytest.mark.parametrize(("tier", "at_once", "in_the_end"), [(0, ["batch"], ["batch"]), (1, [], ["chat"])])
def test_nobody_is_granted_what_is_behind_those_that_a_pass_could_not_set_aside(
    tier: int, at_once: list[str], in_the_end: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The small worker has room for one. A higher tier may not have what the line left for the next pass may."""
    few_looks(monkeypatch, 2)
    rig = rig_without_the_large_one({"chat": Share(), "batch": Share(tier=tier)})
    sizes = [("chat", 60)] * 5 + [("chat", 30), ("batch", 30)]
    rig.tell(*(announced(f"r{number}", *each, number) for number, each in enumerate(sizes)))
    assert channels_of(rig) == at_once
    assert pass_until_finished(rig) == 2
    assert channels_of(rig) == in_the_end


@pytest.mark.parametrize(
    ("channel", "tier", "model"), [("batch", 0, "m"), ("batch", 1, "other"), ("chat", 0, "other"), ("chat", 0, "own")]
)
def test_those_that_a_pass_could_not_set_aside_hold_up_no_other_pool_line_or_channel(
    channel: str, tier: int, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker of `own` is in the pool of those set aside, that of `other` in another."""
    few_looks(monkeypatch, 2)
    rig = Rig({"chat": Share(), "batch": Share(tier=tier)})
    for worker_id, blocks, models in (("large", 180, ["m"]), ("small", 40, ["m", "own"]), ("apart", 40, ["other"])):
        rig.open(worker_id, shape(blocks), model=models[0], aliases=tuple(models[1:]))
    large = [announced(f"l{number}", "chat", 60, number, model="m") for number in range(9)]
    last = announced("last", "chat", 10, 10, model="m")
    rig.tell(m.DrainRequested("large"), *large, last, announced("other", channel, 30, 11, model=model))
    assert rig.granted == ["other"]
    assert pass_until_finished(rig) == 4
    assert rig.granted == ["other", "last"]


@pytest.mark.parametrize(("in_front", "passes"), [(1, 1), (3, 2), (5, 3), (6, 4)])
def test_lines_share_alike_what_passes_set_aside(in_front: int, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in the first pass, which did not know of the second line, then two of the four in each."""
    few_looks(monkeypatch, 4)
    rig = Rig({"chat": Share(), "batch": Share()})
    for worker_id, blocks in (("large", 100), ("small", 40)):
        rig.open(worker_id, shape(blocks))
    large = [announced(f"l{number}", "chat", 60, number) for number in range(40)]
    others = [announced(f"f{number}", "batch", 60, 40 + number) for number in range(in_front)]
    rig.tell(m.DrainRequested("large"), *large, *others, announced("behind", "batch", 30, 50))
    for _ in range(passes - 1):
        assert rig.granted == []
        rig.tell()
    assert rig.granted == ["behind"]


def test_what_one_line_does_not_need_of_a_pass_the_next_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pass that sets aside four and one, the first takes one and the other three."""
    few_looks(monkeypatch, 4)
    rig = Rig({"chat": Share(), "batch": Share()})
    for worker_id, blocks in (("large", 100), ("small", 40)):
        rig.open(worker_id, shape(blocks))
    requests = [announced(f"r{number}", "chat" if number < 5 else "batch", 60, number) for number in range(9)]
    rig.tell(m.DrainRequested("large"), *requests)
    assert pass_until_finished(rig) == 1


@pytest.mark.parametrize("away", [m.WorkerClosed(99), m.DrainRequested("large")], ids=["closed", "drained"])
def test_a_worker_that_is_away_again_before_the_next_pass_brings_nobody_back(
    away: m.WorkerClosed | m.DrainRequested, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_looks(monkeypatch, 2)
    rig = rig_without_the_large_one({"batch": Share()})
    for _ in range(9):
        rig.announce("batch", 60)
    pass_until_finished(rig)
    looks = count_calls(monkeypatch, aside.Aside, "_takes_out_of_reach")
    rig.tell(m.WorkerOpened(99, "large", "i", ("m", "own"), shape(180), (), False, False), away)
    assert (looks(), rig.machine.unfinished) == (0, False)


def test_a_line_left_for_the_next_pass_goes_on_though_another_of_it_was_granted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one behind goes first in the engine, by its channel's guarantee."""
    few_looks(monkeypatch, 2)
    rig = Rig({"chat": Share(1, 0.5), "batch": Share()}, "predictive")
    for worker_id, blocks in (("large", 180), ("small", 40)):
        rig.open(worker_id, shape(blocks), guaranteed_first=True)
    sizes = [60] * 5 + [10] + [60] * 5
    requests = [announced(f"r{number}", "chat", blocks, number) for number, blocks in enumerate(sizes)]
    rig.tell(m.DrainRequested("large"), *requests)
    assert rig.granted == ["r5"]
    pass_until_finished(rig)
    assert rig.machine.channel("chat").lines[""].aside == 10


def within_reach(rig: Rig) -> list[str]:
    """Return who is aside though a worker that takes grants could hold it."""
    capacities = [each.shape.capacity_blocks for each in rig.machine.fleet if each.takes_grants(rig.now_ns)]
    most_blocks = max(capacities, default=0)
    entries = [entry for line in rig.machine.channel("batch").lines.values() for entry in line._aside.values()]
    return [entry.request_id for entry in entries if entry.announced.prompt_tokens <= most_blocks]


def shake(rig: Rig, chance: Random, sizes: dict[str, int]) -> None:
    """Let something happen: requests come and end, one of the workers of these sizes goes, comes or opens again."""
    worker_id = chance.choice(list(sizes))
    happens = chance.choice(["drain", "drain", "undrain", "opens", "announce", "announce", "finish"])
    if happens == "announce":
        blocks = [chance.choice([30, 60, 90]) for _ in range(chance.randint(1, 6))]
        rig.announce("batch", *blocks, model=chance.choice(["", "m"]))
    elif happens == "finish" and rig.grants:
        rig.finish(rig.grants.pop(0))
    elif happens == "opens" and not len(rig.worker(worker_id).ledger):
        rig.tell(m.WorkerClosed(rig.worker(worker_id).epoch))
        rig.open(worker_id, shape(sizes[worker_id]), aliases=(worker_id,))
    elif happens in ("drain", "undrain"):
        rig.tell(m.DrainRequested(worker_id, happens == "undrain"))


@pytest.mark.parametrize("seed", range(12))
def test_nobody_is_forgotten_where_a_pass_looks_at_few(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    few_looks(monkeypatch, 2)
    chance, rig = Random(seed), Rig({"batch": Share()})
    sizes = {"a": 100, "b": 70, "c": 40}
    for worker_id, blocks in sizes.items():
        rig.open(worker_id, shape(blocks), aliases=(worker_id,))
    for _ in range(60):
        shake(rig, chance, sizes)
        for _ in range(len(rig.machine.channel("batch"))):
            rig.tell(m.Tick())
        assert within_reach(rig) == []
    rig.tell(*(m.DrainRequested(worker_id, True) for worker_id in sizes))
    while rig.grants:
        rig.finish(rig.grants.pop(0))
    for line in rig.machine.channel("batch").lines.values():
        assert len(line) == 0


def test_what_is_saved_on_everywhere_is_found_once_for_all_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker has an adapter of its own, and heads save on all of them."""
    calls = []
    for workers in (8, 16):
        rig = Rig({"a": Share(), "b": Share()})
        for number in range(workers):
            rig.open(f"w{number}", shape(100), model="base", aliases=(f"m{number}",))
        for _ in range(6):
            for channel in ("a", "b"):
                for number in range(workers):
                    rig.tell(announced(f"{channel}-{rig.position}", channel, 90, rig.position, model=f"m{number}"))
                    rig.position += 1
        rig.wait(500)
        with monkeypatch.context() as patched:
            since = count_calls(patched, Savings, "are_everywhere")
            for grant in rig.grants[:4]:
                rig.finish(grant)
            calls.append(since())
    assert calls[1] < 2.5 * calls[0], "four times as many where each line asks every worker"
