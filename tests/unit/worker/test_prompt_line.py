"""The prompts that wait for a tokenizer process: order, what goes ahead, what is forgotten, and what it died of."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.core.prompt_line import (
    AHEAD_CHARACTERS,
    ALIKE_CHARACTERS,
    LEAST_CHARACTERS,
    MOST_AHEAD,
    Culprit,
    PromptLine,
)


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


def test_the_longest_goes_ahead_alone() -> None:
    line = line_of(*"abc", characters=AHEAD_CHARACTERS)
    assert gone(line) == ["a"]
    assert gone(line) == []
    line.answered("a")
    assert gone(line) == ["b"]


def one_after_another(line: PromptLine) -> list[str]:
    """Return the prompts that wait in the order in which they go, each answered before the next."""
    order = []
    while line.waits:
        going = gone(line)
        order += going
        for name in going:
            line.answered(name)
    return order


def test_short_prompts_pass_long_ones() -> None:
    line = line_of("a", "b", characters=AHEAD_CHARACTERS)
    assert gone(line) == ["a"]
    for number in range(40):
        line.add(f"s{number}", "", 1_000)
    line.add("m", "", AHEAD_CHARACTERS // 4)
    line.answered("a")
    assert one_after_another(line) == [*(f"s{number}" for number in range(40)), "m", "b"]


def test_prompts_of_about_one_length_keep_their_order() -> None:
    line = PromptLine()
    for name, characters in {"a": 2 * ALIKE_CHARACTERS - 1, "b": ALIKE_CHARACTERS, "c": 700, "d": 90}.items():
        line.add(name, "", characters)
    assert one_after_another(line) == [*"cdab"]


def test_the_oldest_is_passed_by_no_more_characters_than_it_has() -> None:
    line = line_of("long", characters=10_000)
    for number in range(30):
        line.add(f"s{number}", "", 1_000)
    assert one_after_another(line)[10] == "long"


def test_prompts_of_hardly_a_character_count_as_well_when_they_pass() -> None:
    line = line_of("long", characters=40 * LEAST_CHARACTERS)
    for number in range(60):
        line.add(f"s{number}", "", 1)
    assert one_after_another(line)[40] == "long"


def test_a_flood_of_short_prompts_leaves_long_ones_half() -> None:
    """Each of the long ones has its turn, though a short one always waits."""
    line, shorts = PromptLine(), itertools.count()
    for number in range(5):
        line.add(f"long{number}", "", AHEAD_CHARACTERS)
    sent = dict.fromkeys("sl", 0)
    for _ in range(10):
        for _ in range(MOST_AHEAD):
            line.add(f"s{next(shorts)}", "", 1_024)
        for name in gone(line):
            sent[name[0]] += AHEAD_CHARACTERS if name[0] == "l" else 1_024
            line.answered(name)
    assert sent["l"] == 5 * AHEAD_CHARACTERS


@given(st.lists(st.sampled_from((1, 5_000, AHEAD_CHARACTERS, 2 * AHEAD_CHARACTERS, 300_000, None)), max_size=100))
def test_no_prompt_waits_for_more_than_twice_what_came_before_it(happens: list[int | None]) -> None:
    """Numbers are prompts that come, with so many characters; None is an answer. What is ahead has been waited for."""
    line = PromptLine()
    lengths: list[int] = []
    before: dict[str, int] = {}
    sent, ahead = 0, list[str]()

    def send() -> None:
        nonlocal sent
        for name, _ in line.go_ahead():
            assert sent <= 2 * before[name] + lengths[int(name)]
            sent += lengths[int(name)]
            ahead.append(name)

    for characters in happens:
        if characters is None:
            if ahead:
                line.answered(ahead.pop(0))
        else:
            name = str(len(lengths))
            before[name] = sum(lengths)
            lengths.append(characters)
            line.add(name, "", characters)
        send()
    while ahead:
        line.answered(ahead.pop(0))
        send()
    assert sent == sum(lengths)
    assert len(line) == 0


def test_what_waits_is_forgotten_and_what_is_ahead_is_answered_in_vain() -> None:
    line = line_of(*"abc", characters=AHEAD_CHARACTERS // 2)
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
    line = line_of(*"abcd", characters=AHEAD_CHARACTERS // 2)
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
