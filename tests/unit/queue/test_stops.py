"""Attempts that run while the queue is stopped in order: nobody can hand them back meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.queue.v1 import queue_pb2
from services.queue.core import records
from services.queue.core.effects import Write
from services.queue.core.entry import LeaseRef, Stop
from services.queue.core.messages import WorkerClosed, WorkerOpened
from services.queue.core.workers import MOST_UNCOUNTED
from services.queue.storage.verify import Verifier
from services.telemetry import Telemetry
from tests.support.memory_store import MemoryStore
from tests.support.queueing import GRACE_NS, LEASE_NS, Queue, meta, working
from tests.support.serving import serving, text


def stopped(queue: Queue) -> None:
    """Stop the queue in order, as its service does, and start it again."""
    token = queue.machine.book.counters.fencing_token
    queue.store.write([Write(records.META, records.STOPPED_KEY, records.encode_stopped(Stop(token)))])
    queue.restart()


def comes_anew(queue: Queue) -> None:
    queue.step(WorkerOpened(2, "w", "life-2", ()))


def stays_away(queue: Queue) -> None:
    queue.tick(LEASE_NS)


def comes_without_and_leaves(queue: Queue) -> None:
    queue.step(WorkerOpened(2, "x", "life-1", ()), WorkerClosed(2))
    queue.tick(max(GRACE_NS, LEASE_NS))


def running() -> tuple[Queue, str, LeaseRef]:
    queue = working(Queue())
    (name,) = queue.submit(meta())
    lease = queue.claim(1, name)
    assert lease
    return queue, name, lease


def attempts(queue: Queue, name: str) -> int:
    entry = queue.machine.book.find(name)
    assert entry
    return entry.attempts


@pytest.mark.parametrize("lose", [comes_anew, stays_away, comes_without_and_leaves])
def test_a_worker_that_is_lost_with_a_stop_of_the_queue_costs_no_attempt(lose: Callable[[Queue], None]) -> None:
    queue, name, _ = running()
    stopped(queue)
    lose(queue)
    assert attempts(queue, name) == 0


@pytest.mark.parametrize("lose", [comes_anew, stays_away])
def test_one_that_is_lost_with_a_crash_of_the_queue_does(lose: Callable[[Queue], None]) -> None:
    queue, name, _ = running()
    queue.restart()
    lose(queue)
    assert attempts(queue, name) == 1


def test_one_that_came_back_after_the_stop_does() -> None:
    queue, name, lease = running()
    stopped(queue)
    queue.step(WorkerOpened(2, "w", "life-1", (lease,)), WorkerClosed(2))
    queue.tick(max(GRACE_NS, LEASE_NS))
    assert attempts(queue, name) == 1


@pytest.mark.parametrize("lose", [comes_anew, stays_away])
def test_it_does_too_where_the_queue_crashed_or_could_not_write_meanwhile(lose: Callable[[Queue], None]) -> None:
    queue, name, lease = running()
    stopped(queue)
    queue.step(WorkerOpened(2, "w", "life-1", (lease,)))
    queue.restart()
    lose(queue)
    assert attempts(queue, name) == 1


def test_one_that_came_back_costs_no_other_an_attempt() -> None:
    queue, name, lease = running()
    (other,) = queue.submit(meta())
    queue.step(WorkerOpened(3, "y", "life-1", ()))
    assert queue.claim(3, other)
    stopped(queue)
    queue.step(WorkerOpened(2, "w", "life-1", (lease,)))
    queue.restart()
    stays_away(queue)
    assert (attempts(queue, name), attempts(queue, other)) == (1, 0)


def test_the_next_stop_is_one_in_which_nobody_has_come_back() -> None:
    queue, name, lease = running()
    stopped(queue)
    queue.step(WorkerOpened(2, "w", "life-1", (lease,)))
    stopped(queue)
    stays_away(queue)
    assert attempts(queue, name) == 0


@pytest.mark.parametrize("stop", [Stop(), Stop(7), Stop((1 << 64) - 1, (("w", "life-1"), ("é", "")))])
def test_a_stop_is_read_as_it_was_written(stop: Stop) -> None:
    assert records.decode_stopped(records.encode_stopped(stop)) == stop


@pytest.mark.parametrize("row", [b"", bytes(7), bytes(9), bytes(8) + b"[", bytes(8) + b"7", bytes(8) + b"[1]"])
def test_what_is_no_row_of_a_stop_is_told(row: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json's own among them
        records.decode_stopped(row)


def test_the_next_attempt_counts() -> None:
    queue, name, _ = running()
    stopped(queue)
    comes_anew(queue)
    assert queue.claim(2, name)
    queue.step(WorkerClosed(2))
    queue.tick(max(GRACE_NS, LEASE_NS))
    assert attempts(queue, name) == 1


def test_stops_do_not_go_on_for_ever() -> None:
    queue, name, _ = running()
    for number in range(MOST_UNCOUNTED):
        stopped(queue)
        queue.step(WorkerOpened(1, "w", f"life-{number + 2}", ()))
        assert queue.claim(1, name)
    stopped(queue)
    comes_anew(queue)
    assert attempts(queue, name) == 1


async def test_a_service_that_ends_in_order_says_so_to_the_next() -> None:
    store = MemoryStore()
    for life in range(3):
        async with serving(Telemetry(None), store) as peer:
            if life == 0:
                (name,) = await peer.submit(text())
            work = await peer.work(life=str(life))
            delivery = await work.claim(name)
            assert delivery.lease.attempt == life + 1, "tokens are told by it"
            await work.close()
    async with serving(Telemetry(None), store) as peer:
        await peer.work(life="3")
        got = await peer.stub.Get(queue_pb2.GetRequest(request_id=name))
        assert got.state == queue_pb2.REQUEST_STATE_READY
        assert got.attempts == 0
    assert [found.key for found in Verifier(store).violations()] == [records.SCHEMA_KEY]
