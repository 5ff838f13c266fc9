"""Which announcements say that the next attempt is the last."""

from __future__ import annotations

import pytest

from services.queue.core.effects import Announce, Effect
from services.queue.core.entry import Failure
from services.queue.core.messages import Complete, GiveBack, RequeueDead, WorkerClosed
from tests.support.queueing import RULES, Queue, meta, only, working


def said(effects: list[Effect]) -> bool:
    (announce,) = only(Announce, effects)
    assert isinstance(announce, Announce)
    return announce.last_attempt


def failed(queue: Queue, name: str, code: str = "engine_dead") -> list[Effect]:
    lease = queue.claim(1, name)
    assert lease is not None
    return queue.step(Complete(1, lease, None, Failure(code, "gone"), None))


def begun(max_attempts: int) -> tuple[Queue, str]:
    """Return a queue with a worker and a scheduler, and a request that has been announced as no last attempt."""
    queue = working(Queue(RULES._replace(max_attempts=max_attempts)))
    queue.open_backlog(7)
    (name,) = queue.submit(meta())
    queue.restart()
    working(queue)
    assert not said(queue.open_backlog(7))
    return queue, name


@pytest.mark.parametrize("max_attempts", [2, 3, 5])
def test_the_last_one_is_said_to_be_that_once_all_others_were_lost(max_attempts: int) -> None:
    queue, name = begun(max_attempts)
    told = [said(failed(queue, name)) for _ in range(max_attempts - 1)]
    assert told == [*[False] * (max_attempts - 2), True]


def test_those_that_do_not_count_bring_it_no_nearer() -> None:
    queue, name = begun(3)
    for _ in range(4):
        lease = queue.claim(1, name)
        assert lease is not None
        assert not said(queue.step(GiveBack(1, (lease,))))
    assert not said(failed(queue, name))
    assert said(failed(queue, name))


def test_a_scheduler_that_comes_later_hears_it_too() -> None:
    queue, name = begun(2)
    failed(queue, name)
    assert said(queue.open_backlog(8))


def test_what_no_engine_died_of_may_share_a_worker() -> None:
    """Workers are lost for reasons of their own, and each request that fails alone has failed alone."""
    queue, name = begun(3)
    assert not said(failed(queue, name, "engine_error"))
    assert not said(failed(queue, name, "engine_error"))
    queue, name = begun(2)
    queue.claim(1, name)
    queue.step(WorkerClosed(1))
    assert not said(queue.tick(RULES.worker_grace_ns + 1))


def test_a_queue_that_starts_again_knows_of_no_engine_that_died() -> None:
    queue, name = begun(2)
    failed(queue, name)
    queue.restart()
    assert not said(queue.open_backlog(9))


def test_a_dead_letter_that_is_requeued_has_all_its_attempts_again() -> None:
    queue, name = begun(2)
    failed(queue, name)
    assert not only(Announce, failed(queue, name))
    assert not said(queue.step(RequeueDead(1, (name,))))


def test_where_there_is_one_attempt_none_is_said_to_be_the_last() -> None:
    queue, name = begun(1)
    lease = queue.claim(1, name)
    assert lease is not None
    assert not said(queue.step(GiveBack(1, (lease,))))
