"""Finding a worker with room, and the order of a line."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core import messages as m
from services.scheduler.core.entry import Entry
from services.scheduler.core.fleet import Worker
from services.scheduler.core.sharing import places
from services.scheduler.core.sharing.line import FRONT_REQUESTS, Line, order
from services.scheduler.core.sharing.openings import MOST_KINDS, Growth, Openings, Rooms
from services.scheduler.core.sharing.rules import Claim, Rules, below_ceiling
from services.scheduler.core.sharing.share import Share
from tests.support.scheduling import Rig, announced, shape


def names(openings: Openings, blocks: int) -> list[str]:
    return [worker.worker_id for worker in openings.roomiest_first(blocks, 0)]


def test_workers_come_by_room_and_one_that_refused_stays_away_until_its_room_grows() -> None:
    rig = Rig({"a": Share()})
    for number, capacity in enumerate((10, 30, 20)):
        rig.open(f"w{number}", shape(capacity))
    rooms = Rooms(rig.worker("w0").group, lambda worker: worker.reach_blocks, Growth())
    openings = rooms.of((1, 0))
    assert names(openings, 5) == ["w1", "w2", "w0"]
    assert names(openings, 15) == ["w1", "w2"]
    openings.refuse(rig.worker("w1"), 8)
    assert names(openings, 8) == ["w2", "w0"]
    assert names(openings, 7) == ["w2", "w0", "w1"]
    rooms.room_grew(rig.worker("w1"))
    assert names(openings, 8) == ["w1", "w2", "w0"]
    rig.worker("w2").ledger.book("r", "a", 15)
    assert names(openings, 4) == ["w1", "w0", "w2"], "a booking sinks the worker without being told"
    rig.worker("w0").leaving = True
    assert names(openings, 1) == ["w1", "w2"]
    rooms.remove(rig.worker("w1"))
    assert names(openings, 1) == ["w2"]
    assert openings.most_blocks() == 5


def test_workers_of_other_sizes_are_not_looked_at() -> None:
    rig = Rig({"a": Share()})
    for number in range(200):
        rig.open(f"large{number}", shape(100))
    for name, capacity in (("small", 50), ("medium", 90), ("other", 50)):
        rig.open(name, shape(capacity))
    looked_at: list[str] = []

    def reach(worker: Worker) -> int:
        looked_at.append(worker.worker_id)
        return worker.reach_blocks

    openings = Rooms(rig.worker("small").group, reach, Growth()).of((1, 0))
    assert openings.most_blocks(60) == 50
    looked_at.clear()
    found = openings.roomiest_first(10, 0, below_blocks=100)
    assert [worker.worker_id for worker in found] == ["medium", "other", "small"]
    assert looked_at.count("medium") == looked_at.count("small") == 1
    assert len(looked_at) == 3
    assert [worker.worker_id for worker in openings.most_room(0, 60, 100)] == ["medium"]
    assert len(list(openings.most_room(0, 95))) == 200


@given(
    capacities=st.lists(st.integers(1, 300), min_size=1, max_size=12),
    held=st.lists(st.integers(0, 300), min_size=12, max_size=12),
    blocks=st.integers(1, 100),
    bounds=st.tuples(st.integers(0, 300), st.integers(0, 400)),
)
def test_of_any_sizes_they_come_by_room(
    capacities: list[int], held: list[int], blocks: int, bounds: tuple[int, int]
) -> None:
    rig = Rig({"a": Share()})
    for number, capacity in enumerate(capacities):
        rig.open(f"w{number}", shape(capacity))
    openings = Rooms(rig.worker("w0").group, lambda worker: worker.reach_blocks, Growth()).of((1, 0))
    workers = list(rig.machine.fleet)
    for worker, taken in zip(workers, held, strict=False):
        if 0 < taken <= worker.shape.capacity_blocks:
            worker.ledger.book("r", "a", taken)
    least, below = bounds
    wanted = [w for w in workers if least <= w.shape.capacity_blocks < below and w.reach_blocks >= blocks]
    wanted.sort(key=lambda worker: (worker.reach_blocks, worker.epoch), reverse=True)
    assert list(openings.roomiest_first(blocks, 0, least, below)) == wanted


def test_a_worker_may_be_refused_while_they_are_looked_at() -> None:
    rig = Rig({"a": Share()})
    for number in range(5):
        rig.open(f"w{number}", shape(10))
    openings = Rooms(rig.worker("w0").group, lambda worker: worker.reach_blocks, Growth()).of((1, 0))
    seen = []
    for worker in openings.roomiest_first(3, 0):
        seen.append(worker.worker_id)
        if len(seen) % 2:
            openings.refuse(worker, 2)
    assert sorted(seen) == ["w0", "w1", "w2", "w3", "w4"]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_line_is_a_sorted_list_however_it_is_entered_and_left(seed: int) -> None:
    draw = random.Random(seed)
    line = Line("m")
    waiting: list[Entry] = []
    for number in range(200):
        if waiting and draw.random() < 0.4:
            gone = waiting.pop(draw.randrange(len(waiting)) if draw.random() < 0.5 else 0)
            line.leave(gone)
            if draw.random() < 0.3:
                line.enter(gone)
                waiting.append(gone)
        else:
            entry = Entry(f"r{number}")
            entry.announce(announced(entry.request_id, "a", 1, draw.randrange(300), priority=draw.randrange(2)), 0)
            line.enter(entry)
            waiting.append(entry)
        waiting.sort(key=order)
        assert len(line) == len(waiting)
        if draw.random() < 0.5:
            assert line.head() is (waiting[0] if waiting else None)
        if draw.random() < 0.3 and waiting:
            assert [line.head(), *line.behind()] == waiting[:FRONT_REQUESTS]


def test_what_one_kind_is_refused_another_may_have() -> None:
    rig = Rig({"a": Share()})
    rig.open("w", shape(10))
    rooms = Rooms(rig.worker("w").group, lambda worker: worker.reach_blocks, Growth())
    assert names(rooms.of((2, 0)), 10) == ["w"]
    rooms.of((2, 0)).refuse(rig.worker("w"), 1)
    assert names(rooms.of((2, 0)), 1) == []
    assert names(rooms.of((1, 0)), 10) == ["w"]
    rooms.room_grew(rig.worker("w"))
    assert names(rooms.of((2, 0)), 10) == ["w"]


def test_whoever_makes_up_kinds_does_not_fill_the_memory() -> None:
    rig = Rig({"a": Share()})
    rig.open("w", shape(10))
    rooms = Rooms(rig.worker("w").group, lambda worker: worker.reach_blocks, Growth())
    first = rooms.of((1, 0))
    assert all(rooms.of((number, 0)) is not first for number in range(2, MOST_KINDS + 2))
    assert rooms.of((1, 0)) is not first
    assert names(rooms.of((1, 0)), 10) == ["w"]


@pytest.mark.skipif("PENSTOCK_COMPILED" in os.environ, reason="nothing patches a compiled method")
@pytest.mark.parametrize("policy", ["virtual-channels", "predictive"])
def test_several_completions_cost_no_look_at_the_whole_fleet(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    claim = Rules.claim

    def counted(*arguments: Any) -> Claim:
        nonlocal looks
        looks += 1
        return claim(*arguments)

    monkeypatch.setattr(Rules, "claim", counted)
    shares = {"a": Share(1, 0.2), "b": Share(1, 0.2), "c": Share()}
    rig = Rig(shares, policy)
    for number in range(32):
        rig.open(f"w{number}", shape(100, 256), guaranteed_first=True)

    def top_up() -> None:
        for channel in shares:
            missing = max(40 - rig.machine.backlog.waiting[channel], 0)
            rig.announce(channel, *[5] * missing, n=2, max_tokens=10)

    granted = -1
    while granted < (granted := len(rig.grants)):
        top_up()
    looks, running = 0, list(rig.grants[:40])
    for grant in running:
        rig.wait(10)
        rig.finish(grant)
        top_up()
    assert looks < 40 * 15, "some for each that ended, not all of 32 workers for each of nine in three lines"


@pytest.mark.skipif("PENSTOCK_COMPILED" in os.environ, reason="nothing patches a compiled function")
def test_where_others_save_on_all_workers_a_head_looks_at_few(monkeypatch: pytest.MonkeyPatch) -> None:
    models = tuple(f"k{number}" for number in range(16))
    rig = Rig({"a": Share(), "b": Share(), "c": Share()})
    for number in range(32):
        rig.open(f"w{number}", shape(), aliases=models)
    for _ in range(3):
        for model in models:
            for channel in ("a", "b", "c"):
                rig.announce(channel, 60, model=model)
    saving = [worker for worker in rig.machine.fleet if rig.machine._arbiter._savings.on(worker) is not None]
    assert len(saving) == 32
    looks = 0

    def counted(*arguments: Any) -> bool:
        nonlocal looks
        looks += 1
        return below_ceiling(*arguments)

    monkeypatch.setattr(places, "below_ceiling", counted)
    for grant in list(rig.grants[:10]):
        rig.wait(10)
        rig.finish(grant)
    assert len(rig.grants) == 32 + 10
    assert looks < 10 * 3 * 32 * 4, "not all workers for each of sixteen heads of three channels"


def test_a_head_that_will_grow_hides_no_room_from_those_that_book_as_much_and_will_not() -> None:
    rig = Rig({"a": Share(), "b": Share()}, "predictive")
    for number in range(3):
        rig.open(f"w{number}", shape(100))
    for _ in range(6):
        rig.announce("b", 4, max_tokens=40)
    (head,) = rig.announce("a", 6, max_tokens=60)
    short = rig.announce("a", *[6] * 12, max_tokens=2)
    assert head not in rig.granted
    assert set(short) <= set(rig.granted)


def test_a_head_beyond_its_guarantee_hides_it_from_none_within() -> None:
    rig = Rig({"safe": Share(1, 0.3), "batch": Share()}, "predictive")
    held = [m.Holding(f"long-{number}", "batch", 25, 1) for number in range(4)]
    rig.open("w", shape(100), held, guaranteed_first=True)
    (head,) = rig.announce("safe", 5, max_tokens=60)
    short = rig.announce("safe", 5, 5, 5, max_tokens=2)
    assert head not in rig.granted
    assert set(short) <= set(rig.granted)


def test_a_head_saves_where_most_room_is_of_however_many_workers() -> None:
    rig = Rig({"a": Share(), "b": Share()})
    rig.open("large", shape(200))
    rig.announce("a", 150)
    for number in range(90):
        rig.open(f"w{number}", shape(100))
    (larger,) = rig.announce("b", 160)
    rig.tell(m.Gone(larger, m.GoneReason.ENDED))
    rig.announce("a", *[100] * 90)
    roomy = rig.grants[1:11]
    for grant in roomy:
        rig.finish(grant)
    rig.announce("a", *[20] * 20)
    (head,) = rig.announce("b", 95)
    assert head not in rig.granted
    (saving,) = [found for worker in rig.machine.fleet if (found := rig.machine._arbiter._savings.on(worker))]
    assert saving.worker.worker_id in {grant.worker_id for grant in roomy}
