"""When a session is to be woken though nothing has come."""

from __future__ import annotations

from services.worker.core import messages as m
from services.worker.core.session import CLAIM_HOLD_NS, Session
from services.worker.core.sizing import Sizes

SIZES = Sizes(capacity_blocks=60, blocks_total=64, block_size=16, max_model_len=512)


def tell(session: Session, *messages: m.Message) -> list[m.Effect]:
    return [effect for message in messages for effect in session.step(message, 1)]


def test_it_wakes_up_to_return_grants_that_it_cannot_claim() -> None:
    """While the queue is away nothing else may happen, and the credits would stay where nobody can use them."""
    session = Session(SIZES)
    tell(session, m.SchedulerReached(), m.SchedulerUp(5, 0), m.Tick())
    assert session.due_ns(1) is None
    tell(session, m.Granted("r1", "batch", 4, True, 1), m.Tick())
    due_ns = session.due_ns(1)
    assert due_ns == 1 + CLAIM_HOLD_NS
    causes = [e.cause for e in session.step(m.Tick(), due_ns) if isinstance(e, m.SendCompletionAck)]
    assert causes == [m.Cause.UNCLAIMED]
