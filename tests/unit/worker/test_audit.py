"""The live audit of the worker: what it names, and when it stays silent."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.worker.core import messages as m
from services.worker.core.audit import EXCESS_REPORTS, INTERVAL_NS
from services.worker.core.lifecycle import State
from services.worker.core.session import Session
from services.worker.core.sizing import Sizes

SIZES = Sizes(capacity_blocks=60, blocks_total=64, block_size=16, max_model_len=512)


def session(reserve_output_tokens: int = 0) -> Session:
    """Return a session with `r1` in the engine and the grant of `r2` not claimed."""
    made = Session(SIZES)
    lease = m.Lease("r1", 1, 7)
    for message in (
        m.SchedulerReached(),
        m.SchedulerUp(5, 0),
        m.QueueReached(),
        m.QueueUp(1_000, 1),
        m.Granted("r1", "batch", 8, True, 1, reserve_output_tokens),
        m.Delivered(lease, 1, 32, False),
        m.Tokenized(lease.run_id, 32),
        m.Granted("r2", "batch", 8, True, 1, reserve_output_tokens),
    ):
        made.step(message, INTERVAL_NS)
    assert made.auditor.whole() == ()
    return made


def run_of(made: Session) -> str:
    return next(iter(made._held.by_run))


DAMAGE: list[tuple[Callable[[Session], object], str]] = [
    (lambda s: s._held.by_run.clear(), "reservation of r1 (running) has no lease"),
    (lambda s: s._held.by_request.pop("r1"), "has no reservation"),
    (lambda s: s._held.unclaimed.clear(), "0 grants wait to be claimed, 1 reservations are granted"),
    (lambda s: setattr(s._held, "claiming", 2), "2 claims are counted, 0 reservations are claiming"),
    (lambda s: setattr(s._held, "in_engine", 0), "0 runs are counted in the engine, 1 reservations are"),
    (lambda s: setattr(s._held.by_request["r1"], "held_blocks", 3), "holds 3 blocks, it may need 4"),
    (lambda s: setattr(s._held.by_request["r1"], "held_blocks", 5), "holds 5 blocks, its peak is 4"),
    (lambda s: setattr(s._held.by_request["r2"], "held_blocks", 57), "61 blocks are held, the capacity is 60"),
    (lambda s: setattr(s._held.by_request["r1"], "state", State.GONE), "reservation of r1 (gone) holds credits"),
    (lambda s: setattr(s._held.by_run[run_of(s)], "run_id", "other"), "(running) is kept"),
]


@pytest.mark.parametrize(("damage", "sentence"), DAMAGE, ids=[sentence for _, sentence in DAMAGE])
def test_damage_is_named_counted_and_reported(damage: Callable[[Session], object], sentence: str) -> None:
    made = session()
    damage(made)
    effects = made.step(m.Tick(), 3 * INTERVAL_NS)
    found = [text for effect in effects if isinstance(effect, m.AuditFailed) for text in effect.violations]
    assert any(sentence in text for text in found), found
    assert made.counters.audit_violations == len(found)


def test_reservations_that_follow_their_output_may_outgrow_the_pool_together() -> None:
    made = session(reserve_output_tokens=16)
    made._held.by_request["r2"].held_blocks = 200
    assert made.auditor.whole() == ()


def test_it_looks_once_an_interval() -> None:
    made = session()
    made._held.claiming = 2
    for now_ns in (2 * INTERVAL_NS, 2 * INTERVAL_NS + 1, 3 * INTERVAL_NS - 1):
        made.step(m.Tick(), now_ns)
    assert made.counters.audit_violations == 1


def stats(running: int) -> m.EngineReported:
    return m.EngineReported(10, running, 0, 0, 1_000_000, 0.5)


def test_an_engine_that_keeps_running_what_it_was_not_given_is_noticed() -> None:
    made = session()
    for _ in range(EXCESS_REPORTS - 1):
        made.step(stats(2), INTERVAL_NS)
    assert made.counters.audit_violations == 0
    (found,) = [e for e in made.step(stats(2), INTERVAL_NS) if isinstance(e, m.AuditFailed)]
    assert found.violations == (f"the engine was given 1 sequences and has 2, {EXCESS_REPORTS} steps long",)


def test_stats_older_than_an_abort_are_no_excess() -> None:
    made = session()
    for _ in range(EXCESS_REPORTS - 1):
        made.step(stats(2), INTERVAL_NS)
    made.step(m.CancelRun(m.Lease("r1", 1, 7), m.CancelCause.CLIENT), INTERVAL_NS)
    made.step(m.EngineAborted(run_of(made), 0, 0), INTERVAL_NS)
    for _ in range(EXCESS_REPORTS - 1):
        made.step(stats(1), INTERVAL_NS)
    assert made.counters.audit_violations == 0
