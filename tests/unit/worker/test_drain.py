"""A worker remembers a drain for as long as it lives, and forgets it only when it is told to."""

from __future__ import annotations

import pytest

from services.worker.core import messages as m
from services.worker.core.session import Session
from services.worker.core.sizing import Sizes

SIZES = Sizes(capacity_blocks=60, blocks_total=64, block_size=16, max_model_len=512)
UP = (m.SchedulerReached(), m.SchedulerUp(5, 0), m.QueueReached(), m.QueueUp(1_000, 8))
DRAINING = m.SendDraining("the worker is draining")


def tell(session: Session, *messages: m.Message) -> list[m.Effect]:
    return [effect for message in messages for effect in session.step(message, 1)]


def test_every_new_scheduler_is_told_of_the_drain() -> None:
    session = Session(SIZES)
    tell(session, *UP, m.DrainAsked("asked"))
    for epoch in (6, 7):
        assert DRAINING in tell(session, m.SchedulerDown(), m.SchedulerReached(), m.SchedulerUp(epoch, 0))


def test_a_drain_is_not_answered_for_the_answer_could_arrive_behind_its_undo() -> None:
    session = Session(SIZES)
    tell(session, *UP)
    assert not [e for e in tell(session, m.DrainAsked("asked"), m.UndrainAsked()) if isinstance(e, m.SendDraining)]
    assert m.SendClaim("r1") in tell(session, m.Granted("r1", "batch", 4, True, 1))


def test_a_grant_meanwhile_goes_back_and_after_the_undrain_is_claimed() -> None:
    session = Session(SIZES)
    tell(session, *UP, m.DrainAsked("asked"))
    effects = tell(session, m.Granted("r1", "batch", 4, True, 1))
    assert [effect.cause for effect in effects if isinstance(effect, m.SendCompletionAck)] == [m.Cause.UNCLAIMED]
    tell(session, m.UndrainAsked())
    assert m.SendClaim("r1") in tell(session, m.Granted("r1", "batch", 4, True, 1))
    assert DRAINING not in tell(session, m.SchedulerDown(), m.SchedulerReached(), m.SchedulerUp(6, 0))


def test_a_worker_that_is_ending_says_so_again() -> None:
    session = Session(SIZES)
    tell(session, *UP, m.ShutdownAsked("SIGTERM"))
    assert tell(session, m.UndrainAsked()) == [m.SendDraining("the worker is ending")]
    assert not [e for e in tell(session, m.Granted("r1", "batch", 4, True, 1)) if isinstance(e, m.SendClaim)]


LEASE = m.Lease("r1", 1, 1)


@pytest.mark.parametrize("reached_first", [False, True], ids=["down", "opening"])
def test_what_is_handed_back_while_the_queue_does_not_listen_is_handed_back_when_it_does(reached_first: bool) -> None:
    """The queue takes it for held meanwhile; a worker that went without a word would cost the request an attempt."""
    session = Session(SIZES)
    tell(session, *UP, m.Granted("r1", "batch", 4, True, 1), m.Delivered(LEASE, 1, 10, False), m.QueueDown())
    stop = m.ShutdownAsked("SIGTERM")
    effects = tell(session, m.QueueReached(), stop) if reached_first else tell(session, stop, m.QueueReached())
    assert m.OpenWork((LEASE,)) in effects
    assert not [effect for effect in effects if isinstance(effect, m.SendGiveBack)]
    assert not session.idle, "it must not end yet"
    assert m.SendGiveBack((LEASE,), "not run") in tell(session, m.QueueUp(1_000, 8))
    assert session.idle
    assert m.OpenWork(()) in tell(session, m.QueueDown(), m.QueueReached())
