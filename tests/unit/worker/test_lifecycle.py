"""The lifecycle table: where credits are held, and that every state leads home."""

from __future__ import annotations

from services.worker.core.lifecycle import IN_ENGINE, TABLE, Action, Input, State

RELEASES = {Action.RELEASE, Action.RELEASE_AND_COMPLETE, Action.RELEASE_AND_GIVE_BACK}
HOLDING = set(State) - {State.FINISHING, State.GONE}


def test_a_transition_releases_exactly_when_it_leaves_the_states_that_hold_credits() -> None:
    for (before, what), (after, action) in TABLE.items():
        leaves = before in HOLDING and after not in HOLDING
        assert (action in RELEASES) == leaves, (before, what)


def test_nothing_comes_back_from_home() -> None:
    for (before, what), (after, _) in TABLE.items():
        assert before is not State.GONE
        assert before in HOLDING or after not in HOLDING, (before, what)


def test_every_state_can_reach_its_end() -> None:
    ended = {State.GONE}
    while True:
        grown = ended | {before for (before, _), (after, _) in TABLE.items() if after in ended}
        if grown == ended:
            break
        ended = grown
    assert ended == set(State)


def test_blocks_leave_the_engine_by_its_own_word_alone() -> None:
    for (before, what), (after, _) in TABLE.items():
        if before in IN_ENGINE and after not in IN_ENGINE:
            assert what in {Input.END, Input.ABORTED}


def test_a_completion_is_sent_only_for_a_lease() -> None:
    unleased = {State.GRANTED, State.CLAIMING}
    for (before, what), (_, action) in TABLE.items():
        if action in {Action.RELEASE_AND_COMPLETE, Action.RELEASE_AND_GIVE_BACK, Action.TOKENIZE}:
            assert before not in unleased or what is Input.DELIVER
