"""Attempts that do not count: only so many."""

from services.queue.core.lifecycle import State
from services.queue.core.messages import GiveBack, WorkerClosed
from services.queue.core.workers import MOST_UNCOUNTED
from tests.support.queueing import Queue, meta, working


def test_a_delivery_that_was_lost_with_its_stream_does_not_count() -> None:
    """The same process comes back without it: it has never run it. A breaker of streams does end."""
    queue = working(Queue())
    (name,) = queue.submit(meta())
    for stream in range(1, MOST_UNCOUNTED + 1):
        assert queue.claim(stream, name)
        queue.step(WorkerClosed(stream))
        working(queue, stream + 1)
        entry = queue.machine.book.find(name)
        assert entry
        assert entry.attempts == 0
    for stream in range(MOST_UNCOUNTED + 1, MOST_UNCOUNTED + 4):
        assert queue.claim(stream, name)
        queue.step(WorkerClosed(stream))
        working(queue, stream + 1)
    assert queue.claim(MOST_UNCOUNTED + 4, name) is None, "a dead letter"


def test_what_every_worker_hands_back_does_end() -> None:
    """What ends each worker that takes it is handed back by all of them."""
    queue = working(Queue())
    (name,) = queue.submit(meta())
    for _ in range(MOST_UNCOUNTED):
        lease = queue.claim(1, name)
        assert lease
        queue.step(GiveBack(1, (lease,)))
        entry = queue.machine.book.find(name)
        assert entry
        assert entry.attempts == 0
    for attempts in (1, 2, 3):
        lease = queue.claim(1, name)
        assert lease
        queue.step(GiveBack(1, (lease,)))
        dead = queue.machine.book.find(name)
        assert dead
        assert dead.attempts == attempts
    assert dead
    assert dead.state is State.DEAD
    assert dead.last_error == "handed back by its worker; 32 attempts had not counted yet"
