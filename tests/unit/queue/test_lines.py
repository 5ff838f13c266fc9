"""The waiting line: order, window, age, and heaps that do not grow."""

from services.queue.core.lines import HEAP_SLACK, Line


def test_announces_in_order_of_priority_then_seq_within_the_window() -> None:
    line = Line()
    for seq, priority in ((1, 0), (2, -5), (3, 0), (4, 7)):
        line.enter(seq, priority)
    assert list(line.announce()) == []
    line.limit = 2
    assert list(line.announce()) == [2, 1]
    assert list(line.announce()) == []
    assert line.leave(2)
    assert list(line.announce()) == [3]


def test_a_request_that_returns_is_first_again() -> None:
    line = Line()
    line.limit = 1
    for seq in (1, 2, 3):
        line.enter(seq, 0)
    assert list(line.announce()) == [1]
    line.leave(1)
    line.enter(1, 0)
    assert list(line.announce()) == [1]


def test_a_new_scheduler_gets_everything_again_within_its_own_window() -> None:
    line = Line()
    line.limit = 3
    for seq in (1, 2, 3):
        line.enter(seq, 0)
    assert list(line.announce()) == [1, 2, 3]
    line.forget_announcements()
    assert list(line.announce()) == []
    line.limit = 2
    assert list(line.announce()) == [1, 2]
    assert line.leave(1)
    assert not line.leave(3)


def test_oldest_is_the_first_submitted_whatever_its_priority() -> None:
    line = Line()
    assert line.oldest() is None
    line.enter(5, 9)
    line.enter(6, -9)
    assert line.oldest() == 5
    line.leave(5)
    assert line.oldest() == 6


def test_heaps_stay_small_while_requests_come_and_go_behind_one_that_stays() -> None:
    line = Line()
    line.enter(1, 0)
    for seq in range(2, 5000):
        line.enter(seq, 1)
        line.leave(seq)
    assert len(line._by_age) <= 2 * len(line) + HEAP_SLACK + 2
    assert len(line._unannounced) <= 2 * len(line) + HEAP_SLACK + 2
    assert line.oldest() == 1
