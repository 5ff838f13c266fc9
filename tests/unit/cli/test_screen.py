"""What does not fit a terminal is counted, by `penstock top` and by `status`, and what is wrong comes first."""

from __future__ import annotations

import re
from collections.abc import Callable
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, RenderableType

from penstock.cli.frame import frame
from penstock.cli.screen import shares
from penstock.cli.status import render
from penstock.live.departed import Departed
from penstock.live.history import Series
from penstock.live.reading import Reading
from penstock.live.view import view_of
from penstock.queue.v1.queue_pb2 import ChannelStats, StatsResponse
from penstock.scheduler.v1.scheduler_pb2 import ChannelStatus, StatusResponse, UnservedModel, WorkerStatus

Draw = Callable[[Reading, int, int | None], RenderableType]
LEFT_OUT = re.compile(r"^ (?:and )?([\d,]+) (?:more )?(problems|channels|workers|models)(?: \(([^)]*)\))?: penst", re.M)


def top(now: Reading, width: int, height: int | None) -> RenderableType:
    return frame(view_of(now, {}), Series([], {}), width, height)


def status(now: Reading, width: int, height: int | None) -> RenderableType:
    return render(now, {}, width, height)


BOTH = pytest.mark.parametrize(
    ("draw", "last"), [(top, "dead letters 7"), (status, "7 dead letters")], ids=["top", "status"]
)


def fleet(workers: int, channels: int = 2, models: int = 0, name: str = "w") -> Reading:
    """A fleet whose last worker is gone, and the one before it drained; most waits in the last channel."""
    statuses = [
        WorkerStatus(
            worker_id=f"{name}-{n:03}", model="m", capacity_blocks=100, free_blocks=100,
            connected=n < workers - 1, draining=n == workers - 2,
        )
        for n in range(workers)
    ]  # fmt: skip
    queued = [ChannelStats(channel=f"lane-{n:02}", ready=n) for n in range(channels)]
    running = [ChannelStatus(channel=f"lane-{n:02}") for n in range(channels)]
    unserved = [UnservedModel(model=f"none-{n}", waiting=1) for n in range(models)]
    told = StatusResponse(workers=statuses, channels=running, queue_connected=True, unserved_models=unserved)
    return Reading(0.0, StatsResponse(channels=queued, dead=7), told, ())


def drawn(picture: RenderableType, width: int) -> str:
    console = Console(width=width, file=StringIO())
    console.print(picture)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def named(text: str, kind: str) -> list[str]:
    """Return whom the first column names."""
    return re.findall(rf"^[│ █]* ({kind}-\w+)", text, re.M)


def left_out(text: str) -> dict[str, tuple[int, str]]:
    return {noun: (int(count.replace(",", "")), told) for count, noun, told in LEFT_OUT.findall(text)}


@given(st.integers(-2, 100), st.lists(st.integers(0, 60), max_size=5))
def test_shares_are_fair_and_give_away_all_there_is(whole: int, wants: list[int]) -> None:
    given_ = shares(whole, wants)
    assert all(0 <= share <= want for share, want in zip(given_, wants, strict=True))
    assert sum(given_) == min(max(0, whole), sum(wants))
    for share, want in zip(given_, wants, strict=True):
        if share < want:
            assert all(other <= share + 1 for other in given_)


@BOTH
@pytest.mark.parametrize("width", [60, 100])
@pytest.mark.parametrize("height", [3, 10, 24, 100])
@pytest.mark.parametrize(("workers", "channels", "models"), [(1, 1, 0), (12, 3, 1), (300, 2, 0), (500, 60, 40)])
def test_it_fits_and_everything_is_shown_or_counted(
    draw: Draw, last: str, width: int, height: int, workers: int, channels: int, models: int
) -> None:
    now = fleet(workers, channels, models)
    text = drawn(draw(now, width, height), width)
    assert len(text.splitlines()) <= height
    assert max(map(cell_len, text.splitlines())) <= width
    assert last in text
    missing = left_out(text)
    if height >= 10:
        for noun, kind, there in (("workers", "w", workers), ("channels", "lane", channels)):
            assert len(named(text, kind)) + missing.get(noun, (0, ""))[0] == there
        models_missing = missing.get("models", missing.get("problems", (0, "")))[0]
        assert text.count("which no connected worker serves") + models_missing == models or width < 100


@BOTH
def test_a_pipe_gets_everything(draw: Draw, last: str) -> None:
    text = drawn(draw(fleet(500, 60, 40), 200, None), 200)
    assert (len(named(text, "w")), len(named(text, "lane")), text.count("'none-")) == (500, 60, 40)
    assert last in text
    assert not left_out(text)
    assert named(text, "w") == sorted(named(text, "w"))


@BOTH
def test_what_fits_is_left_as_it_is(draw: Draw, last: str) -> None:
    now = fleet(3)
    whole = drawn(draw(now, 100, None), 100)
    assert drawn(draw(now, 100, len(whole.splitlines())), 100) == whole
    assert "workers" in whole
    low = drawn(draw(now, 100, len(whole.splitlines()) - 1), 100)
    assert (len(named(low, "w")), left_out(low)) == (3, {}), "without a title and lines it still fits"
    assert last in low


@BOTH
def test_ten_lines_show_those_to_look_at_first(draw: Draw, last: str) -> None:
    text = drawn(draw(fleet(300, 6), 100, 10), 100)
    assert last in text
    assert named(text, "w")[0] == "w-299", "the one that is gone"
    assert named(text, "lane")[0] == "lane-05", "where most waits"
    assert left_out(text)["workers"][1].endswith("298 up")
    assert set(left_out(text)) == {"workers", "channels"}


def test_those_that_are_not_up_come_first_then_what_the_ledger_or_the_cache_says() -> None:
    now = fleet(100)
    assert now.fleet is not None
    now.fleet.workers[40].engine.kv_cache_usage = 0.9
    now.fleet.workers[50].drift_blocks = 3
    text = drawn(top(now, 100, 24), 100)
    assert named(text, "w")[:5] == ["w-099", "w-098", "w-050", "w-040", "w-000"]
    assert left_out(text)["workers"][1] == f"{100 - len(named(text, 'w'))} up"


def test_all_that_is_wrong_is_counted_where_not_all_is_shown() -> None:
    now = fleet(300)
    assert now.fleet is not None
    for worker in now.fleet.workers[:200]:
        worker.connected = False
    assert left_out(drawn(top(now, 100, 24), 100))["workers"][1].endswith("gone, 1 drained, 98 up")


@BOTH
def test_a_name_that_folds_takes_lines_from_its_own_section(draw: Draw, last: str) -> None:
    now = fleet(40, name="w" * 60)
    for height in range(8, 40, 5):
        text = drawn(draw(now, 60, height), 60)
        assert len(text.splitlines()) <= height
        assert last in text
        assert left_out(text)["workers"][0] > 0


def test_who_has_left_is_named_in_one_line() -> None:
    gone = tuple(Departed(f"w[{n}]\n", "m", "" if n else "up", 40.0 + n) for n in range(300))
    picture = frame(view_of(fleet(3), {}, gone), Series([], {}), 100, 10)
    (line,) = [line for line in drawn(picture, 100).splitlines() if "left lately" in line]
    assert line.startswith("300 left lately: w[0]� (up until 40.0 s ago), w[1]� (41.0 s ago)")
    assert line.rstrip().endswith("…")
    assert "left lately" not in drawn(top(fleet(3), 100, 10), 100)


def test_what_is_always_there_leaves_room_for_rows() -> None:
    text = drawn(status(fleet(300), 60, 8), 60)
    policy, queue = text.splitlines()[-2:]
    assert policy.startswith("policy ")
    assert policy.rstrip().endswith("…")
    assert queue.startswith("queue: ")
    assert named(text, "w") == ["w-299"]
    assert "audit violations 0" in drawn(status(fleet(300), 60, 24), 60), "with more room it may fold"
