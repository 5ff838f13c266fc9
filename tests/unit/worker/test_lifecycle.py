"""The lifecycle table: where credits are held, and that every state leads home."""

from __future__ import annotations

from services.worker.core.lifecycle import IN_ENGINE, TABLE, Action, Input, State

HOLDING = set(State) - {State.FINISHING, State.GONE}


def test_a_transition_releases_exactly_when_it_leaves_the_states_that_hold_credits() -> None:
    for (before, what), (after, actions) in TABLE.items():
        leaves = before in HOLDING and after not in HOLDING
        assert actions.count(Action.RELEASE) == leaves, (before, what)


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


LEASED = set(State) - {State.GRANTED, State.CLAIMING, State.OFFERED, State.WITHDRAWING, State.GONE}


def test_a_lease_is_completed_where_it_goes_on_and_forgotten_where_it_ends() -> None:
    for (before, what), (after, actions) in TABLE.items():
        ends = after is State.GONE
        assert (Action.FORGET in actions) == (ends and before in LEASED), (before, what)
        assert (Action.CLAIM_MORE in actions) == (ends and before not in LEASED), (before, what)
        assert (Action.COMPLETE in actions) == (after is State.FINISHING), (before, what)
        assert Action.GIVE_BACK not in actions or before in LEASED, (before, what)


def test_credits_are_home_before_anybody_hears_what_became_of_the_lease() -> None:
    order = [Action.DROP_PROMPT, Action.RELEASE, Action.COMPLETE, Action.GIVE_BACK, Action.FORGET, Action.CLAIM_MORE]
    for _, actions in TABLE.values():
        assert len(actions) < 2 or list(actions) == [action for action in order if action in actions]


def test_a_prompt_is_dropped_by_what_ends_its_request_before_it_is_rendered() -> None:
    dropped = {pair for pair, (_, actions) in TABLE.items() if Action.DROP_PROMPT in actions}
    ended_by_rendering = {Input.FIT, Input.END}
    assert dropped == {pair for pair in TABLE if pair[0] is State.TOKENIZING and pair[1] not in ended_by_rendering}


def test_every_action_is_used() -> None:
    assert {action for _, actions in TABLE.values() for action in actions} == set(Action)
