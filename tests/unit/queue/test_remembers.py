"""What the machine must not forget: deadlines, keys, leases and watchers, over ends, restarts and new streams."""

from __future__ import annotations

from services.queue.core import records
from services.queue.core.effects import (
    Announce,
    Deleted,
    Ended,
    Gone,
    StopReason,
    StopRun,
    TokensWatched,
)
from services.queue.core.entry import DEFAULT_TENANT, Failure, Recovered
from services.queue.core.lifecycle import Outcome
from services.queue.core.machine import Machine
from services.queue.core.messages import (
    Adopt,
    Cancel,
    Claim,
    Complete,
    Delete,
    EndedRow,
    RequeueDead,
    SetWindow,
    WatchTokens,
    WorkerClosed,
    WorkerOpened,
)
from services.queue.storage.recovery import recover
from services.queue.wire import read_result
from tests.support.queueing import LEASE_NS, STORE_ID, Queue, dead_letter, meta, only, working


def test_a_key_whose_result_was_deleted_names_a_new_request() -> None:
    """Memory knows a key within its batch only; beyond it the store says, or a submit were answered with nothing."""
    queue = working(Queue())
    (name,) = queue.submit(meta(idempotency_key="k"))
    lease = queue.claim(1, name)
    assert lease
    queue.complete(1, lease)
    assert queue.step(Delete(3, (EndedRow(1, 1, queue.now_ns, DEFAULT_TENANT, "k", ""),))) == [Deleted(3, 1)]
    (again,) = queue.submit(meta(idempotency_key="k"))
    assert again != name
    assert queue.machine.book.find(again)


def test_a_worker_that_returns_has_its_leases_in_full_length_again() -> None:
    """It counts them from the moment at which its stream opened (`work_opened`)."""
    queue = working(Queue())
    (name,) = queue.submit(meta())
    lease = queue.claim(1, name)
    assert lease
    queue.tick(LEASE_NS - 1)
    queue.step(WorkerClosed(1), WorkerOpened(2, "w", "life-1", (lease,)))
    assert only(StopRun, queue.tick(LEASE_NS - 1)) == []
    assert queue.machine.runs(name, 1)
    assert only(StopRun, queue.tick(1)) == [StopRun(2, lease, StopReason.LEASE_LOST)]


def test_a_worker_that_returns_hears_who_began_to_watch_meanwhile() -> None:
    queue = working(Queue())
    watched, left = queue.submit(meta(), meta())
    leases = [queue.claim(1, name) for name in (watched, left)]
    queue.step(WatchTokens(True, 1, (2,)), WorkerClosed(1))
    assert queue.step(WatchTokens(True, 1, (1,)), WatchTokens(False, 1, (2,))) == [], "nobody to tell"
    effects = queue.step(WorkerOpened(2, "w", "life-1", tuple(lease for lease in leases if lease)))
    assert only(TokensWatched, effects) == [TokensWatched(2, watched, True), TokensWatched(2, left, False)]


def test_the_result_of_a_run_that_was_stopped_names_its_worker() -> None:
    queue = working(Queue())
    ran, waited = queue.submit(meta(), meta())
    queue.now_ns += 5
    lease = queue.claim(1, ran)
    assert lease
    queue.step(Cancel(9, (ran, waited)))
    queue.complete(1, lease, Outcome.CANCELLED)
    found = [read_result(row).result() for _, row in queue.store.scan(records.RESULTS, b"", b"", 3)]
    told = [(result.worker_id, result.timings.delivered_unix_ns) for result in found]
    assert told == [("w", queue.now_ns), ("", 0)]


def test_a_dead_letter_whose_result_is_deleted_is_gone_for_good() -> None:
    queue = working(Queue())
    name, read = dead_letter(queue)
    assert only(Deleted, queue.step(Delete(3, (read,)))) == [Deleted(3, 1)]
    left = {family: queue.store.scan(family, b"", b"", 10) for family in records.FAMILIES if family != records.META}
    assert not any(left.values())
    queue.restart()
    assert queue.machine.book.find(name) is None


def test_what_left_its_line_is_told_with_the_attempt_that_was_announced() -> None:
    queue = working(Queue())
    (name,) = queue.submit(meta())
    queue.open_backlog(7)
    for attempt in (1, 2):
        (gone,) = only(Gone, queue.step(Claim(1, name)))
        assert isinstance(gone, Gone)
        assert gone.attempt == attempt
        queue.tick(LEASE_NS)


def test_a_letter_that_is_revived_has_its_deadline_again() -> None:
    """Also one that passed while it was dead, of which nothing is remembered then."""
    queue = working(Queue())
    names = queue.submit(meta(deadline_ns=50), meta(deadline_ns=90))
    for name in names * queue.rules.max_attempts:
        lease = queue.claim(1, name)
        assert lease
        queue.step(Complete(1, lease, None, Failure("oom", "out of memory"), None))
    assert only(Ended, queue.tick(50)) == [], "a letter has ended already"
    queue.restart()
    queue.step(RequeueDead(1, None))
    for name, after_ns in zip(names, (0, 40), strict=True):
        (ended,) = only(Ended, queue.tick(after_ns))
        assert isinstance(ended, Ended)
        assert (ended.request_id, ended.outcome) == (name, Outcome.EXPIRED)


def test_deadlines_of_what_is_read_while_the_queue_serves_are_kept() -> None:
    """A start on a large store reads it page by page (`loading`)."""
    queue = Queue()
    (name,) = queue.submit(meta(deadline_ns=50))
    found = recover(queue.store)
    queue.machine = Machine(STORE_ID, queue.rules, Recovered(found.counters), queue.now_ns)
    queue.step(Adopt(tuple(found.entries)))
    (ended,) = only(Ended, queue.tick(50))
    assert isinstance(ended, Ended)
    assert (ended.request_id, ended.outcome) == (name, Outcome.EXPIRED)


def test_what_an_attempt_says_that_is_over_is_not_taken_for_the_next() -> None:
    queue = working(Queue())
    (name,) = queue.submit(meta())
    assert queue.claim(1, name)
    queue.tick(LEASE_NS)
    assert not queue.machine.runs(name, 1)
    assert queue.claim(1, name)
    assert not queue.machine.runs(name, 1), "tokens of the attempt before would reach those who watch this one"
    assert queue.machine.runs(name, 2)
    assert not queue.machine.runs(name, 3)


def test_a_scheduler_that_was_replaced_opens_no_window() -> None:
    queue = Queue()
    names = queue.submit(meta(), meta(), meta())
    queue.open_backlog(7, limit=1)
    effects = queue.open_backlog(8, limit=2)
    assert [effect.request_id for effect in effects if isinstance(effect, Announce)] == names[:2]
    assert queue.step(SetWindow(7, "batch", 100)) == []
    assert [
        effect.request_id for effect in queue.step(Cancel(1, (names[0],))) if isinstance(effect, Announce)
    ] == names[2:]
