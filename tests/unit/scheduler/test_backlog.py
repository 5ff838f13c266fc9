"""The life of a request before its claim: the whole table, and the rule behind it."""

from __future__ import annotations

import itertools

import pytest

from services.scheduler.core import messages as m
from services.scheduler.core.backlog import GONE_WITHIN_NS, Backlog
from services.scheduler.core.entry import Entry
from services.scheduler.core.lifecycle import LIFECYCLE, Event, State
from services.scheduler.core.sharing.share import Share
from tests.support.scheduling import Rig, announced

EPOCH = 7

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


def rig_of() -> Rig:
    return Rig({"batch": Share()})


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_pair_is_either_in_the_table_or_refused_on_purpose(state: State, event: Event) -> None:
    assert ((state, event) in LIFECYCLE) != ((state, event) in REFUSED)


def steps_to(state: State) -> list[Event]:
    """Return events that bring an absent request there."""
    return {
        State.ABSENT: [],
        State.WAITING: [Event.ANNOUNCED],
        State.GRANTED: [Event.ANNOUNCED, Event.BOOKED],
        State.UNLISTED: [Event.ADOPTED],
        State.RELISTED: [Event.ADOPTED, Event.ANNOUNCED],
        State.PARTED: [Event.ANNOUNCED, Event.BOOKED, Event.RELEASED],
    }[state]


def apply(backlog: Backlog, name: str, event: Event, now_ns: int = 0, position: int = 1) -> Entry:
    """Apply an event, with all that such a one brings along."""
    request = announced(name, "batch", 1, position) if event in {Event.ANNOUNCED, Event.REATTEMPTED} else None
    entry = backlog.apply(name, event, now_ns, request, EPOCH if event in {Event.BOOKED, Event.ADOPTED} else 0)
    assert entry is not None
    return entry


@pytest.mark.parametrize(("pair", "after"), list(LIFECYCLE.items()), ids=str)
def test_the_table_decides_who_is_in_line_counted_held_and_parted(pair: tuple[State, Event], after: State) -> None:
    machine = rig_of().machine
    backlog, channel = machine.backlog, machine.channel("batch")
    before, event = pair
    for step in steps_to(before):
        apply(backlog, "r", step)
    entry = apply(backlog, "r", event, position=2)
    waits = after is State.WAITING
    assert entry.state is after
    assert [held.request_id for line in channel.lines.values() for held in line.entries()] == ["r"] * waits
    assert (backlog.waiting["batch"], len(channel)) == (waits, waits)
    assert backlog.is_parted(entry) == (after is State.PARTED)
    if after is State.ABSENT:
        assert (backlog.get("r"), len(backlog)) == (None, 0)
    else:
        assert (backlog.get("r"), entry.epoch) == (entry, EPOCH if after in HELD else 0)


def test_what_is_announced_again_while_it_waits_has_its_new_position() -> None:
    machine = rig_of().machine
    for name, position in (("a", 1), ("b", 2), ("a", 3)):
        apply(machine.backlog, name, Event.ANNOUNCED, position=position)
    (line,) = machine.channel("batch").lines.values()
    assert [entry.request_id for entry in line.first(2)] == ["b", "a"]
    assert machine.backlog.waiting["batch"] == 2


@pytest.mark.parametrize("state", State)
def test_what_ends_while_a_worker_holds_credits_for_it_is_recalled_from_there(state: State) -> None:
    rig = rig_of()
    for step in steps_to(state):
        apply(rig.machine.backlog, "r", step)
    recalls = [effect for effect in rig.tell(m.Gone("r", m.GoneReason.ENDED)) if isinstance(effect, m.Recall)]
    assert recalls == ([m.Recall(EPOCH, "r")] if state in HELD & LISTED else [])


def test_only_what_is_listed_on_the_present_stream_may_wait() -> None:
    for (state, event), after in LIFECYCLE.items():
        if after is State.WAITING:
            assert state in LISTED or event in {Event.ANNOUNCED, Event.REATTEMPTED}
        if event is Event.BACKLOG_LOST:
            assert after not in LISTED


def test_a_refused_event_is_counted_and_leaves_no_trace() -> None:
    backlog = rig_of().machine.backlog
    assert backlog.apply("r", Event.CLAIMED, 0) is None
    assert len(backlog) == 0
    assert backlog.refused["claimed"] == 1


def test_what_has_not_been_announced_has_no_metadata() -> None:
    entry = apply(rig_of().machine.backlog, "r", Event.ADOPTED)
    with pytest.raises(LookupError, match="r has not been announced"):
        _ = entry.announced


def test_what_parted_without_a_gone_is_overdue_in_time_and_what_is_gone_never() -> None:
    backlog = rig_of().machine.backlog
    for number, name in enumerate(("a", "b", "c")):
        for event in steps_to(State.PARTED):
            apply(backlog, name, event, number)
    apply(backlog, "a", Event.CLAIMED)
    assert backlog.overdue(GONE_WITHIN_NS) == []
    assert backlog.overdue(GONE_WITHIN_NS + 1) == ["b"]
    assert backlog.overdue(GONE_WITHIN_NS + 2) == ["b", "c"]
    apply(backlog, "b", Event.OVERDUE)
    assert backlog.overdue(GONE_WITHIN_NS + 2) == ["c"]
