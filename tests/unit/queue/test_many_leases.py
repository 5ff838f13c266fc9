"""Leases of a whole fleet that end in one moment: no step requeues them all."""

from services.queue.core.effects import Recorded, StopRun, WentBack
from services.queue.core.entry import LeaseRef
from services.queue.core.machine import ENDED_AT_ONCE
from services.queue.core.messages import Renew, WorkerClosed, WorkerOpened
from tests.support.queueing import GRACE_NS, LEASE_NS, RULES, Queue, meta, only, working


def a_fleet(leases: int) -> tuple[Queue, list[LeaseRef]]:
    """Return a queue with two workers, each with half of `leases`, the first one's claimed first."""
    queue = working(working(Queue(RULES._replace(max_inflight=leases))), 2, "other")
    claimed = [
        queue.claim(1 + place // (leases // 2), name) for place, name in enumerate(queue.submit(*[meta()] * leases))
    ]
    return queue, [lease for lease in claimed if lease]


def test_many_leases_that_end_at_once_are_requeued_in_several_steps_and_a_renewal_between_is_in_time() -> None:
    queue, leases = a_fleet(2 * ENDED_AT_ONCE)
    assert len(only(StopRun, queue.tick(LEASE_NS))) == ENDED_AT_ONCE
    queue.step(Renew(2, (leases[-1],)))
    assert len(only(StopRun, queue.tick(1))) == ENDED_AT_ONCE - 1
    assert queue.tick(1) == []
    assert queue.complete(2, leases[-1])[-1] == Recorded(2, leases[-1], True)


def test_the_leases_of_many_lost_workers_are_requeued_in_several_steps_and_one_that_returns_between_keeps_its_own() -> (
    None
):
    queue, leases = a_fleet(2 * ENDED_AT_ONCE + 2)
    queue.step(WorkerClosed(1), WorkerClosed(2))
    assert len(only(WentBack, queue.tick(GRACE_NS))) == ENDED_AT_ONCE
    assert len(only(WentBack, queue.tick(1))) == ENDED_AT_ONCE
    own = tuple(leases[ENDED_AT_ONCE + 1 :])
    queue.step(WorkerOpened(3, "other", "life-1", own))
    assert len(only(WentBack, queue.tick(1))) == 0
    effects = queue.step(Renew(3, own))
    assert [queue.machine.book.leased(lease) is not None for lease in own] == [False] * (len(own) - 2) + [True] * 2
    assert len(only(StopRun, effects)) == len(own) - 2
