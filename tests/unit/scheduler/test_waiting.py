"""What waits is told in blocks, and what may be granted leaves out what no grant may take."""

from __future__ import annotations

import pytest

from services.scheduler.core import messages as m
from services.scheduler.core.fleet import Fleet
from services.scheduler.core.sharing.line import Line
from services.scheduler.core.sharing.share import Share
from services.scheduler.core.snapshot import take_snapshot
from services.scheduler.core.waiting import (
    MOST_UNSERVED_NAMES,
    OTHER_MODELS,
    SAMPLE_REQUESTS,
    SAMPLES_PER_LOOK,
    UnservedNames,
)
from services.scheduler.metrics import grantable_blocks, starvation
from tests.support.counting import count_calls
from tests.support.modules import COMPILED
from tests.support.scheduling import Rig, announced, shape

SHARES = {"batch": Share(), "chat": Share()}


def rig_of(policy: str = "virtual-channels", capacity_blocks: int = 10) -> Rig:
    """Return a fleet of one worker."""
    rig = Rig(SHARES, policy)
    rig.open("w1", shape(capacity_blocks))
    return rig


@pytest.mark.parametrize("policy", ["virtual-channels", "tokenizer-ack"])
def test_what_waits_is_told_in_blocks_by_channel_and_model(policy: str) -> None:
    rig = rig_of(policy)
    rig.announce("batch", 10)
    rig.announce("batch", 4, 6)
    rig.announce("chat", 4, model="m")
    expected = {("batch", ""): 10, ("chat", "m"): 4}
    assert rig.machine.waiting_blocks() == expected


def test_a_line_of_two_channels_is_told_apart() -> None:
    rig = rig_of("tokenizer-ack")
    rig.announce("batch", 10)
    rig.announce("batch", 4)
    rig.announce("chat", 3)
    assert rig.machine.waiting_blocks() == {("batch", ""): 4, ("chat", ""): 3}


def test_a_long_line_is_told_by_those_in_front() -> None:
    rig = rig_of()
    rig.announce("batch", 10)
    rig.announce("batch", *[5] * SAMPLE_REQUESTS, *[9] * SAMPLE_REQUESTS)
    assert rig.machine.waiting_blocks() == {("batch", ""): 2 * 5 * SAMPLE_REQUESTS}


def test_of_many_lines_some_are_asked_at_a_look_and_all_in_turn() -> None:
    at_once = SAMPLES_PER_LOOK // SAMPLE_REQUESTS
    names = tuple(f"m{number}" for number in range(2 * at_once + 1))
    rig = Rig(SHARES)
    rig.open("w", shape(10), aliases=names)
    rig.announce("batch", 10)
    first = [rig.announce("batch", *[5] * SAMPLE_REQUESTS, model=name) for name in names]
    assert [len(rig.machine.waiting_blocks()) for _ in range(3)] == [at_once, 2 * at_once, len(names)]
    for name in names:
        rig.announce("batch", *[9] * SAMPLE_REQUESTS, model=name)
    small, large = 5 * SAMPLE_REQUESTS, 9 * SAMPLE_REQUESTS
    assert set(rig.machine.waiting_blocks().values()) == {2 * small}, "as those that were asked, or are in front"
    rig.tell(*(m.Gone(request_id, m.GoneReason.ENDED) for request_ids in first for request_id in request_ids))
    found = [sorted(rig.machine.waiting_blocks().values()) for _ in range(3)]
    rest = len(names) - at_once
    assert found[0] == [small] * rest + [large] * at_once, "the rest are told by those that have left"
    assert found[1] == [small] * (rest - at_once) + [large] * 2 * at_once
    assert found[2] == [large] * len(names)


def test_a_snapshot_takes_no_line_its_turn() -> None:
    at_once = SAMPLES_PER_LOOK // SAMPLE_REQUESTS
    names = tuple(f"m{number}" for number in range(2 * at_once + 1))
    rig = Rig(SHARES)
    rig.open("w", shape(10), aliases=names)
    rig.announce("batch", 10)
    for name in names:
        rig.announce("batch", *[5] * SAMPLE_REQUESTS, model=name)
    told = []
    for _ in range(3):
        assert take_snapshot(rig.machine) == take_snapshot(rig.machine)
        told.append(len(rig.machine.waiting_blocks()))
    assert told == [at_once, 2 * at_once, len(names)]


def test_a_model_that_nobody_serves_has_no_size() -> None:
    rig = rig_of()
    rig.announce("batch", 5, model="other")
    assert rig.machine.waiting_blocks() == {}
    assert rig.machine.unserved().by_model() == {"other": 1}
    assert (len(rig.machine.unserved()), rig.machine.unserved().of("other")) == (1, 1)


def of_many_names(rig: Rig, names: int) -> None:
    for channel in SHARES:
        for number in range(names):
            rig.announce(channel, 1, model=f"made-up-{number}")


@pytest.mark.skipif(COMPILED, reason="nothing patches a compiled method")
def test_made_up_names_that_have_no_place_cost_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = []
    for names in (2 * MOST_UNSERVED_NAMES, 4 * MOST_UNSERVED_NAMES):
        rig, unserved = rig_of(), UnservedNames()
        rig.announce("batch", 10)
        rig.announce("batch", 10)
        of_many_names(rig, names)
        told, new = unserved.tell(rig.machine.unserved(), rig.now_ns)
        assert (len(new), told[OTHER_MODELS]) == (MOST_UNSERVED_NAMES + 1, 2 * (names - MOST_UNSERVED_NAMES))
        with monkeypatch.context() as patched:
            looks = [count_calls(patched, Fleet, "serving"), count_calls(patched, Line, "__len__")]
            assert unserved.tell(rig.machine.unserved(), rig.now_ns) == (told, [])
            assert rig.machine.waiting_blocks() == {("batch", ""): 10}
            costs.append([since() for since in looks])
    assert costs[0] == costs[1]
    assert sum(costs[0]) < 4 * MOST_UNSERVED_NAMES


def test_what_waits_for_models_that_somebody_serves_is_found_from_either_side() -> None:
    """Of more names than lines the lines are looked at, of more lines than names the names."""
    for served in (3, 30):
        rig = Rig(SHARES)
        rig.open("w", shape(10), aliases=tuple(f"m{number}" for number in range(served)))
        rig.announce("batch", 10)
        for model in ("", "m0", "m1", *(f"made-up-{number}" for number in range(10))):
            rig.announce("batch", 4, model=model)
        assert rig.machine.waiting_blocks() == {("batch", model): 4 for model in ("", "m0", "m1")}
        assert len(rig.machine.unserved()) == sum(rig.machine.unserved().by_model().values()) == 10
        assert rig.machine.unserved().of("m0") == 0


def test_a_forecast_counts_what_a_request_will_grow_to() -> None:
    rig = rig_of("predictive", 100)
    rig.announce("batch", 40, max_tokens=60)
    rig.announce("batch", 50, max_tokens=45)
    worker = take_snapshot(rig.machine).workers[0]
    assert rig.granted == ["batch-1"]
    assert 50 + 1 < rig.machine.waiting_blocks()["batch", ""] <= 94
    assert worker.outlook is not None
    assert grantable_blocks(worker) == max(100 - worker.outlook.peak_blocks, 0) < worker.free_blocks


def test_a_worker_that_takes_no_grants_has_nothing_to_grant() -> None:
    view = take_snapshot(rig_of().machine).workers[0]
    assert grantable_blocks(view) == 10
    assert grantable_blocks(view._replace(draining=True)) == 0
    assert grantable_blocks(view._replace(connected=False)) == 0


@pytest.mark.parametrize("policy", ["virtual-channels", "predictive"])
def test_who_saves_on_a_small_worker_leaves_it_to_others_once_a_larger_one_has_come(policy: str) -> None:
    rig = Rig({"a": Share(), "b": Share()}, policy)
    rig.open("small", shape(20))
    rig.tell(announced("runs", "b", 10, 1))
    # A text whose tokens nobody has counted books all of what cannot hold its bound.
    rig.tell(announced("saves", "a", 0, 2, prompt_bytes=50), announced("waits", "b", 15, 3))
    large = m.WorkerOpened(9, "large", "i", ("m",), shape(100), ())
    rig.tell(large, m.DrainRequested("large"))
    rig.finish(rig.grants[0])
    assert "waits" in rig.granted


def starved(rig: Rig) -> dict[tuple[str, str], float]:
    return starvation(take_snapshot(rig.machine).workers, rig.machine.waiting_blocks())


def test_an_idle_pool_does_not_hide_one_that_is_full() -> None:
    rig = Rig(SHARES)
    rig.open("a", shape(10), model="a")
    rig.open("b", shape(1000), model="b")
    rig.announce("chat", 10, model="a")
    rig.announce("chat", 10, 10, 10, model="a")
    assert starved(rig) == {("chat", "a"): 30}


def test_the_names_of_one_pool_want_its_blocks_together() -> None:
    rig = Rig(SHARES)
    rig.open("w", shape(100), model="base", aliases=("one", "two"))
    rig.open("other", shape(60), model="other", aliases=("one",))
    rig.announce("chat", 60, model="two")
    rig.announce("chat", 60, model="other")
    rig.announce("chat", 80, model="base")
    rig.announce("batch", 70, model="two")
    rig.announce("chat", 80, 10, model="two")
    rig.announce("chat", 90, model="one")
    assert starved(rig) == {
        ("chat", "base"): pytest.approx(170 / 40),
        ("chat", "two"): pytest.approx(170 / 40),
        ("batch", "two"): pytest.approx(70 / 40),
        ("chat", "one"): pytest.approx((90 + 170) / 40),
    }
