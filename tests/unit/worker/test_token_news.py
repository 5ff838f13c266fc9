"""When watchers are sent tokens: the first at once, the others in frames some time apart."""

from __future__ import annotations

from services.worker.core import messages as m
from services.worker.core.session import Session
from services.worker.core.sizing import Sizes
from services.worker.core.token_news import TOKEN_WAIT_NS

SIZES = Sizes(capacity_blocks=60, blocks_total=64, block_size=16, max_model_len=512)
LEASE_NS = 10**15


def session_with(*names: str) -> Session:
    """Return a session that runs these requests, each of them watched; their runs are called `NAME.1`."""
    session = Session(SIZES)
    for message in (m.QueueReached(), m.QueueUp(LEASE_NS, 100)):
        session.step(message, 0)
    for name in names:
        session.step(m.Granted(name, "batch", 33, True, 1), 0)
        session.step(m.Delivered(m.Lease(name, 1, 1), 1, 50, True), 0)
        session.step(m.Tokenized(f"{name}.1", 10), 0)
    return session


def sent(session: Session, now_ns: int, *runs: str) -> list[str]:
    """Tell the session of tokens; return the runs whose tokens it sends at the end of the wake-up."""
    for run in runs:
        session.step(m.EngineTokens(run), now_ns)
    return [effect.run_id for effect in session.step(m.Tick(), now_ns) if isinstance(effect, m.SendTokens)]


def test_a_first_token_is_sent_at_once_and_takes_along_what_waits() -> None:
    session = session_with("a", "b")
    assert sent(session, 100, "a.1") == ["a.1"]
    assert sent(session, 101, "a.1") == []
    assert sent(session, 102, "b.1", "a.1") == ["a.1", "b.1"]


def test_later_tokens_wait_for_their_time_and_the_session_wants_to_be_woken_then() -> None:
    session = session_with("a", "b")
    assert sent(session, 100, "a.1", "b.1") == ["a.1", "b.1"]
    assert session.due_ns(100) == LEASE_NS // 3
    assert sent(session, 200, "a.1") == []
    assert session.due_ns(200) == 100 + TOKEN_WAIT_NS
    assert sent(session, 99 + TOKEN_WAIT_NS, "b.1") == []
    assert sent(session, 100 + TOKEN_WAIT_NS) == ["a.1", "b.1"]
    assert sent(session, 101 + TOKEN_WAIT_NS) == []


def test_steps_that_take_longer_than_that_are_sent_as_they_come() -> None:
    session = session_with("a")
    moments_ns = range(0, 10 * TOKEN_WAIT_NS, TOKEN_WAIT_NS)
    assert [sent(session, now_ns, "a.1") for now_ns in moments_ns] == [["a.1"]] * 10


def test_whoever_begins_to_watch_is_sent_what_there_is_at_once() -> None:
    session = session_with("a", "b")
    sent(session, 100, "a.1", "b.1")
    session.step(m.Watched("a", False), 101)
    session.step(m.Watched("a", True), 102)
    assert sent(session, 102) == ["a.1"]
    assert sent(session, 103, "a.1") == ["a.1"], "it had generated nothing until then, perhaps"
    assert sent(session, 104, "a.1") == []


def test_a_run_that_ends_with_its_first_tokens_hurries_nobody_else() -> None:
    session = session_with("a", "b")
    sent(session, 100, "b.1")
    session.step(m.EngineTokens("a.1"), 101)
    session.step(m.EngineFinished("a.1", 1, 0), 101)
    assert sent(session, 101) == []
    assert sent(session, 102, "b.1") == []


def test_whoever_no_longer_watches_is_not_sent_what_waited() -> None:
    session = session_with("a", "b")
    sent(session, 100, "a.1", "b.1")
    assert sent(session, 101, "a.1", "b.1") == []
    session.step(m.Watched("a", False), 102)
    assert sent(session, 100 + TOKEN_WAIT_NS) == ["b.1"]


def test_a_run_that_ends_has_its_last_tokens_sent_before_its_result_and_nothing_later() -> None:
    session = session_with("a")
    sent(session, 100, "a.1")
    assert sent(session, 101, "a.1") == []
    effects = session.step(m.EngineFinished("a.1", 4, 0), 102)
    assert [type(effect) for effect in effects if not isinstance(effect, m.SendCompletionAck)] == [
        m.SendTokens,
        m.SendComplete,
    ]
    assert sent(session, 100 + TOKEN_WAIT_NS) == []


def test_a_run_that_is_forgotten_has_nothing_sent_any_more() -> None:
    session = session_with("a")
    sent(session, 100, "a.1")
    assert sent(session, 101, "a.1") == []
    session.step(m.CancelRun(m.Lease("a", 1, 1), m.CancelCause.LEASE_LOST), 102)
    session.step(m.EngineAborted("a.1", 4, 0), 103)
    assert sent(session, 100 + TOKEN_WAIT_NS) == []


def test_tokens_wait_while_there_is_no_queue_and_all_of_them_are_sent_to_the_next_one() -> None:
    session = session_with("a", "b")
    sent(session, 100, "a.1", "b.1")
    assert sent(session, 101, "a.1") == []
    session.step(m.QueueDown(), 102)
    assert sent(session, 100 + TOKEN_WAIT_NS, "b.1") == []
    session.step(m.QueueUp(LEASE_NS, 100), 101 + TOKEN_WAIT_NS)
    assert sent(session, 101 + TOKEN_WAIT_NS) == ["a.1", "b.1"]
