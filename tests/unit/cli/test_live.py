"""What a live view makes of readings: rates over restarts, silent peers, and the frames of `penstock top`."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from penstock.cli.frame import age, bar, frame, spark
from penstock.live.history import History, Series
from penstock.live.rates import Rate, Rates, grown, total
from penstock.live.reading import Reading
from penstock.live.view import View, view_of
from penstock.queue.v1.queue_pb2 import ChannelStats, StatsResponse
from penstock.scheduler.v1.scheduler_pb2 import (
    ChannelStatus,
    EngineReport,
    StatusResponse,
    UnservedModel,
    WorkerStatus,
)

COUNTS = st.lists(st.integers(0, 1000), min_size=1, max_size=8)


def reading(at_s: float, ended: int | None, tokens: int = 0, channel: str = "batch") -> Reading:
    """One channel's counters at a time; None is a queue that does not answer."""
    if ended is None:
        return Reading(at_s, None, None, ("the queue does not answer",))
    stats = ChannelStats(channel=channel, ended_by_outcome=[0, ended], completion_tokens=tokens)
    return Reading(at_s, StatsResponse(channels=[stats]), None, ())


# ---- rates ----


def test_a_rate_needs_two_readings() -> None:
    rates = Rates()
    assert rates.take(reading(0, 100)) == {}
    assert rates.take(reading(2, 104, 40)) == {"batch": Rate(2.0, 20.0)}


def test_a_restarted_queue_counts_from_nothing() -> None:
    rates = Rates()
    rates.take(reading(0, 1000, 5000))
    assert rates.take(reading(1, None)) == {}
    assert rates.take(reading(2, 10, 30)) == {"batch": Rate(5.0, 15.0)}


def test_a_queue_that_was_silent_for_a_moment_counts_on() -> None:
    rates = Rates()
    rates.take(reading(0, 1000))
    rates.take(reading(1, None))
    assert rates.take(reading(2, 1010))["batch"].requests_per_s == 5.0


def test_rates_look_back_over_their_window_and_no_further() -> None:
    rates = Rates(window_s=10)
    for second in range(30):
        rates.take(reading(second, 100 if second >= 5 else 0))
    assert rates.take(reading(30, 100))["batch"].requests_per_s == 0
    # A frame a minute still has a rate: the one since the frame before.
    assert rates.take(reading(90, 220))["batch"].requests_per_s == 2.0


def test_a_reading_as_old_as_the_window_is_the_last_that_rates_look_back_to() -> None:
    rates = Rates(window_s=10)
    for second, ended in ((0, 0), (5, 100), (14, 100)):
        rates.take(reading(second, ended))
    assert rates.take(reading(15, 200))["batch"].requests_per_s == 10.0


def test_a_channel_that_is_new_has_a_rate() -> None:
    rates = Rates()
    rates.take(reading(0, 5, channel="old"))
    assert rates.take(reading(1, 3, channel="new")) == {"new": Rate(3.0, 0.0)}


def test_the_rate_of_the_whole() -> None:
    assert total({}) is None
    assert total({"a": Rate(1, 2), "b": Rate(3, 4)}) == Rate(4, 6)


@given(st.lists(COUNTS, min_size=1, max_size=5))
def test_a_counter_grows_by_what_each_of_its_lives_counted(lives: list[list[int]]) -> None:
    """Counters of several lives, each seen first at some count; a life that is seen below the one before is told."""
    seen: list[int] = []
    expected = 0
    for steps in lives:
        values = [sum(steps[: place + 1]) for place in range(len(steps))]
        hidden = bool(seen) and values[0] >= seen[-1]
        if not seen:
            expected += values[-1] - values[0]
        elif hidden:  # a restart that cannot be seen: the counter went on from where it was, for all one knows
            expected += values[-1] - seen[-1]
        else:
            expected += values[-1]
        seen += values
    assert grown(seen) == expected


@given(COUNTS)
def test_a_rate_is_never_negative(counts: list[int]) -> None:
    rates = Rates()
    for place, count in enumerate(counts):
        for rate in rates.take(reading(float(place), count, count)).values():
            assert rate.requests_per_s >= 0
            assert rate.tokens_per_s >= 0


# ---- the view ----


def fleet(*workers: WorkerStatus, connected: bool = True) -> StatusResponse:
    channels = [ChannelStatus(channel="batch", running=2, held_blocks=30)]
    return StatusResponse(policy="predictive", workers=workers, channels=channels, queue_connected=connected)


def worker(name: str, **fields: object) -> WorkerStatus:
    engine = EngineReport(running=2, waiting=1, kv_cache_usage=0.25, preemptions=3, step_ns=2_000_000)
    whole: dict[str, object] = {
        "capacity_blocks": 100, "free_blocks": 70, "held_blocks": {"batch": 30, "idle": 0}, "reservations": 2,
        "drift_blocks": 4, "connected": True, "engine": engine, **fields,
    }  # fmt: skip
    return WorkerStatus(worker_id=name, **whole)  # type: ignore[arg-type]


def view(queue: StatsResponse | None, status: StatusResponse | None, *problems: str) -> View:
    return view_of(Reading(0.0, queue, status, problems), {})


def test_nobody_answers() -> None:
    shown = view(None, None, "the queue does not answer", "the scheduler does not answer")
    assert not shown.channels
    assert not shown.workers
    assert shown.fleet.waiting is shown.fleet.running is shown.fleet.dead is None
    assert shown.problems == ("the queue does not answer", "the scheduler does not answer")


def test_the_queue_is_silent() -> None:
    shown = view(None, fleet(worker("w")), "the queue does not answer")
    (channel,) = shown.channels
    assert (channel.waiting, channel.oldest_s, channel.running, channel.held_blocks) == (None, None, 2, 30)
    assert shown.fleet.waiting is None
    assert shown.fleet.running == 2


def test_the_scheduler_is_silent() -> None:
    queue = StatsResponse(channels=[ChannelStats(channel="batch", ready=7, oldest_ready_age_ns=10**9)], dead=1)
    shown = view(queue, None)
    (channel,) = shown.channels
    assert (channel.waiting, channel.oldest_s, channel.running, channel.held_blocks) == (7, 1.0, None, None)
    assert (shown.fleet.waiting, shown.fleet.dead, shown.fleet.drift_blocks) == (7, 1, None)


def test_there_are_no_workers() -> None:
    status = fleet()
    status.unserved_models.append(UnservedModel(model="", waiting=7))
    shown = view(StatsResponse(), status)
    assert not shown.workers
    assert shown.fleet.drift_blocks == 0
    assert shown.problems == ("7 requests wait for a worker",)


def test_a_model_that_only_drained_workers_serve_is_named() -> None:
    def of(name: str, model: str, **fields: bool) -> WorkerStatus:
        made = worker(name, **fields)
        made.model = model
        return made

    drained, other = of("a", "tiny", draining=True), of("b", "other", draining=True)
    said = "all workers of the model 'tiny' are drained or ending: none takes requests for it"
    assert view(StatsResponse(), fleet(drained, of("c", "other"), other)).problems == (said,)
    assert view(StatsResponse(), fleet(drained, of("c", "tiny"))).problems == ()
    assert view(StatsResponse(), fleet(drained, of("c", "tiny", connected=False))).problems == (), "it comes back"


def test_workers_and_their_states() -> None:
    shown = view(
        StatsResponse(),
        fleet(
            worker("d", draining=True),
            worker("c", draining=True, reservations=0),
            worker("b", connected=False),
            worker("a"),
        ),
    )
    assert [(w.name, w.state) for w in shown.workers] == [
        ("a", "up"), ("b", "gone"), ("c", "drained"), ("d", "draining"),
    ]  # fmt: skip
    first = shown.workers[0]
    assert first.held_blocks == {"batch": 30}
    assert (first.all_held_blocks, first.kv_usage, first.step_ms) == (30, 0.25, 2.0)
    assert shown.fleet.running == 2, "requests, of whatever worker; reservations may stand ready for nobody"
    assert (shown.fleet.drift_blocks, shown.fleet.preemptions) == (16, 12)


def test_what_is_wrong_is_said() -> None:
    status = fleet(connected=False)
    status.audit_violations = 2
    shown = view(StatsResponse(submits_refused=True), status)
    assert view(StatsResponse(submits_refused=True, refusal="no disk"), status).problems[0] == (
        "submits are refused: no disk"
    )
    assert [line.split(":")[0] for line in shown.problems] == [
        "submits are refused",
        "the scheduler is not connected to the queue",
        "the scheduler's audit found 2 violations",
    ]


def test_a_second_scheduler_stands_by() -> None:
    queue = StatsResponse(scheduler_connected=True)
    stands_by = ("the scheduler stands by: another one is connected to the queue",)
    assert view(queue, fleet(connected=False)).problems == stands_by
    assert view(queue, fleet()).problems == ()
    for told in (None, StatsResponse(), StatsResponse(scheduler_connected=True, names_only=True)):
        assert view(told, fleet(connected=False)).problems == ("the scheduler is not connected to the queue",)


# ---- the ring of samples ----


def test_the_history_is_thinned_and_bounded() -> None:
    history = History(span_s=60, step_s=5)
    for second in range(200):
        history.add(float(second), {"w": second / 200})
    series = history.series(199.0, ["w"])
    assert 11 <= len(series.ages_s) <= 13
    assert series.ages_s == sorted(series.ages_s, reverse=True)
    assert all(0 <= aged <= 60 for aged in series.ages_s)


def test_a_worker_that_comes_late_or_goes_has_gaps() -> None:
    history = History(span_s=60, step_s=5)
    for at_s, usage in ((0, {"a": 0.1}), (5, {}), (10, {"a": 0.33333, "b": 0.2})):
        history.add(at_s, usage)
    assert history.series(10, ["a", "b"]) == Series([10, 5, 0], {"a": [0.1, None, 0.3333], "b": [None, None, 0.2]})


# ---- the terminal ----


@given(st.lists(st.integers(0, 500), max_size=6), st.integers(0, 2000), st.integers(1, 60))
def test_a_bar_is_as_wide_as_it_is_told(parts: list[int], more: int, width: int) -> None:
    held = sum(parts)
    shown = bar([(part, "cyan") for part in parts], held + more, width)
    assert shown.cell_len == width
    assert ("█" in shown.plain) == (held > 0)
    if held and not more:
        assert shown.plain == "█" * width


def test_a_bar_of_more_than_there_is_stays_in_its_place_and_shows_every_part() -> None:
    shown = bar([(300, "cyan"), (100, "red")], 100, 8)
    assert shown.plain == "█" * 8
    assert [(span.start, span.end, span.style) for span in shown.spans] == [(0, 6, "cyan"), (6, 8, "red")]
    assert bar([(0, "cyan")], 0, 4).plain == "····"


def test_ages_and_sparks() -> None:
    assert [age(s) for s in (None, 0, 1.26, 119, 121, 7300, 200_000)] == [
        "-", "-", "1.3 s", "119.0 s", "2 min", "2 h", "2 d",
    ]  # fmt: skip
    assert spark([0.0, 0.5, None, 1.0], 3) == "▅ █"


def drawn(shown: View, width: int) -> list[str]:
    console = Console(width=width, file=StringIO())
    console.print(frame(shown, Series([1.0], {"w1": [0.25]}), width))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
@pytest.mark.parametrize("names", [(), ("w1",), ("w1", "a-worker-with-quite-a-long-name")])
def test_a_frame_fits_its_terminal(names: Sequence[str], width: int) -> None:
    queue = StatsResponse(channels=[ChannelStats(channel="batch", ready=123_456, oldest_ready_age_ns=10**13)])
    lines = drawn(view(queue, fleet(*map(worker, names)), "the queue does not answer: " + "why " * 50), width)
    text = "\n".join(lines)
    assert max(map(cell_len, lines)) <= width
    for said in ("batch", "123,456", "requests/s", "tokens/s", "waiting", "drift", "preemptions", "held", *names[:1]):
        assert said in text
    if names:
        assert "25%" in text


def test_a_frame_shows_names_letter_by_letter() -> None:
    shown = view(None, fleet(worker("w[v2]", model="[/none]")))
    (row,) = [line for line in drawn(shown, 200) if " up " in line]
    assert " w[v2] " in row
    assert row.rstrip().endswith("[/none]")
