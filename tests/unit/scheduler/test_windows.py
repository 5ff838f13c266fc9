"""How many requests of each channel the queue may announce, and when it is told."""

from __future__ import annotations

from services.scheduler.core import messages as m
from services.scheduler.core.sharing.line import Line
from services.scheduler.core.sharing.share import Share
from services.scheduler.core.windows import LEAST_REQUESTS, SHARED_REQUESTS, Windows
from tests.support.scheduling import Rig, shape


def no_lines(_channel: str) -> list[Line]:
    return []


def told(windows: Windows) -> list[str]:
    """Return the channels whose windows the queue is told of."""
    return [window.channel for window in windows.news()]


def test_only_a_channel_that_is_made_anew_is_told_its_window_again() -> None:
    windows = Windows(Rig({}).machine.fleet, no_lines)
    windows.opened(("a", "b"))
    assert told(windows) == ["a", "b"]
    windows.changed(("a",))
    assert told(windows) == []
    windows.changed(("a", "b"))
    assert told(windows) == ["b"]


def test_a_line_of_exactly_a_window_takes_its_part_of_the_room_beside() -> None:
    """Only a worker that drains could hold any of them."""
    rig = Rig({"batch": Share()})
    for worker_id, blocks in (("small", 100), ("large", 400)):
        rig.open(worker_id, shape(blocks, 8), model="k", aliases=("l",))
    rig.tell(m.DrainRequested("large"))

    def limit_after(count: int, model: str) -> int:
        rig.announce("batch", *[300] * count, model=model)
        while rig.machine.unfinished:  # a pass sets aside some of them
            rig.tell()
        rig.tell(m.Tick())
        return [effect.limit for effect in rig.effects if isinstance(effect, m.SetWindow)][-1]

    aside = SHARED_REQUESTS // 4 + 1
    assert limit_after(aside, "k") == LEAST_REQUESTS + 2 * aside
    assert limit_after(LEAST_REQUESTS - 1, "l") == LEAST_REQUESTS + 2 * aside
    assert limit_after(1, "l") == LEAST_REQUESTS + SHARED_REQUESTS // 2
