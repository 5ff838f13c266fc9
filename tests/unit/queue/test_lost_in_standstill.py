"""Workers and leases over a standstill of the queue, which is nobody's fault but its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.queue.core.effects import StopRun
from services.queue.core.entry import Entry, LeaseRef
from services.queue.core.lifecycle import State
from services.queue.core.messages import Renew, StoodStill, Tick, WorkerClosed, WorkerOpened
from services.queue.core.workers import MOST_UNCOUNTED
from tests.support.queueing import GRACE_NS, LEASE_NS, PATIENCE_NS, Queue, meta, only, working


def running() -> tuple[Queue, str, LeaseRef]:
    queue = working(Queue())
    (name,) = queue.submit(meta())
    lease = queue.claim(1, name)
    assert lease
    return queue, name, lease


def entry_of(queue: Queue, name: str) -> Entry:
    entry = queue.machine.book.find(name)
    assert entry
    return entry


def closes_before(queue: Queue) -> None:
    queue.step(WorkerClosed(1))
    queue.stand_still()


def closes_meanwhile(queue: Queue) -> None:
    queue.now_ns += PATIENCE_NS
    queue.step(WorkerClosed(1), StoodStill(PATIENCE_NS))


def closes_of_it(queue: Queue) -> None:
    queue.stand_still()
    queue.now_ns += PATIENCE_NS - 1
    queue.step(WorkerClosed(1))


closings = pytest.mark.parametrize("close", [closes_before, closes_meanwhile, closes_of_it])


@closings
def test_a_worker_that_gave_the_queue_up_has_a_lease_to_return(close: Callable[[Queue], None]) -> None:
    queue, _, lease = running()
    close(queue)
    queue.tick(LEASE_NS - 1)
    effects = queue.step(WorkerOpened(2, "w", "life-1", (lease,)))
    assert not only(StopRun, effects)
    queue.complete(2, lease)
    assert not queue.machine.book.entries


@closings
def test_one_that_does_not_loses_what_it_ran_and_no_attempt(close: Callable[[Queue], None]) -> None:
    queue, name, lease = running()
    close(queue)
    queue.tick(LEASE_NS)
    assert (entry_of(queue, name).state, entry_of(queue, name).attempts) == (State.READY, 0)
    assert only(StopRun, queue.step(WorkerOpened(2, "w", "life-1", (lease,))))


@closings
def test_nor_does_one_that_is_another_by_then(close: Callable[[Queue], None]) -> None:
    queue, name, _ = running()
    close(queue)
    queue.step(WorkerOpened(2, "w", "life-2", ()))
    assert (entry_of(queue, name).state, entry_of(queue, name).attempts) == (State.READY, 0)


def closes_later(queue: Queue) -> None:
    queue.stand_still()
    queue.now_ns += PATIENCE_NS
    queue.step(WorkerClosed(1))


def closes_after_a_short_one(queue: Queue) -> None:
    queue.stand_still(PATIENCE_NS - 1)
    queue.step(WorkerClosed(1))


def came_back_before(queue: Queue) -> None:
    entry = next(iter(queue.machine.book.entries.values()))
    queue.stand_still()
    queue.step(WorkerClosed(1), WorkerOpened(2, "w", "life-1", (queue.machine.book.lease_of(entry),)), WorkerClosed(2))


@pytest.mark.parametrize("close", [closes_later, closes_after_a_short_one, came_back_before])
def test_whose_stream_ends_of_something_else_has_its_grace(close: Callable[[Queue], None]) -> None:
    queue, name, _ = running()
    close(queue)
    queue.tick(GRACE_NS - 1)
    assert entry_of(queue, name).state is State.LEASED
    queue.tick(1)
    assert (entry_of(queue, name).state, entry_of(queue, name).attempts) == (State.READY, 1)


def test_a_lease_lasts_as_long_while_the_queue_hears_as_it_would_without_a_standstill() -> None:
    """So queues that stand still again and again hold what a worker does not renew no longer than others."""
    queue, name, _ = running()
    for _ in range(LEASE_NS // 10):
        assert entry_of(queue, name).state is State.LEASED
        queue.stand_still(15)
        queue.tick(10)
    assert (entry_of(queue, name).state, entry_of(queue, name).attempts) == (State.READY, 1)


def test_one_that_was_renewed_lasts_no_longer_for_it() -> None:
    queue, name, lease = running()
    queue.now_ns += 100
    queue.step(Renew(1, (lease,)), StoodStill(100))
    queue.tick(LEASE_NS - 1)
    assert entry_of(queue, name).state is State.LEASED
    queue.tick(1)
    assert entry_of(queue, name).state is State.READY


@pytest.mark.parametrize("closed", [False, True])
def test_a_tick_that_was_said_before_takes_nothing(closed: bool) -> None:
    """It waited behind a commit while the queue was stopped; what workers said meanwhile is heard after it."""
    queue, name, _ = running()
    if closed:
        queue.step(WorkerClosed(1))
    said_ns = queue.now_ns + 1
    queue.now_ns += LEASE_NS + 1
    queue.step(Tick(said_ns))
    assert entry_of(queue, name).state is State.LEASED
    queue.step(Tick(queue.now_ns))
    assert entry_of(queue, name).state is State.READY


def test_what_a_queue_stands_still_over_each_time_does_not_go_round_for_ever() -> None:
    queue, name, _ = running()
    for stream in range(1, MOST_UNCOUNTED + 1):
        queue.stand_still()
        queue.step(WorkerClosed(stream))
        queue.tick(LEASE_NS)
        working(queue, stream + 1)
        assert queue.claim(stream + 1, name)
        assert entry_of(queue, name).attempts == 1
    queue.stand_still()
    queue.step(WorkerClosed(MOST_UNCOUNTED + 1))
    queue.tick(LEASE_NS)
    assert entry_of(queue, name).attempts == 1


def test_a_short_standstill_is_no_part_of_a_grace() -> None:
    queue, name, _ = running()
    queue.step(WorkerClosed(1))
    for _ in range(3):
        queue.now_ns += GRACE_NS + 1
        queue.step(StoodStill(GRACE_NS + 1), Tick())
        assert entry_of(queue, name).state is State.LEASED
    queue.tick(GRACE_NS)
    assert entry_of(queue, name).state is State.READY
