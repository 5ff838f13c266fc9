"""Workers that have gone are remembered for some minutes."""

from __future__ import annotations

from penstock.live.departed import MOST_REMEMBERED, Departures
from penstock.live.reading import Reading
from penstock.scheduler.v1.scheduler_pb2 import StatusResponse, WorkerStatus


def reading(at_s: float, *workers: WorkerStatus, up_ns: int = 3600 * 10**9) -> Reading:
    return Reading(at_s, None, StatusResponse(workers=workers, up_ns=up_ns), ())


def up(name: str) -> WorkerStatus:
    return WorkerStatus(worker_id=name, model="m", connected=True)


def told(departures: Departures, now: Reading) -> list[tuple[str, str, float]]:
    return [(one.name, one.was, one.ago_s) for one in departures.take(now)]


def test_a_worker_that_died_has_gone_since_it_was_last_connected() -> None:
    departures = Departures()
    away = WorkerStatus(worker_id="a", model="m", connected=False)
    assert told(departures, reading(0, up("a"), up("b"))) == []
    assert told(departures, reading(10, away, up("b"))) == [], "it is shown as gone among the others"
    assert told(departures, reading(20, up("b"))) == [("a", "up", 20)]
    assert departures.take(reading(21, up("b")))[0].model == "m"


def test_one_that_was_drained_went_as_it_was_told() -> None:
    departures = Departures()
    departures.take(reading(0, WorkerStatus(worker_id="a", connected=True, draining=True)))
    assert told(departures, reading(2)) == [("a", "drained", 2)]


def test_one_that_was_only_seen_gone_was_nobody_knows_what() -> None:
    departures = Departures()
    departures.take(reading(0, WorkerStatus(worker_id="a")))
    assert told(departures, reading(2)) == [("a", "", 2)]


def test_one_that_comes_back_has_not_gone() -> None:
    departures = Departures()
    departures.take(reading(0, up("a")))
    assert len(departures.take(reading(1))) == 1
    assert told(departures, reading(2, up("a"))) == []
    assert told(departures, reading(3)) == [("a", "up", 1)]


def test_the_latest_come_first_and_old_ones_are_forgotten() -> None:
    departures = Departures(span_s=100)
    departures.take(reading(0, up("a"), up("b"), up("c")))
    departures.take(reading(50, up("c")))
    assert told(departures, reading(90)) == [("c", "up", 40), ("a", "up", 90), ("b", "up", 90)]
    assert told(departures, reading(101)) == [("c", "up", 51)]


def test_silence_is_nobodys_end_and_goes_on_counting() -> None:
    departures = Departures()
    departures.take(reading(0, up("a"), up("b")))
    departures.take(reading(1, up("b")))
    assert told(departures, Reading(5, None, None, ("the scheduler does not answer",))) == [("a", "up", 5)]


def test_a_new_scheduler_is_given_time_to_hear_of_them() -> None:
    departures = Departures()
    departures.take(reading(0, up("a"), up("b")))
    assert told(departures, reading(2, up_ns=10**9)) == []
    assert told(departures, reading(4, up("b"), up_ns=3 * 10**9)) == []
    assert told(departures, reading(12, up("b"), up_ns=11 * 10**9)) == [("a", "up", 12)]
    assert told(departures, reading(13, up_ns=0)) == [("b", "up", 1), ("a", "up", 13)], "one that tells no age"


def test_no_more_are_remembered_than_a_large_fleet_loses() -> None:
    departures = Departures()
    departures.take(reading(0, up("first")))
    departures.take(reading(1, *(up(f"w{n}") for n in range(MOST_REMEMBERED))))
    assert [one.name for one in departures.take(reading(2, up("w0")))][-1] == "first"
    gone = departures.take(reading(3))
    assert len(gone) == MOST_REMEMBERED
    assert "first" not in {one.name for one in gone}
