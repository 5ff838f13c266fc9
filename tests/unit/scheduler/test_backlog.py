"""The life of a request before its claim: the whole table, and the rule behind it."""

from __future__ import annotations

import itertools

import pytest

from services.scheduler.core.backlog import GONE_WITHIN_NS, LIFECYCLE, Action, Backlog, Event, State
from tests.support.scheduling import announced

HELD = {State.GRANTED, State.UNLISTED, State.RELISTED}
LISTED = {State.WAITING, State.GRANTED, State.RELISTED, State.PARTED}
REFUSED = {
    (State.ABSENT, Event.REATTEMPTED),
    (State.ABSENT, Event.BOOKED),
    (State.ABSENT, Event.CLAIMED),
    (State.ABSENT, Event.ENDED),
    (State.ABSENT, Event.RETURNED),
    (State.ABSENT, Event.RELEASED),
    (State.ABSENT, Event.BACKLOG_LOST),
    (State.WAITING, Event.REATTEMPTED),
    (State.WAITING, Event.RETURNED),
    (State.WAITING, Event.RELEASED),
    *((state, Event.BOOKED) for state in HELD),
    *((state, Event.ADOPTED) for state in HELD),
    (State.UNLISTED, Event.CLAIMED),
    (State.UNLISTED, Event.ENDED),
    *((state, Event.OVERDUE) for state in State if state is not State.PARTED),
    (State.PARTED, Event.BOOKED),
    (State.PARTED, Event.RETURNED),
    (State.PARTED, Event.RELEASED),
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_pair_is_either_in_the_table_or_refused_on_purpose(state: State, event: Event) -> None:
    assert ((state, event) in LIFECYCLE) != ((state, event) in REFUSED)


@pytest.mark.parametrize(("pair", "step"), list(LIFECYCLE.items()), ids=str)
def test_lines_are_entered_and_left_exactly_with_the_waiting_state(
    pair: tuple[State, Event], step: tuple[State, Action]
) -> None:
    (state, _), (after, action) = pair, step
    expected = {
        (False, True): {Action.ENTER},
        (True, False): {Action.LEAVE},
        (True, True): {Action.REENTER},
        (False, False): {Action.NONE, Action.RECALL},
    }
    assert action in expected[state is State.WAITING, after is State.WAITING]


def test_only_what_is_listed_on_the_present_stream_may_wait() -> None:
    for (state, event), (after, _) in LIFECYCLE.items():
        if after is State.WAITING:
            assert state in LISTED or event in {Event.ANNOUNCED, Event.REATTEMPTED}
        if event is Event.BACKLOG_LOST:
            assert after not in LISTED


def test_a_refused_event_is_counted_and_leaves_no_trace() -> None:
    backlog = Backlog()
    assert backlog.apply("r", Event.CLAIMED) is None
    assert len(backlog) == 0
    assert backlog.refused["claimed"] == 1


def test_what_has_not_been_announced_has_no_metadata() -> None:
    backlog = Backlog()
    moved = backlog.apply("r", Event.ADOPTED)
    assert moved is not None
    with pytest.raises(LookupError, match="r has not been announced"):
        _ = moved[0].announced


def parted(backlog: Backlog, name: str, now_ns: int) -> None:
    for event in (Event.ANNOUNCED, Event.BOOKED, Event.RELEASED):
        moved = backlog.apply(name, event)
        assert moved is not None
        entry = moved[0]
        entry.announce(announced(name, "batch", 1), 0)
        if event is Event.ANNOUNCED:
            backlog.count(entry)
        if event is Event.RELEASED:
            assert entry.state is State.PARTED
            backlog.part(entry, now_ns)


def test_what_parted_without_a_gone_is_overdue_in_time_and_what_is_gone_never() -> None:
    backlog = Backlog()
    for number, name in enumerate(("a", "b", "c")):
        parted(backlog, name, number)
    backlog.apply("a", Event.CLAIMED)
    assert backlog.overdue(GONE_WITHIN_NS) == []
    assert backlog.overdue(GONE_WITHIN_NS + 1) == ["b"]
    assert backlog.overdue(GONE_WITHIN_NS + 2) == ["b", "c"]
    backlog.apply("b", Event.OVERDUE)
    assert backlog.overdue(GONE_WITHIN_NS + 2) == ["c"]


def test_waiting_is_counted_per_channel() -> None:
    backlog = Backlog()
    for name in ("a", "b"):
        moved = backlog.apply(name, Event.ANNOUNCED)
        assert moved is not None
        moved[0].announce(announced(name, "batch", 1), 0)
        backlog.count(moved[0])
    backlog.apply("a", Event.BOOKED)
    assert backlog.waiting["batch"] == 1
