"""The prompts that wait for a tokenizer process: order, what goes ahead, what is forgotten, and what it died of."""

from __future__ import annotations

import pytest

from services.worker.core.prompt_line import AHEAD_CHARACTERS, LEAST_AHEAD, MOST_AHEAD, Culprit, PromptLine


def line_of(*names: str, characters: int = 10) -> PromptLine:
    line = PromptLine()
    for name in names:
        line.add(name, name.upper(), characters)
    return line


def gone(line: PromptLine) -> list[str]:
    return [name for name, _ in line.go_ahead()]


def test_prompts_go_ahead_in_their_order_once() -> None:
    line = line_of("a", "b")
    assert line.go_ahead() == [("a", "A"), ("b", "B")]
    assert line.go_ahead() == []
    assert (line.waits, line.is_ahead, len(line)) == (False, True, 2)
    assert line.answered("a")
    assert line.answered("b")
    assert (line.is_ahead, len(line), line.answered_count) == (False, 0, 2)


def test_only_so_many_go_ahead_and_for_each_answer_another() -> None:
    names = [f"p{number}" for number in range(MOST_AHEAD + 3)]
    line = line_of(*names)
    assert gone(line) == names[:MOST_AHEAD]
    assert gone(line) == []
    line.answered("p0")
    assert gone(line) == [names[MOST_AHEAD]]
    assert line.waits


def test_only_so_many_characters_go_ahead() -> None:
    line = line_of(*"abcde", characters=AHEAD_CHARACTERS // 4)
    assert gone(line) == [*"abcd"]
    line.answered("a")
    assert gone(line) == ["e"]


def test_of_the_longest_one_goes_ahead_beside_the_one_that_is_rendered() -> None:
    line = line_of(*"abc", characters=10 * AHEAD_CHARACTERS)
    assert gone(line) == [*"abc"][:LEAST_AHEAD]
    line.answered("a")
    assert gone(line) == ["c"]


def test_what_waits_is_forgotten_and_what_is_ahead_is_answered_in_vain() -> None:
    line = line_of(*"abc", characters=AHEAD_CHARACTERS)
    assert gone(line) == [*"ab"]
    for name in ("a", "c", "nobody"):
        line.forget(name)
    assert len(line) == 2
    assert not line.answered("a")
    assert line.answered("b")
    assert gone(line) == []


@pytest.mark.parametrize(
    ("begun", "answered", "culprit"),
    [
        pytest.param(1, 0, "a", id="the first"),
        pytest.param(3, 0, "c", id="the third, whose neighbours were done and not sent"),
        pytest.param(3, 1, "c", id="the third, the first answered"),
        pytest.param(9, 0, "d", id="a count that cannot be"),
    ],
)
def test_a_process_died_of_the_last_that_it_began(begun: int, answered: int, culprit: str) -> None:
    line = line_of(*"abcd")
    line.go_ahead()
    for name in "abcd"[:answered]:
        line.answered(name)
    assert line.process_lost(begun) == Culprit(culprit, True)
    line.add("e", "E", 1)
    assert gone(line) == [name for name in "abcde"[answered:] if name != culprit]


def test_what_was_ahead_waits_again_before_what_was_not() -> None:
    line = line_of(*"abcd", characters=AHEAD_CHARACTERS)
    assert gone(line) == [*"ab"]
    assert line.process_lost(1) == Culprit("a", True)
    assert gone(line) == [*"bc"]
    assert line.process_lost(1) == Culprit("b", True)
    assert gone(line) == [*"cd"]


def test_what_has_been_forgotten_does_not_wait_again() -> None:
    line = line_of(*"abcd")
    line.go_ahead()
    for name in "ac":
        line.forget(name)
    assert line.process_lost(1) == Culprit("a", False)
    assert gone(line) == [*"bd"]
    assert line.answered("b")


def test_one_that_had_nothing_to_do_died_of_none() -> None:
    line = line_of("a")
    assert line.process_lost(0) is None
    assert gone(line) == ["a"]


@pytest.mark.parametrize("answered", [0, 1])
def test_one_that_had_begun_none_of_those_ahead_died_of_none(answered: int) -> None:
    """It was killed at rest, and its death not yet known when they were sent."""
    line = line_of(*"abc")
    line.go_ahead()
    for name in "a"[:answered]:
        line.answered(name)
    assert line.process_lost(answered) is None
    assert gone(line) == [*"abc"[answered:]]


def test_of_what_it_was_to_begin_with_dies_only_the_second_in_succession() -> None:
    line = line_of(*"abc")
    line.go_ahead()
    assert line.process_lost(0) is None
    line.go_ahead()
    assert line.process_lost(0) == Culprit("a", True)
    line.go_ahead()
    assert line.process_lost(0) is None
    line.go_ahead()
    line.answered("b")
    assert line.process_lost(1) is None, "that one has worked"
    line.go_ahead()
    assert line.process_lost(0) == Culprit("c", True)


def test_the_successor_begins_to_count_anew() -> None:
    line = line_of(*"abc")
    line.go_ahead()
    line.answered("a")
    line.process_lost(2)
    assert gone(line) == ["c"]
    line.add("d", "D", 1)
    assert gone(line) == ["d"]
    assert line.process_lost(2) == Culprit("d", True)
