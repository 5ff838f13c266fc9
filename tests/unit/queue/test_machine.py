"""Decisions of the machine that a transcript would not show well."""

from services.queue.core import records
from services.queue.core.effects import (
    Announce,
    Cancelled,
    Deleted,
    Deliver,
    Ended,
    EndStream,
    Gone,
    NameTaken,
    Recorded,
    Refused,
    RefusedReason,
    Requeued,
    StaleCompletion,
    StopReason,
    StopRun,
    TokensWatched,
)
from services.queue.core.entry import DEFAULT_TENANT, Failure
from services.queue.core.lifecycle import Outcome, State
from services.queue.core.machine import ENDED_AT_ONCE
from services.queue.core.messages import (
    Cancel,
    Claim,
    Complete,
    Delete,
    EndedRow,
    GiveBack,
    Reject,
    Renew,
    RequeueDead,
    WatchTokens,
    WorkerClosed,
    WorkerOpened,
)
from tests.support.looks import Looked, are_not_counted, looks
from tests.support.queueing import GRACE_NS, LEASE_NS, Queue, dead_letter, meta, only, working


def test_a_key_is_known_within_the_batch_that_first_names_it() -> None:
    queue = Queue()
    first, second, other = queue.submit(
        meta(idempotency_key="k"), meta(idempotency_key="k"), meta(idempotency_key="k", tenant="t")
    )
    assert first == second != other


def test_equal_requests_without_a_key_are_two_requests() -> None:
    queue = Queue()
    assert len(set(queue.submit(meta(), meta()))) == 2


def test_fencing_tokens_grow_over_restarts() -> None:
    queue = working(Queue())
    (name,) = queue.submit(meta())
    first = queue.claim(1, name)
    assert first
    queue.complete(1, first)
    queue.restart()
    working(queue)
    (other,) = queue.submit(meta())
    second = queue.claim(1, other)
    assert second
    assert second.fencing_token > first.fencing_token
    assert other > name


def test_a_stale_completion_changes_nothing_and_is_counted() -> None:
    queue = working(Queue())
    (name,) = queue.submit(meta())
    lost = queue.claim(1, name)
    assert lost
    queue.tick(LEASE_NS)
    current = queue.claim(1, name)
    assert current
    assert current.attempt == 2
    effects = queue.complete(1, lost)
    assert effects == [StaleCompletion(), Recorded(1, lost, False)]
    assert queue.complete(1, current)[-1] == Recorded(1, current, True)
    assert queue.complete(1, current) == [StaleCompletion(), Recorded(1, current, False)]
    assert len(queue.store.scan(records.COMPLETIONS, b"", b"", 10)) == 1


def test_renewed_leases_live_and_others_expire_in_order() -> None:
    queue = working(Queue())
    names = queue.submit(meta(), meta())
    kept, lost = (queue.claim(1, name) for name in names)
    assert kept
    assert lost
    queue.tick(LEASE_NS - 1)
    queue.step(Renew(1, (kept,)))
    effects = queue.tick(1)
    assert only(StopRun, effects) == [StopRun(1, lost, StopReason.LEASE_LOST)]
    assert queue.machine.runs(kept.request_id, 1)
    assert only(StopRun, queue.step(Renew(1, (lost,)))) == [StopRun(1, lost, StopReason.LEASE_LOST)]


def test_a_step_revives_only_so_many_and_names_the_rest() -> None:
    queue = working(Queue())
    names = queue.submit(*[meta() for _ in range(ENDED_AT_ONCE + 2)])
    for name in names:
        for _ in range(3):
            lease = queue.claim(1, name)
            assert lease
            queue.step(Complete(1, lease, None, Failure("oom", "out of memory"), None))
    (first,) = only(Requeued, queue.step(RequeueDead(5, None)))
    assert isinstance(first, Requeued)
    assert (first.requeued, [queue.machine.book.name_of(seq) for seq in first.left]) == (ENDED_AT_ONCE, names[-2:])
    (rest,) = only(Requeued, queue.step(RequeueDead(6, tuple(names[-2:]))))
    assert isinstance(rest, Requeued)
    assert (rest.requeued, rest.left) == (2, ())


def test_attempts_are_bounded_and_the_letter_can_be_revived_with_fresh_ones() -> None:
    queue = working(Queue())
    (name,) = queue.submit(meta(batch="b"))
    for _ in range(3):
        lease = queue.claim(1, name)
        assert lease
        effects = queue.step(Complete(1, lease, None, Failure("oom", "out of memory"), None))
    (ended,) = only(Ended, effects)
    assert isinstance(ended, Ended)
    assert ended.outcome is Outcome.DEAD
    assert queue.claim(1, name) is None
    queue.restart()
    working(queue, 2)
    queue.step(RequeueDead(5, None))
    assert queue.store.scan(records.RESULTS, b"", b"", 10) == []
    assert queue.store.scan(records.COMPLETIONS, b"", b"", 10) == []
    assert queue.store.scan(records.EXPIRY, b"", b"", 10) == []
    for number in (4, 5, 6):
        lease = queue.claim(2, name)
        assert lease
        assert lease.attempt == number, "none is told twice"
        effects = queue.step(Complete(2, lease, None, Failure("oom", "out of memory"), None))
    (ended,) = only(Ended, effects)
    assert isinstance(ended, Ended)
    assert ended.attempts == 3


def test_many_ends_at_once_are_several_steps() -> None:
    """Nobody else waits until all of a large batch are cancelled, or all whose time is over have ended."""
    queue = Queue()
    due = [meta(batch="late", deadline_ns=queue.now_ns + 5) for _ in range(ENDED_AT_ONCE + 1)]
    queue.submit(*due, *[meta(batch="b") for _ in range(ENDED_AT_ONCE + 2)])
    assert [len(only(Ended, queue.tick(5))), len(only(Ended, queue.tick(1)))] == [ENDED_AT_ONCE, 1]
    (first,) = only(Cancelled, queue.step(Cancel(1, None, meta(batch="b").batch_key)))
    assert isinstance(first, Cancelled)
    assert (first.cancelled, len(first.left)) == (ENDED_AT_ONCE, 2)
    names = tuple(queue.machine.book.name_of(seq) for seq in first.left)
    assert only(Cancelled, queue.step(Cancel(2, names))) == [Cancelled(2, 2, 0, ())]


def test_giving_back_does_not_count_as_an_attempt() -> None:
    """But it has its number: what a watcher was told of it is not gone on with by the next."""
    queue = working(Queue())
    (name,) = queue.submit(meta())
    for n in range(10):
        lease = queue.claim(1, name)
        assert lease
        assert lease.attempt == n + 1
        queue.step(GiveBack(1, (lease,)))
        if n % 3 == 0:
            queue.restart()
            working(queue)
    lease = queue.claim(1, name)
    assert lease
    queue.restart()
    assert queue.machine.runs(name, 11)
    queue.step(WorkerOpened(2, "w", "life-1", (lease,)))
    (ended,) = only(Ended, queue.step(Complete(2, lease, Outcome.COMPLETED, None, None)))
    assert isinstance(ended, Ended)
    assert ended.attempts == 1


def test_what_a_worker_that_was_started_again_does_not_hold_counts() -> None:
    queue = working(Queue())
    (name,) = queue.submit(meta())
    assert queue.claim(1, name)
    queue.step(WorkerClosed(1))
    queue.step(WorkerOpened(2, "w", "life-2", ()))
    entry = queue.machine.book.find(name)
    assert entry
    assert entry.attempts == 1


def test_a_returning_worker_keeps_what_it_holds_and_loses_what_it_does_not() -> None:
    queue = working(Queue())
    names = queue.submit(meta(), meta())
    held, dropped = (queue.claim(1, name) for name in names)
    assert held
    assert dropped
    queue.step(WorkerClosed(1))
    queue.tick(GRACE_NS - 1)
    ghost = held.replace(fencing_token=99)
    effects = queue.step(WorkerOpened(2, "w", "life-1", (held, ghost)))
    assert only(StopRun, effects) == [StopRun(2, ghost, StopReason.LEASE_LOST)]
    assert queue.machine.runs(names[0], 1)
    assert not queue.machine.runs(names[1], 1)
    assert queue.complete(2, held)[-1] == Recorded(2, held, True)


def test_a_second_life_of_a_worker_gets_none_of_the_first() -> None:
    queue = working(Queue())
    (name,) = queue.submit(meta())
    lease = queue.claim(1, name)
    assert lease
    queue.step(WorkerClosed(1))
    effects = queue.step(WorkerOpened(2, "w", "life-2", (lease,)))
    assert only(StopRun, effects) == [StopRun(2, lease, StopReason.LEASE_LOST)]
    again = queue.claim(2, name)
    assert again
    assert again.attempt == 2


def test_a_second_instance_of_a_connected_worker_gets_neither_its_name_nor_its_leases() -> None:
    queue = working(Queue())
    (name,) = queue.submit(meta())
    lease = queue.claim(1, name)
    assert lease
    assert queue.step(WorkerOpened(2, "w", "life-2", (lease,))) == [NameTaken(2, "w")]
    assert queue.claim(2, name) is None
    queue.step(WorkerClosed(2))
    assert queue.machine.runs(name, 1)
    assert queue.complete(1, lease)[-1] == Recorded(1, lease, True)


def test_a_worker_that_stays_away_loses_its_leases_after_the_grace() -> None:
    queue = working(Queue())
    (name,) = queue.submit(meta())
    queue.claim(1, name)
    queue.step(WorkerClosed(1))
    queue.tick(GRACE_NS - 1)
    assert queue.machine.runs(name, 1)
    queue.tick(1)
    assert not queue.machine.runs(name, 1)


def test_a_cancelled_run_whose_lease_is_lost_ends_as_cancelled_even_after_a_restart() -> None:
    queue = working(Queue())
    (name,) = queue.submit(meta())
    lease = queue.claim(1, name)
    assert lease
    effects = queue.step(Cancel(9, (name, "unknown")))
    assert effects == [StopRun(1, lease, StopReason.CLIENT), Cancelled(9, 0, 1, ("unknown",))]
    queue.restart()
    working(queue, 2, "other")
    (ended,) = only(Ended, queue.tick(LEASE_NS))
    assert isinstance(ended, Ended)
    assert ended.outcome is Outcome.CANCELLED


def test_a_stopping_run_is_told_again_when_its_worker_returns() -> None:
    queue = working(Queue())
    (name,) = queue.submit(meta())
    lease = queue.claim(1, name)
    assert lease
    queue.step(WorkerClosed(1))
    assert only(StopRun, queue.step(Cancel(9, (name,)))) == []
    effects = queue.step(WorkerOpened(2, "w", "life-1", (lease,)))
    assert only(StopRun, effects) == [StopRun(2, lease, StopReason.CLIENT)]


def test_deadlines_end_what_waits_and_stop_what_runs() -> None:
    queue = working(Queue())
    waiting, running = queue.submit(meta(deadline_ns=50), meta(deadline_ns=50))
    lease = queue.claim(1, running)
    assert lease
    queue.restart()
    queue.step(WorkerOpened(2, "w", "life-1", (lease,)))
    effects = queue.tick(50)
    (ended,) = only(Ended, effects)
    assert isinstance(ended, Ended)
    assert (ended.request_id, ended.outcome) == (waiting, Outcome.EXPIRED)
    assert only(StopRun, effects) == [StopRun(2, lease, StopReason.DEADLINE)]


def test_what_is_late_is_not_run_though_its_turn_to_end_has_not_come() -> None:
    queue = working(Queue())
    names = queue.submit(*[meta(deadline_ns=50) for _ in range(ENDED_AT_ONCE + 1)])
    queue.now_ns = 49
    assert queue.claim(1, names[0])
    queue.tick(1)
    effects = queue.step(Claim(1, names[-1]))
    (ended,) = only(Ended, effects)
    assert isinstance(ended, Ended)
    assert (ended.request_id, ended.outcome) == (names[-1], Outcome.EXPIRED)
    assert only(Refused, effects) == [Refused(1, names[-1], RefusedReason.ENDED)]


def test_those_that_have_ended_take_nobodys_turn_at_a_deadline() -> None:
    queue = Queue()
    early = queue.submit(*[meta(deadline_ns=50) for _ in range(2 * ENDED_AT_ONCE)])
    queue.submit(meta(deadline_ns=50))
    queue.step(Cancel(1, tuple(early)))
    assert len(only(Ended, queue.tick(50))) == 1


@are_not_counted
def test_nor_does_a_step_pay_for_the_deadlines_of_all_that_have_ended() -> None:
    queue = Queue()
    early = queue.submit(*[meta(deadline_ns=Looked(50 + n)) for n in range(5000)])
    queue.step(Cancel(1, tuple(early[1:4000])))
    assert looks(lambda: queue.submit(meta(deadline_ns=Looked(50)))) < 200
    assert looks(lambda: queue.tick(48)) < 200
    assert len(only(Ended, queue.tick(1))) == 2


def test_claims_are_refused_with_the_reason() -> None:
    queue = working(working(Queue()), 2, "other")
    names = queue.submit(*(meta() for _ in range(6)))
    for name in names[:4]:
        assert queue.claim(1, name)
    ended = queue.claim(2, names[4])
    assert ended
    queue.complete(2, ended)
    reasons = {
        RefusedReason.LEASED: Claim(2, names[0]),
        RefusedReason.TOO_MANY: Claim(1, names[5]),
        RefusedReason.ENDED: Claim(2, names[4]),
        RefusedReason.UNKNOWN: Claim(2, "0a1b2c3d-00000000ffff"),
    }
    for reason, claim in reasons.items():
        assert queue.step(claim) == [Refused(claim.stream, claim.request_id, reason)]


def test_a_new_scheduler_replaces_the_old_and_is_told_everything() -> None:
    queue = working(Queue())
    (name,) = queue.submit(meta())
    assert only(Announce, queue.open_backlog(7))
    effects = queue.open_backlog(8)
    assert [e.stream for e in effects if isinstance(e, EndStream)] == [7]
    assert [e.request_id for e in effects if isinstance(e, Announce)] == [name]
    assert [e.stream for e in queue.step(Claim(1, name)) if isinstance(e, Gone)] == [8]


def test_only_the_present_scheduler_rejects_and_only_what_waits() -> None:
    queue = working(Queue())
    waiting, leased = queue.submit(meta(), meta())
    queue.claim(1, leased)
    queue.open_backlog(7)
    failure = Failure("pool_too_small", "needs 9 blocks, the largest worker has 4")
    assert queue.step(Reject(6, waiting, failure)) == []
    assert queue.step(Reject(7, leased, failure)) == []
    (ended,) = only(Ended, queue.step(Reject(7, waiting, failure)))
    assert isinstance(ended, Ended)
    assert ended.outcome is Outcome.REJECTED


def test_deleting_a_result_frees_its_key() -> None:
    queue = working(Queue())
    (name,) = queue.submit(meta(idempotency_key="k", batch="b"))
    lease = queue.claim(1, name)
    assert lease
    queue.complete(1, lease)
    row = EndedRow(1, 1, queue.now_ns, DEFAULT_TENANT, "k", "b")
    assert queue.step(Delete(3, (row,))) == [Deleted(3, 1)]
    left = {family: queue.store.scan(family, b"", b"", 10) for family in records.FAMILIES if family != records.META}
    assert not any(left.values())


def test_a_result_that_two_deletes_of_a_batch_have_found_is_deleted_once() -> None:
    queue = working(Queue())
    (name,) = queue.submit(meta())
    lease = queue.claim(1, name)
    assert lease
    queue.complete(1, lease)
    row = EndedRow(1, 1, queue.now_ns, DEFAULT_TENANT, "", "")
    assert queue.step(Delete(3, (row, row)), Delete(4, (row,))) == [Deleted(3, 1), Deleted(4, 0)]
    assert queue.machine.book.counters.results == 0


def test_deleting_spares_a_letter_that_was_revived_meanwhile() -> None:
    queue = working(Queue())
    (name,) = queue.submit(meta())
    for _ in range(3):
        lease = queue.claim(1, name)
        assert lease
        queue.step(Complete(1, lease, None, None, None))
    queue.step(RequeueDead(1, (name,)))
    assert queue.step(Delete(3, (EndedRow(1, 1, queue.now_ns, DEFAULT_TENANT, "", ""),))) == [Deleted(3, 0)]
    entry = queue.machine.book.find(name)
    assert entry is not None
    assert entry.state is State.READY


def test_workers_hear_of_token_watchers() -> None:
    queue = working(Queue())
    (name,) = queue.submit(meta(batch="b"))
    lease = queue.claim(1, name)
    assert lease
    on, off = TokensWatched(1, name, True), TokensWatched(1, name, False)
    assert queue.step(WatchTokens(True, 1, None, (DEFAULT_TENANT, "b"))) == [on]
    assert queue.step(WatchTokens(True, 2, (1,))) == [on], "a new watcher needs everything from the start"
    assert queue.step(WatchTokens(False, 1, None, (DEFAULT_TENANT, "b"))) == []
    assert queue.step(WatchTokens(True, 2, (1,))) == [on], "told of by the rebuilding as well"
    assert queue.step(WatchTokens(False, 2, (1,))) == [off]


def test_a_delivery_says_whether_tokens_are_watched() -> None:
    queue = working(Queue())
    queue.step(WatchTokens(True, 1, None, (DEFAULT_TENANT, "b")))
    watched, not_watched = queue.submit(meta(batch="b"), meta())
    for name, expected in ((watched, True), (not_watched, False)):
        (delivery,) = only(Deliver, queue.step(Claim(1, name)))
        assert isinstance(delivery, Deliver)
        assert delivery.watched is expected


def test_a_letter_that_is_revived_and_ends_anew_keeps_the_result_that_nobody_read() -> None:
    queue = working(Queue())
    name, read = dead_letter(queue)
    queue.now_ns += 1
    effects = queue.step(RequeueDead(1, None), Cancel(2, (name,)), Delete(3, (read,)))
    assert only(Deleted, effects) == [Deleted(3, 0)]
    ((_, row),) = queue.store.scan(records.RESULTS, b"", b"", 2)
    head, _ = records.decode_result(row)
    assert head.completion_seq > read.completion_seq
    ((key, _),) = queue.store.scan(records.COMPLETIONS, b"", b"", 2)
    assert records.completion_seq_of(key) == head.completion_seq
    ((key, _),) = queue.store.scan(records.EXPIRY, b"", b"", 2)
    assert records.expiry_of(key) == (head.completed_ns, read.seq)
    assert queue.machine.book.counters.results == 1
    now = EndedRow(read.seq, *head)
    assert only(Deleted, queue.step(Delete(4, (now,)))) == [Deleted(4, 1)]
    families = (records.RESULTS, records.COMPLETIONS, records.EXPIRY, records.IDEMPOTENCY)
    assert [queue.store.scan(family, b"", b"", 2) for family in families] == [[]] * 4
