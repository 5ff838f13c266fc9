"""Pauses between reconnects."""

from __future__ import annotations

from services.rpc.backoff import Backoff


class Clock:
    """A monotonic clock that is set by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_pauses_double_up_to_the_bound_with_jitter() -> None:
    backoff = Backoff(first_s=1.0, most_s=8.0)
    for step_s in (1, 2, 4, 8, 8, 8):
        assert step_s / 2 <= backoff.next_s() <= step_s


def test_a_connection_that_lasted_begins_again() -> None:
    clock = Clock()
    backoff = Backoff(first_s=1.0, most_s=8.0, monotonic_s=clock)
    for _ in range(5):
        backoff.next_s()
    backoff.connected()
    clock.now_s = 9.0
    assert backoff.next_s() <= 1.0


def test_connections_that_do_not_last_slow_down() -> None:
    backoff = Backoff(first_s=1.0, most_s=8.0, monotonic_s=Clock())
    for _ in range(5):
        backoff.connected()
        backoff.next_s()
    assert backoff.next_s() >= 4.0
