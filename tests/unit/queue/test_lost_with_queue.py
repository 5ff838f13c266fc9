"""Attempts that ran when the queue went down, however it did: nobody can tell what ended those that do not return."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.queue.v1 import queue_pb2
from services.queue.core import records
from services.queue.core.effects import Write
from services.queue.core.entry import LeaseRef
from services.queue.core.messages import WorkerClosed, WorkerOpened
from services.queue.core.workers import MOST_UNCOUNTED
from services.queue.storage.verify import Verifier
from services.telemetry import Telemetry
from tests.support.memory_store import MemoryStore
from tests.support.queueing import GRACE_NS, LEASE_NS, Queue, meta, working
from tests.support.serving import serving, text


def comes_anew(queue: Queue) -> None:
    queue.step(WorkerOpened(2, "w", "life-2", ()))


def stays_away(queue: Queue) -> None:
    queue.tick(LEASE_NS)


def comes_without_and_leaves(queue: Queue) -> None:
    queue.step(WorkerOpened(2, "w", "life-1", ()), WorkerClosed(2))
    queue.tick(max(GRACE_NS, LEASE_NS))


def another_comes(queue: Queue) -> None:
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


@pytest.mark.parametrize("lose", [comes_anew, stays_away, comes_without_and_leaves, another_comes])
def test_a_worker_that_does_not_return_to_the_next_life_of_the_queue_costs_no_attempt(
    lose: Callable[[Queue], None],
) -> None:
    queue, name, _ = running()
    queue.restart()
    lose(queue)
    assert attempts(queue, name) == 0


def leaves(queue: Queue) -> None:
    queue.step(WorkerClosed(2))
    queue.tick(GRACE_NS)


def hangs(queue: Queue) -> None:
    queue.tick(LEASE_NS)


def is_started_anew(queue: Queue) -> None:
    queue.step(WorkerClosed(2), WorkerOpened(3, "w", "life-2", ()))


@pytest.mark.parametrize("lose", [leaves, hangs, is_started_anew])
def test_one_that_returned_with_it_and_is_lost_then_does(lose: Callable[[Queue], None]) -> None:
    queue, name, lease = running()
    queue.restart()
    queue.step(WorkerOpened(2, "w", "life-1", (lease,)))
    lose(queue)
    assert attempts(queue, name) == 1


def test_the_return_of_one_says_nothing_of_another() -> None:
    queue, name, lease = running()
    (other,) = queue.submit(meta())
    queue.step(WorkerOpened(3, "y", "life-1", ()))
    assert queue.claim(3, other)
    queue.restart()
    queue.step(WorkerOpened(2, "w", "life-1", (lease,)), WorkerClosed(2))
    queue.tick(max(GRACE_NS, LEASE_NS))
    assert (attempts(queue, name), attempts(queue, other)) == (1, 0)


def test_nor_does_its_return_to_the_life_before() -> None:
    queue, name, lease = running()
    queue.restart()
    queue.step(WorkerOpened(2, "w", "life-1", (lease,)))
    queue.restart()
    stays_away(queue)
    assert attempts(queue, name) == 0


def test_the_next_attempt_counts() -> None:
    queue, name, _ = running()
    queue.restart()
    comes_anew(queue)
    assert queue.claim(2, name)
    leaves(queue)
    assert attempts(queue, name) == 1


def test_what_takes_the_queue_along_each_time_does_not_go_round_for_ever() -> None:
    queue, name, _ = running()
    for number in range(MOST_UNCOUNTED):
        queue.restart()
        queue.step(WorkerOpened(1, "w", f"life-{number + 2}", ()))
        assert queue.claim(1, name)
    queue.restart()
    comes_anew(queue)
    assert attempts(queue, name) == 1


def test_a_store_that_notes_a_stop_as_earlier_versions_did_is_sound() -> None:
    queue, name, _ = running()
    queue.store.write([Write(records.META, records.STOPPED_KEY, records.seq_key(7))])
    queue.restart()
    comes_anew(queue)
    assert attempts(queue, name) == 0
    assert [found.text for found in Verifier(queue.store, decode_payloads=False).violations()] == []


async def test_a_fleet_that_is_stopped_at_once_loses_no_attempt() -> None:
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
