"""The lifecycle table: every pair of state and input is either listed here or refused."""

import itertools

import pytest

from penstock.request.v1 import request_pb2
from services.queue.core.lifecycle import TABLE, Action, Input, Outcome, State, transition

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
    State.DONE: {Input.DELETE: State.ABSENT},
    State.DEAD: {Input.REQUEUE: State.READY, Input.DELETE: State.ABSENT},
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Input)))
def test_every_pair_of_state_and_input(state: State, event: Input) -> None:
    found = transition(state, event)
    assert (found[0] if found else None) is EXPECTED[state].get(event)


def test_a_state_is_entered_by_one_kind_of_action_only() -> None:
    into_ready = {action for next_state, action in TABLE.values() if next_state is State.READY}
    assert into_ready == {Action.STORE, Action.REQUEUE, Action.RETURN, Action.REVIVE}
    assert {action for next_state, action in TABLE.values() if next_state is State.DEAD} == {Action.BURY}


def test_every_action_is_used() -> None:
    assert {action for _, action in TABLE.values()} == set(Action)


def test_outcome_numbers_are_those_of_the_wire() -> None:
    wire = {name.removeprefix("OUTCOME_"): number for name, number in request_pb2.Outcome.items()}
    assert {outcome.name: int(outcome) for outcome in Outcome} == {k: v for k, v in wire.items() if v}
