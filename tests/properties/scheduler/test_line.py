"""A waiting line against the simplest one there is: a list that is sorted at every look."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.entry import Entry
from services.scheduler.core.sharing.line import FRONT_REQUESTS, STALE_ALLOWANCE, Line, order
from tests.support.effort import examples
from tests.support.scheduling import announced

NAMES = [f"r{number}" for number in range(40)]
PLACES = st.tuples(st.integers(0, 1), st.integers(0, 60))
"""Priority and position, few enough that requests come back to the place they left."""


def entry(name: str, place: tuple[int, int], last_attempt: bool = False) -> Entry:
    found = Entry(name)
    found.announce(announced(name, "batch", 1, place[1], priority=place[0], last_attempt=last_attempt), 0)
    return found


@settings(max_examples=examples(300), deadline=None)
@given(
    places=st.lists(PLACES, min_size=len(NAMES), max_size=len(NAMES)),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["enter", "enter", "leave", "head", "aside", "back"]), st.sampled_from(NAMES), PLACES
        ),
        max_size=200,
    ),
    looks=st.booleans(),
)
def test_requests_leave_in_order_whoever_comes_and_goes(
    places: list[tuple[int, int]], steps: list[tuple[str, str, tuple[int, int]]], looks: bool
) -> None:
    steps = [*(("enter", name, place) for name, place in zip(NAMES, places, strict=True)), *steps]
    steps += [*(("back", name, (0, 0)) for name in NAMES), *[("head", "", (0, 0))] * len(NAMES)]
    line, waiting, aside = Line("m"), dict[str, Entry](), dict[str, Entry]()
    for what, name, place in steps:
        if what == "enter" and name not in waiting and name not in aside:
            waiting[name] = entry(name, place)
            line.enter(waiting[name])
        elif what == "leave" and name in waiting:
            line.leave(waiting.pop(name))
        elif what == "head" and waiting:
            first = line.head()
            assert first is min(waiting.values(), key=order)
            line.leave(first)
            del waiting[first.request_id]
        elif what == "aside" and waiting:
            first = min(waiting.values(), key=order)
            assert line.head() is first
            line.set_head_aside()
            aside[first.request_id] = waiting.pop(first.request_id)
        elif what == "leave" and name in aside:
            line.leave(aside.pop(name))
        elif what == "back" and name in aside:
            line.bring_back(aside[name])
            waiting[name] = aside.pop(name)
        if looks:
            in_order = sorted(waiting.values(), key=order)
            assert line.head() is (in_order[0] if in_order else None)
            assert line.behind() == in_order[1:FRONT_REQUESTS]
        assert len(line) == len(waiting) + len(aside)


class Driven:
    """A line as its channel drives it: who leaves, or is aside for something else, lets the next such have its turn."""

    def __init__(self) -> None:
        self.line, self.there, self.aside = Line("m"), dict[str, Entry](), dict[str, Entry]()

    def step(self, what: str, name: str, place: tuple[int, int]) -> None:
        first = self.line.head()
        if what in {"enter", "last"} and name not in self.there:
            self.there[name] = entry(name, place, what == "last")
            self.line.enter(self.there[name])
        elif what == "leave" and name in self.there:
            self.leave(self.there[name])
        elif what == "head" and first is not None:
            self.leave(first)
        elif what.startswith("aside") and first is not None:
            self.aside[first.request_id] = self.line.set_head_aside()
            if what == "aside" or not first.announced.last_attempt:
                self.line.let_next_last(first)
        elif what == "back" and name in self.aside:
            self.line.bring_back(self.aside.pop(name))

    def leave(self, one: Entry) -> None:
        self.aside.pop(one.request_id, None)
        self.line.leave(self.there.pop(one.request_id))
        self.line.let_next_last(one)

    def check(self) -> None:
        looked_at = self.line.first(FRONT_REQUESTS)
        assert looked_at == sorted(looked_at, key=order)
        assert not any(one.request_id in self.aside for one in looked_at)
        in_turn = [one for one in self.there.values() if one.request_id not in self.aside]
        others = sorted([one for one in in_turn if not one.announced.last_attempt], key=order)
        found = [one for one in looked_at if not one.announced.last_attempt]
        assert found == others[: len(found)]
        assert len(self.line) == len(self.there)


@settings(max_examples=examples(300), deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["enter", "enter", "last", "last", "leave", "head", "aside", "aside for last", "back"]),
            st.sampled_from(NAMES),
            PLACES,
        ),
        max_size=200,
    )
)
def test_of_those_on_their_last_attempt_none_is_forgotten_whoever_comes_and_goes(
    steps: list[tuple[str, str, tuple[int, int]]],
) -> None:
    driven = Driven()
    for what, name, place in steps:
        driven.step(what, name, place)
        driven.check()
    for name in list(driven.aside):
        driven.line.bring_back(driven.aside.pop(name))
    while (first := driven.line.head()) is not None:
        driven.leave(first)
    assert not driven.there


@pytest.mark.parametrize("step", [1, -1])
def test_names_that_left_do_not_pile_up(step: int) -> None:
    line = Line("m")
    stays = [entry(f"stays{number}", (0, number)) for number in range(FRONT_REQUESTS)]
    for one in stays:
        line.enter(one)
    line.head()
    for number in range(5000):
        passing = entry(f"p{number}", (0, 10_000 + step * number))
        line.enter(passing)
        line.leave(passing)
    assert len(line._rising) + len(line._heap) <= 2 * len(line) + STALE_ALLOWANCE + 1
    line.leave(stays.pop())
    assert [line.head(), *line.behind()] == stays


def test_one_that_comes_back_to_its_place_stands_there_once() -> None:
    line = Line("m")
    entries = [entry(f"r{number}", (0, number)) for number in range(2 * FRONT_REQUESTS)]
    for one in entries:
        line.enter(one)
    line.leave(entries[-1])
    line.enter(entries[-1])
    for one in entries[:-2]:
        line.leave(one)
    assert line.head() is entries[-2]
    assert line.behind() == entries[-1:]


def test_one_aside_does_not_stand_in_line_for_a_place_it_left_before() -> None:
    line = Line("m")
    entries = [entry(f"r{number}", (0, number)) for number in range(FRONT_REQUESTS)]
    for one in entries:
        line.enter(one)
    line.leave(entries[-1])
    line.enter(entries[-1])
    for one in entries:
        assert line.head() is one
        line.set_head_aside()
    assert line.head() is None
    for one in entries[::2] + entries[1::2]:
        line.bring_back(one)
    assert [line.head(), *line.behind()] == entries


@pytest.mark.parametrize("kept", [1, FRONT_REQUESTS - 2, 2 * FRONT_REQUESTS])
def test_one_aside_stands_in_line_once_after_many_have_left(kept: int) -> None:
    line = Line("m")
    entries = [entry(f"r{number}", (0, number)) for number in range(10 * STALE_ALLOWANCE)]
    for one in entries:
        line.enter(one)
    assert line.head() is entries[0]
    line.set_head_aside()
    assert line.head() is entries[1]
    stays = [entries[0], *entries[1 : kept + 1]]
    for one in entries[kept + 1 :]:
        line.leave(one)
    line.bring_back(entries[0])
    for first in range(len(stays)):
        assert [line.head(), *line.behind()] == stays[first : first + FRONT_REQUESTS]
        line.leave(stays[first])
    assert line.head() is None
