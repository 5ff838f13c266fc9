"""The waiting line: order, window, age, and no step that pays for what has left."""

import sys
from types import FrameType

import pytest

from services.queue.core import lines
from services.queue.core.lines import MOST_BEYOND, MOST_WINDOWS, Line
from tests.support.looks import Looked, are_not_counted, looks


def test_announces_in_order_of_priority_then_seq_within_the_window() -> None:
    line = Line()
    for seq, priority in ((1, 0), (2, -5), (3, 0), (4, 7)):
        line.enter(seq, priority, "m")
    assert list(line.announce()) == []
    line.set_limit(2)
    assert list(line.announce()) == [2, 1]
    assert list(line.announce()) == []
    assert line.leave(2, "m")
    assert list(line.announce()) == [3]


def test_a_request_that_returns_is_first_again() -> None:
    line = Line()
    line.set_limit(1)
    for seq in (1, 2, 3):
        line.enter(seq, 0, "m")
    assert list(line.announce()) == [1]
    line.leave(1, "m")
    line.enter(1, 0, "m")
    assert list(line.announce()) == [1]


def test_a_new_scheduler_gets_everything_again_within_its_own_window() -> None:
    line = Line()
    line.set_limit(3)
    for seq in (1, 2, 3):
        line.enter(seq, 0, "m")
    assert list(line.announce()) == [1, 2, 3]
    line.forget_announcements()
    assert list(line.announce()) == []
    line.set_limit(2)
    assert list(line.announce()) == [1, 2]
    assert line.leave(1, "m")
    assert not line.leave(3, "m")


@are_not_counted
def test_a_scheduler_that_comes_and_goes_costs_what_was_announced_however_many_wait() -> None:
    line = Line()
    for seq in range(20_000):
        line.enter(Looked(seq), seq % 10, "m")
    for _ in range(3):
        line.set_limit(10)
        assert looks(lambda: list(line.announce())) < 1000
        assert line.announced == 10
        assert looks(line.forget_announcements) < 1000
        assert looks(line.forget_announcements) == 0


def test_oldest_is_the_first_submitted_whatever_its_priority() -> None:
    line = Line()
    assert line.oldest() is None
    line.enter(5, 9, "m")
    line.enter(6, -9, "m")
    assert line.oldest() == 5
    line.leave(5, "m")
    assert line.oldest() == 6


@are_not_counted
def test_no_step_pays_for_all_that_has_left_before() -> None:
    """As after a cancel of a large batch, of which nothing came up while others waited before it."""
    line = Line()
    for seq in range(20_000):
        line.enter(Looked(seq), 0, f"m{seq % 2}")
    line.set_limit(10)
    assert sum(1 for _ in line.announce()) == 20
    for seq in range(100, 15_000):
        assert looks(line.leave, Looked(seq), f"m{seq % 2}") < 200
    for seq in range(100):
        assert looks(line.enter, Looked(20_000 + seq), 0, "m0") < 200
        assert looks(line.oldest) < 200
        assert line.oldest() == seq
        assert looks(line.leave, Looked(seq), f"m{seq % 2}") < 200
        assert looks(lambda: list(line.announce())) < 200
        assert line.announced == 20
    assert line.oldest() == 15_000


def test_what_waits_for_one_model_takes_no_room_of_another() -> None:
    line = Line()
    line.set_limit(2)
    for seq in range(1, 100):
        line.enter(seq, -1, "busy")
    line.enter(100, 0, "idle")
    assert list(line.announce()) == [1, 2, 100]
    assert line.oldest() == 1
    line.leave(100, "idle")
    line.enter(101, 0, "idle")
    assert list(line.announce()) == [101]
    assert (len(line), line.announced) == (100, 3)


def test_models_that_are_gone_are_forgotten() -> None:
    line = Line()
    line.set_limit(2)
    for seq in range(1, 100):
        line.enter(seq, 0, f"made-up-{seq}")
        assert list(line.announce()) == [seq]
        line.leave(seq, f"made-up-{seq}")
    assert not line._parts
    assert not list(line.announce())
    assert not line._due
    assert line.oldest() is None


def test_all_models_together_have_a_bound_and_those_who_wait_longest_come_first() -> None:
    line = Line()
    line.set_limit(2)
    most = 2 * MOST_WINDOWS + MOST_BEYOND
    for seq in range(most):
        line.enter(seq, 0, f"made-up-{seq}")
    assert len(list(line.announce())) == most
    line.enter(most, 0, "b")
    line.enter(most + 1, 0, "a")
    assert list(line.announce()) == []
    line.leave(0, "made-up-0")
    line.set_limit(2)
    assert list(line.announce()) == [most]
    line.leave(1, "made-up-1")
    assert list(line.announce()) == [most + 1]
    line.set_limit(3)
    assert line.announced == most


def test_a_model_that_makes_progress_keeps_its_room_beside_those_that_make_none() -> None:
    line = Line()
    line.set_limit(2)
    most = 2 * MOST_WINDOWS + MOST_BEYOND
    for seq in range(10):
        line.enter(seq, 0, "served")
    for seq in range(10, 10 + most):
        line.enter(seq, 0, f"made-up-{seq}")
    assert len(list(line.announce())) == most
    for seq in range(8):
        assert line.leave(seq, "served")
        assert list(line.announce()) == [seq + 2]


def full_of_made_up_names() -> tuple[Line, int]:
    """Return a line that has announced all it may of models nobody serves, and the next request's number."""
    line = Line()
    line.set_limit(2)
    most = 2 * MOST_WINDOWS + MOST_BEYOND
    for seq in range(2 * most):
        line.enter(seq, 0, f"made-up-{seq // 4}")
    assert len(list(line.announce())) == line.bounded == most
    return line, 2 * most


@pytest.mark.parametrize("model", ["served", "alias", ""])
def test_what_waits_for_a_served_model_is_announced_however_many_wait_for_made_up_ones(model: str) -> None:
    line, seq = full_of_made_up_names()
    line.set_served(("", "alias", "served"))
    for late in range(seq, seq + 3):
        line.enter(late, 0, model)
    assert list(line.announce()) == [seq, seq + 1]
    line.leave(seq, model)
    assert list(line.announce()) == [seq + 2]
    line.leave(seq + 1, model)
    line.leave(seq + 2, model)
    line.enter(seq + 3, 0, model)
    assert list(line.announce()) == [seq + 3]
    assert line.announced == line.bounded + 1


def test_what_waits_is_announced_when_its_model_is_served_however_many_others_are_announced() -> None:
    line, seq = full_of_made_up_names()
    for late in range(seq, seq + 5):
        line.enter(late, 0, "late")
    assert list(line.announce()) == []
    line.set_served(("late",))
    line.set_limit(3)
    assert list(line.announce())[:3] == [seq, seq + 1, seq + 2]
    assert line.bounded == MOST_WINDOWS * 3 + MOST_BEYOND


def test_a_model_that_is_served_no_more_counts_for_the_bound_and_one_that_is_again_does_not() -> None:
    line, seq = full_of_made_up_names()
    most = line.bounded
    line.set_served(("m",))
    for late in range(seq, seq + 4):
        line.enter(late, 0, "m")
    assert list(line.announce()) == [seq, seq + 1]
    line.set_served(())
    line.leave(seq, "m")
    assert list(line.announce()) == []
    assert (line.announced, line.bounded) == (most + 1, most + 1)
    line.leave(0, "made-up-0")
    line.leave(1, "made-up-0")
    assert list(line.announce()) == [seq + 2], "one that makes progress goes first where there is room"
    line.set_served(("m",))
    assert list(line.announce()) == [2, 3], "the room that it took"
    line.leave(seq + 1, "m")
    assert list(line.announce()) == [seq + 3]
    assert (line.announced, line.bounded) == (most + 2, most)


def test_a_wider_window_is_a_served_models_at_once_however_many_others_could_use_it() -> None:
    line, seq = full_of_made_up_names()
    line.set_served(("m",))
    for late in range(seq, seq + 4):
        line.enter(late, 0, "m")
    assert list(line.announce()) == [seq, seq + 1]
    line.set_limit(4)
    assert list(line.announce())[:2] == [seq + 2, seq + 3]


def test_a_window_that_is_told_again_has_no_model_looked_at() -> None:
    line = Line()
    line.set_limit(2)
    for seq in range(10):
        line.enter(seq, 0, f"m{seq}")
    assert len(list(line.announce())) == 10
    for limit in (2, 1):
        line.set_limit(limit)
        assert not line._due
    line.set_limit(2)
    assert len(line._due) == 10


def test_a_new_scheduler_says_anew_what_is_served() -> None:
    line, seq = full_of_made_up_names()
    most = line.bounded
    line.set_served(("m",))
    line.enter(seq, 0, "m")
    assert list(line.announce()) == [seq]
    line.forget_announcements()
    line.set_limit(2)
    assert len(list(line.announce())) == line.bounded == most
    line.enter(seq + 1, 0, "late")
    line.enter(seq + 2, 0, "late")
    assert list(line.announce()) == []
    line.set_served(("m", "late"))
    assert list(line.announce())[:2] == [seq + 1, seq + 2]


def test_a_model_that_is_served_no_more_does_not_stand_before_one_that_is() -> None:
    line, seq = full_of_made_up_names()
    line.enter(seq, 0, "a")
    line.enter(seq + 1, 0, "b")
    line.set_served(("a",))
    line.set_served(("b",))
    assert list(line.announce()) == [seq + 1]


def test_served_models_have_their_turns_before_all_others() -> None:
    line = Line()
    line.set_limit(1)
    line.enter(1, -9, "made-up")
    line.enter(2, 0, "m")
    line.set_served(("m",))
    assert list(line.announce()) == [2, 1]


def test_the_oldest_is_found_without_a_look_at_every_model() -> None:
    line = Line()
    for seq in range(2000):
        line.enter(seq, 0, f"made-up-{seq}")
    calls = []

    def count(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename == lines.__file__:
            calls.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        assert line.oldest() == 0
    finally:
        sys.setprofile(None)
    assert len(calls) < 10
    for seq in range(1999):
        line.leave(seq, f"made-up-{seq}")
        assert line.oldest() == seq + 1


def test_the_oldest_that_is_servable_is_told_apart_from_one_whose_model_nobody_serves() -> None:
    line = Line()
    line.enter(1, 0, "misspelt")
    assert line.oldest_servable() == 1, "without a scheduler nobody knows what is served"
    line.set_served(("", "m", "other"))
    line.set_limit(2)
    assert line.oldest_servable() is None
    for seq, model in ((2, "m"), (3, ""), (4, "m")):
        line.enter(seq, 0, model)
    assert (line.oldest(), line.oldest_servable()) == (1, 2)
    line.leave(2, "m")
    assert line.oldest_servable() == 3
    line.set_served(())
    assert line.oldest_servable() == 1, "without a worker all of them wait in vain"
    line.set_served(("m",))
    line.forget_announcements()
    assert line.oldest_servable() == 1


@are_not_counted
def test_the_oldest_is_known_however_many_models_are_asked_for() -> None:
    line = Line()
    for seq in range(3000):
        line.enter(Looked(seq), 0, f"made-up-{seq}")
    for seq in range(1, 2500):
        line.leave(Looked(seq), f"made-up-{seq}")
    assert looks(line.enter, Looked(3000), 0, "m") < 200
    assert looks(line.leave, Looked(0), "made-up-0") < 200
    assert looks(line.oldest) < 200
    assert line.oldest() == 2500


def test_names_that_are_gone_are_not_kept_while_nothing_is_announced() -> None:
    line = Line()
    for seq in range(1000):
        line.enter(seq, 0, f"made-up-{seq}")
        line.leave(seq, f"made-up-{seq}")
    assert not line._due
    assert not line._moved
    line.set_served(("m",))
    line.enter(1000, 0, "m")
    line.leave(1000, "m")
    assert not line._sure


def test_a_request_that_left_unannounced_and_came_back_is_announced_once() -> None:
    """As one that met an offer as it came, and was handed back."""
    line = Line()
    line.enter(1, 0, "m")
    line.enter(2, 0, "m")
    assert not line.leave(1, "m")
    line.enter(1, 0, "m")
    line.set_limit(9)
    assert list(line.announce()) == [1, 2]
    assert line.announced == 2
    assert line.leave(1, "m")
    assert line.announced == 1
