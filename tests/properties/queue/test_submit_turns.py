"""Submits take turns: none is lost, each source keeps its order, and between two turns comes one of each other."""

from __future__ import annotations

from itertools import count, cycle, repeat

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.queue.core.entry import BatchKey
from services.queue.submits.turns import (
    ALONE_AFTER,
    BYTES_LIKE_ONE_MORE,
    SUBMITS_ALONE,
    SUBMITS_AT_MOST,
    SUBMITS_AT_ONCE,
    SUBMITS_WRITE_NS,
    TURN,
    WRITES_KEPT,
    SubmitTurns,
    weight_of,
)
from tests.support.effort import examples

batches = st.sets(st.tuples(st.just("t"), st.sampled_from("bcd")), max_size=2)
puts = st.tuples(st.integers(0, 4), st.integers(1, SUBMITS_AT_ONCE // 2), batches)
B, C = {("t", "b")}, {("t", "c")}
BEHIND = -1
"""Source of what must not overtake; it is no source that takes turns."""

Name = tuple[int, int]


class Watched:
    """Turns, with what the rules say about them."""

    def __init__(self) -> None:
        self.turns: SubmitTurns[Name] = SubmitTurns()
        self.numbers = count()
        self.waiting: dict[Name, int] = {}
        self.of_batch: dict[Name, set[BatchKey]] = {}
        self.behind: dict[Name, BatchKey] = {}
        self.passed: dict[Name, set[int]] = {}
        """Of each item that is the first of its source: who has had a turn since it became that."""
        self.last_source = BEHIND
        self.alone_for = 0

    def put(self, source: int, weight: int, batches: set[BatchKey]) -> None:
        if source != self.last_source:
            self.last_source, self.alone_for = source, 0
        item = (source, next(self.numbers))
        self.turns.put(("t", source), weight, item, batches)
        self.of_batch[item] = batches
        if not any(other[0] == source for other in self.waiting):
            self.passed[item] = set()
        self.waiting[item] = weight

    def put_behind(self, batch: BatchKey) -> None:
        item = (BEHIND, next(self.numbers))
        self.turns.put_behind(batch, item)
        self.behind[item] = batch
        assert self.turns, "also if it waits for nothing"

    def take(self, all_of_it: bool = False) -> None:
        if len({source for source, _ in self.waiting}) > 1:
            self.alone_for = 0
        taken = self.turns.take(all_of_it)
        submits = [item for item in taken if item[0] != BEHIND]
        weights = [self.waiting[item] for item in submits]
        most = SUBMITS_AT_ONCE if self.alone_for < ALONE_AFTER else SUBMITS_ALONE
        assert all_of_it or sum(weights[:-1]) < most, "the last one was not needed"
        assert len(submits) == len(self.waiting) or (sum(weights) >= most and not all_of_it)
        self.alone_for += bool(submits)
        for item in submits:
            self.take_one(item)
        released = taken[len(submits) :]
        free = [item for item, batch in self.behind.items() if not self.held(item, batch)]
        assert released == free, "in order, last, and as soon as may be"
        for item in released:
            del self.behind[item]
        assert bool(self.turns) == bool(self.waiting or self.behind)

    def held(self, behind: Name, batch: BatchKey) -> bool:
        return any(item[1] < behind[1] and batch in self.of_batch[item] for item in self.waiting)

    def take_one(self, item: Name) -> None:
        source = item[0]
        assert item == min(other for other in self.waiting if other[0] == source), "the first of its source"
        del self.waiting[item]
        self.passed.pop(item, None)
        for first, others in self.passed.items():
            assert source not in others, f"{source} had a second turn before {first} had one"
            others.add(source)
        following = [other for other in self.waiting if other[0] == source]
        if following:
            self.passed[min(following)] = set()


@settings(max_examples=examples(300))
@given(st.lists(st.one_of(puts, st.just("take"), st.sampled_from("bcd")), max_size=60))
@example([(0, 32, B), (0, 32, B), (0, 32, B), (1, 1, B), "b", "take", (1, 1, B), "b", "take", "take"])
@example([(0, 80, B), (0, 80, set()), (0, 80, B), (0, 80, C), "c", "b", "d", "take", "take", "take"])
def test_every_item_is_taken_once_and_in_turn(steps: list[tuple[int, int, set[BatchKey]] | str]) -> None:
    watched = Watched()
    for step in steps:
        if isinstance(step, tuple):
            watched.put(*step)
        elif step == "take":
            watched.take()
        else:
            watched.put_behind(("t", step))
    watched.take(all_of_it=True)
    assert not watched.waiting
    assert not watched.behind


@pytest.mark.parametrize(
    ("writes_ns", "taken"),
    [
        ([], SUBMITS_AT_ONCE),
        ([SUBMITS_WRITE_NS // 2], SUBMITS_AT_ONCE),
        ([3 * SUBMITS_WRITE_NS] * WRITES_KEPT, 3 * SUBMITS_AT_ONCE),
        ([1000 * SUBMITS_WRITE_NS] * WRITES_KEPT, SUBMITS_AT_MOST),
        ([0] + [1000 * SUBMITS_WRITE_NS] * (WRITES_KEPT - 1), SUBMITS_AT_ONCE),
        ([0] + [2 * SUBMITS_WRITE_NS] * WRITES_KEPT, 2 * SUBMITS_AT_ONCE),
    ],
    ids=["unknown", "fast", "slow", "very slow", "stood still for a while", "has become slow"],
)
def test_more_are_taken_where_no_write_is_fast(writes_ns: list[int], taken: int) -> None:
    turns: SubmitTurns[int] = SubmitTurns()
    for took_ns in writes_ns:
        turns.wrote(took_ns)
    for number in range(2 * SUBMITS_AT_MOST):
        turns.put(("t", 1), 1, number)
    assert len(turns.take()) == taken


class OneAfterTheOther:
    """Turns of which as many of source 1 as there may be are taken again and again."""

    def __init__(self) -> None:
        self.turns: SubmitTurns[int] = SubmitTurns()

    def taken(self, times: int) -> list[int]:
        """Return how many of source 1 each of so many commits took."""
        found = []
        for _ in range(times):
            for number in range(SUBMITS_AT_MOST):
                self.turns.put(("t", 1), 1, number)
            found.append(len(self.turns.take()))
        return found


def test_more_are_taken_of_one_who_submits_alone() -> None:
    one = OneAfterTheOther()
    assert one.taken(ALONE_AFTER + 2) == [SUBMITS_AT_ONCE] * ALONE_AFTER + [SUBMITS_ALONE] * 2


def test_nobody_is_alone_as_long_as_another_comes_back() -> None:
    one = OneAfterTheOther()
    one.taken(ALONE_AFTER)
    for source in range(2, 5):
        one.turns.put(("t", source), 1, 0)
        assert set(one.taken(ALONE_AFTER)) == {SUBMITS_AT_ONCE}
    assert one.taken(1) == [SUBMITS_ALONE]


def test_nobody_is_alone_while_another_waits() -> None:
    turns: SubmitTurns[int] = SubmitTurns()
    for number in range(2 * ALONE_AFTER * SUBMITS_AT_ONCE):
        turns.put(("t", 1), 1, number)
    for number in range(2 * ALONE_AFTER):
        turns.put(("t", 2), 1, number)
        assert len(turns.take()) == SUBMITS_AT_ONCE


def test_what_takes_nothing_makes_nobody_alone() -> None:
    turns: SubmitTurns[int] = SubmitTurns()
    for _ in range(2 * ALONE_AFTER):
        assert turns.take() == []
    for number in range(SUBMITS_AT_MOST):
        turns.put(("t", 1), 1, number)
    assert len(turns.take()) == SUBMITS_AT_ONCE


def test_a_tenant_with_many_calls_has_one_turn() -> None:
    turns: SubmitTurns[str] = SubmitTurns()
    for call in range(100):
        turns.put(("many", call), TURN, "many", [("many", "b")])
    turns.put(("one", 100), 1, "one")
    turns.put_behind(("many", "b"), "behind")
    assert turns.take()[:3] == ["many", "one", "many"]
    assert turns.take(all_of_it=True)[-2:] == ["many", "behind"]


@settings(max_examples=examples(50))
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20), st.integers(1, TURN))
def test_tenants_that_always_wait_get_as_much_of_the_commits(large: list[int], small: int) -> None:
    turns: SubmitTurns[tuple[str, int]] = SubmitTurns()
    weights = {"large": cycle(large), "small": repeat(small)}
    waiting = {"large": 0, "small": 0}
    got = {"large": 0, "small": 0}
    for call in range(50):
        for name, of_name in weights.items():
            while waiting[name] < 2 * SUBMITS_AT_ONCE:
                weight = next(of_name)
                turns.put((name, call), weight, (name, weight))
                waiting[name] += weight
        for name, weight in turns.take():
            got[name] += weight
            waiting[name] -= weight
        assert abs(got["large"] - got["small"]) <= max(large) + 2 * TURN


def test_large_payloads_weigh_more() -> None:
    assert weight_of(3, 0) == weight_of(3, BYTES_LIKE_ONE_MORE - 1) == 3
    assert weight_of(3, 10 * BYTES_LIKE_ONE_MORE) == 13
