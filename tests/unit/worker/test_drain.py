"""A worker remembers a drain for as long as it lives, and that it leaves for good; every scheduler hears of both."""

from __future__ import annotations

import pytest

from services.core.drain import Drain
from services.worker.core import messages as m
from services.worker.core.session import Session
from services.worker.core.sizing import Sizes

SIZES = Sizes(capacity_blocks=60, blocks_total=64, block_size=16, max_model_len=512)
UP = (m.SchedulerReached(), m.SchedulerUp(5, 0), m.QueueReached(), m.QueueUp(1_000, 8))
DRAINED, UNDRAINED = Drain(1, True), Drain(2, False)


def tell(session: Session, *messages: m.Message) -> list[m.Effect]:
    return [effect for message in messages for effect in session.step(message, 1)]


def leavings(effects: list[m.Effect]) -> list[m.Effect]:
    return [effect for effect in effects if isinstance(effect, m.SendLeaving)]


def test_every_new_scheduler_is_told_of_the_drain() -> None:
    session = Session(SIZES)
    assert not leavings(tell(session, *UP, m.DrainHeard(DRAINED)))
    for epoch in (6, 7):
        effects = tell(session, m.SchedulerDown(), m.SchedulerReached(), m.SchedulerUp(epoch, 0))
        assert effects == [m.OpenCredits((), DRAINED, leaving=False)]


def test_a_grant_meanwhile_goes_back_and_after_the_undrain_is_claimed() -> None:
    session = Session(SIZES)
    tell(session, *UP, m.DrainHeard(DRAINED))
    effects = tell(session, m.Granted("r1", "batch", 4, True, 1))
    assert [effect.cause for effect in effects if isinstance(effect, m.SendCompletionAck)] == [m.Cause.UNCLAIMED]
    tell(session, m.DrainHeard(UNDRAINED))
    assert m.SendClaim("r1") in tell(session, m.Granted("r1", "batch", 4, True, 1))
    assert m.OpenCredits((m.Holding("r1", "batch", 4, 0),), UNDRAINED) in tell(
        session, m.SchedulerDown(), m.SchedulerReached()
    )


@pytest.mark.parametrize("drained", [False, True])
def test_a_worker_that_is_told_to_stop_says_so_once_on_each_stream(drained: bool) -> None:
    session = Session(SIZES)
    tell(session, *UP, *([m.DrainHeard(DRAINED)] if drained else []))
    assert leavings(tell(session, m.ShutdownAsked("SIGTERM"), m.GraceOver())) == [m.SendLeaving("SIGTERM")]
    asked = DRAINED if drained else Drain()
    assert m.OpenCredits((), asked, leaving=True) in tell(session, m.SchedulerDown(), m.SchedulerReached())


def test_an_undrain_does_not_keep_a_worker_that_is_leaving() -> None:
    session = Session(SIZES)
    tell(session, *UP, m.DrainHeard(DRAINED), m.ShutdownAsked("SIGTERM"), m.DrainHeard(UNDRAINED))
    assert not [e for e in tell(session, m.Granted("r1", "batch", 4, True, 1)) if isinstance(e, m.SendClaim)]


def test_nothing_is_said_before_the_stream_is_open_and_what_began_meanwhile_is_said_then() -> None:
    session = Session(SIZES)
    assert leavings(tell(session, m.SchedulerReached(), m.ShutdownAsked("SIGTERM"))) == []
    assert len(leavings(tell(session, m.SchedulerUp(5, 0)))) == 1


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
