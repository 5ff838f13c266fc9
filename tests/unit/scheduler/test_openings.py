"""Finding a worker with room, and the order of a line."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.backlog import Entry
from services.scheduler.core.line import FRONT_REQUESTS, Line, order
from services.scheduler.core.openings import Openings
from services.scheduler.core.share import Share
from tests.support.scheduling import Rig, announced, shape


def names(openings: Openings, blocks: int) -> list[str]:
    return [worker.worker_id for worker in openings.roomiest_first(blocks, 0)]


def test_workers_come_by_room_and_one_that_refused_stays_away_until_its_room_grows() -> None:
    rig = Rig({"a": Share()})
    for number, capacity in enumerate((10, 30, 20)):
        rig.open(f"w{number}", shape(capacity))
    openings = Openings(rig.worker("w0").group, lambda worker: worker.reach_blocks)
    assert names(openings, 5) == ["w1", "w2", "w0"]
    assert names(openings, 15) == ["w1", "w2"]
    openings.refuse(rig.worker("w1"), 8)
    assert names(openings, 8) == ["w2", "w0"]
    assert names(openings, 7) == ["w2", "w0", "w1"]
    openings.room_grew(rig.worker("w1"))
    assert names(openings, 8) == ["w1", "w2", "w0"]
    rig.worker("w2").ledger.book("r", "a", 15)
    assert names(openings, 4) == ["w1", "w0", "w2"], "a booking sinks the worker without being told"
    rig.worker("w0").draining = True
    assert names(openings, 1) == ["w1", "w2"]
    openings.remove(rig.worker("w1"))
    assert names(openings, 1) == ["w2"]
    assert openings.most_blocks() == 5


def test_a_worker_may_be_refused_while_they_are_looked_at() -> None:
    rig = Rig({"a": Share()})
    for number in range(5):
        rig.open(f"w{number}", shape(10))
    openings = Openings(rig.worker("w0").group, lambda worker: worker.reach_blocks)
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
