"""The lifecycle table, shown by a machine that is driven: every line is taken, and every other pair is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from penstock.request.v1 import request_pb2
from services.queue.core import records
from services.queue.core.effects import Effect, StopReason, StopRun
from services.queue.core.entry import Failure, LeaseRef
from services.queue.core.lifecycle import TABLE, Action, Input, Outcome, State
from services.queue.core.messages import (
    Cancel,
    Claim,
    Complete,
    Delete,
    EndedRow,
    GiveBack,
    Message,
    NewRequest,
    Reject,
    RequeueDead,
    Submit,
    WorkerClosed,
    WorkerOpened,
)
from tests.support.queueing import GRACE_NS, LEASE_NS, PAYLOAD, RULES, Queue, meta, only, working

BACKLOG, WORKER = 1000, 1
DEADLINE_NS = 5
"""From the submit: before any lease runs out."""

EXPECTED = {
    State.ABSENT: {Input.SUBMIT: State.READY},
    State.READY: {
        Input.CLAIM: State.LEASED,
        Input.CANCEL: State.DONE,
        Input.DEADLINE: State.DONE,
        Input.REJECT: State.DONE,
    },
    State.LEASED: {
        Input.COMPLETE: State.DONE,
        Input.FAIL: State.READY,
        Input.LEASE_EXPIRED: State.READY,
        Input.WORKER_LOST: State.READY,
        Input.EXHAUST: State.DEAD,
        Input.GIVE_BACK: State.READY,
        Input.CANCEL: State.STOPPING,
        Input.DEADLINE: State.STOPPING,
    },
    State.STOPPING: {
        Input.COMPLETE: State.DONE,
        Input.FAIL: State.DONE,
        Input.LEASE_EXPIRED: State.DONE,
        Input.WORKER_LOST: State.DONE,
        Input.EXHAUST: State.DONE,
        Input.GIVE_BACK: State.DONE,
        Input.CANCEL: State.STOPPING,
        Input.DEADLINE: State.STOPPING,
    },
    State.DONE: {},
    State.DEAD: {Input.REQUEUE: State.READY, Input.DELETE: State.ABSENT},
}
"""Where an input leads; one that is not named is refused."""


class Driven:
    """One request of a queue that has a worker and a scheduler, and the lines of the table that it takes."""

    def __init__(self, state: State, event: Input) -> None:
        """Bring the request to `state`, such that `event` can be told."""
        attempts = 1 if event is Input.EXHAUST or state is State.DEAD else RULES.max_attempts
        self.queue = working(Queue(RULES._replace(max_attempts=attempts)), WORKER)
        self.queue.open_backlog(BACKLOG)
        self.meta = meta(idempotency_key="k", deadline_ns=DEADLINE_NS if event is Input.DEADLINE else 0)
        self.name = "0a1b2c3d-000000000001"
        self.taken: list[tuple[State, Input]] = []
        self.lease = LeaseRef(self.name, 1, 1)
        if state is not State.ABSENT:
            self.queue.submit(self.meta)
        if state not in {State.ABSENT, State.READY}:
            self.tell(Input.CLAIM)
        if state is State.STOPPING:
            self.tell(Input.CANCEL)
        if state in {State.DONE, State.DEAD}:
            self.tell(Input.COMPLETE if state is State.DONE else Input.FAIL)
        assert self.state is state
        self.note_lines()

    def note_lines(self) -> None:
        """Note each line that is taken from now on, as its action is done."""
        actions = self.queue.machine.book._actions

        def noted(do: Callable[..., None]) -> Callable[..., None]:
            def note(entry: object, change: object) -> None:
                self.taken.append((entry.state, change.event))  # type: ignore[attr-defined]
                do(entry, change)

            return note

        actions.update({action: noted(do) for action, do in actions.items()})

    @property
    def state(self) -> State:
        """Where the request is; one that is done is in the store alone."""
        entry = self.queue.machine.book.find(self.name)
        if entry is not None:
            return entry.state
        return State.DONE if self.rows() else State.ABSENT

    def rows(self) -> tuple[EndedRow, ...]:
        """Return the row of its result, as who deletes it finds it in the store."""
        rows = self.queue.store.scan(records.RESULTS, b"", b"", 2)
        return tuple(EndedRow(records.seq_of(key), *records.decode_result(row)[0]) for key, row in rows)

    def tell(self, event: Input) -> list[Effect]:
        """Have it happen by what a client, a worker, a scheduler or the clock tells the machine."""
        queue, failure = self.queue, Failure("code", "message")
        match event:
            case Input.LEASE_EXPIRED:
                return queue.tick(LEASE_NS)
            case Input.WORKER_LOST:
                queue.step(WorkerClosed(WORKER))
                return queue.tick(GRACE_NS)
            case Input.DEADLINE:
                return queue.tick(DEADLINE_NS)
        # Of one that lives, as read before its dead letter was revived.
        stale = (EndedRow(1, 1, queue.now_ns, self.meta.tenant, "k", ""),)
        lives = self.queue.machine.book.find(self.name) is not None
        messages: dict[Input, Message] = {
            Input.SUBMIT: Submit(0, (NewRequest(self.meta, PAYLOAD, None if self.state is State.ABSENT else 1),)),
            Input.CLAIM: Claim(WORKER, self.name),
            Input.COMPLETE: Complete(WORKER, self.lease, Outcome.COMPLETED, None, None),
            Input.FAIL: Complete(WORKER, self.lease, None, failure, None),
            Input.EXHAUST: Complete(WORKER, self.lease, None, failure, None),
            Input.GIVE_BACK: GiveBack(WORKER, (self.lease,)),
            Input.CANCEL: Cancel(0, (self.name,)),
            Input.REJECT: Reject(BACKLOG, self.name, failure),
            Input.REQUEUE: RequeueDead(0, (self.name,)),
            Input.DELETE: Delete(0, self.rows() or (stale if lives else ())),
        }
        return queue.step(messages[event]) if event in messages else []


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Input)))
def test_every_line_is_taken_and_every_other_pair_refused(state: State, event: Input) -> None:
    driven = Driven(state, event)
    driven.tell(event)
    pair = (state, event)
    expected = EXPECTED[state].get(event)
    assert driven.taken == ([pair] if pair in TABLE else [])
    assert (pair in TABLE) is (expected is not None)
    if expected is not None:
        assert (driven.state, TABLE[pair][0]) == (expected, expected)
    elif pair != (State.DONE, Input.DELETE):
        assert driven.state is state


def test_a_result_is_deleted_as_a_row_which_is_all_that_is_left_of_its_request() -> None:
    driven = Driven(State.DONE, Input.DELETE)
    driven.tell(Input.DELETE)
    assert (driven.state, driven.taken) == (State.ABSENT, [])


@pytest.mark.parametrize("event", [Input.CANCEL, Input.DEADLINE])
def test_whoever_stops_one_that_runs_its_worker_is_told_once(event: Input) -> None:
    driven = Driven(State.LEASED, event)
    reason = StopReason.CLIENT if event is Input.CANCEL else StopReason.DEADLINE
    assert only(StopRun, driven.tell(event)) == [StopRun(WORKER, driven.lease, reason)]
    assert only(StopRun, driven.tell(Input.CANCEL)) == []


def test_a_worker_that_is_away_is_told_to_stop_when_it_is_back() -> None:
    driven = Driven(State.LEASED, Input.CANCEL)
    driven.queue.step(WorkerClosed(WORKER))
    assert only(StopRun, driven.tell(Input.CANCEL)) == []
    back = driven.queue.step(WorkerOpened(2, "w", "life-1", (driven.lease,)))
    assert only(StopRun, back) == [StopRun(2, driven.lease, StopReason.CLIENT)]


def test_a_state_is_entered_by_one_kind_of_action_only() -> None:
    into_ready = {action for next_state, action in TABLE.values() if next_state is State.READY}
    assert into_ready == {Action.STORE, Action.REQUEUE, Action.RETURN, Action.REVIVE}
    assert {action for next_state, action in TABLE.values() if next_state is State.DEAD} == {Action.BURY}


def test_every_action_is_used() -> None:
    assert {action for _, action in TABLE.values()} == set(Action)


def test_outcome_numbers_are_those_of_the_wire() -> None:
    wire = {name.removeprefix("OUTCOME_"): number for name, number in request_pb2.Outcome.items()}
    assert {outcome.name: int(outcome) for outcome in Outcome} == {k: v for k, v in wire.items() if v}
