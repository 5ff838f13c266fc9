"""The live audit of the scheduler: what it names, and that a look is bounded."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.scheduler.core import audit
from services.scheduler.core import messages as m
from services.scheduler.core.entry import Entry
from services.scheduler.core.lifecycle import State
from services.scheduler.core.machine import Machine
from services.scheduler.core.sharing.share import Share
from tests.support.scheduling import Rig, shape

HELD, WAITING = "batch-1", "batch-2"


def rig() -> Rig:
    """Return a scheduler that has granted one request to `w`, with a second one waiting."""
    made = Rig({"batch": Share()})
    made.open("w", shape(10))
    made.announce("batch", 8, 8)
    assert [grant.request_id for grant in made.grants] == [HELD]
    made.tell(m.Tick())
    assert made.machine.counters.audit_violations == 0
    return made


def entry(machine: Machine, name: str) -> Entry:
    found = machine.backlog.get(name)
    assert found is not None
    return found


DAMAGE: list[tuple[Callable[[Machine], object], str, str]] = [
    (lambda k: setattr(next(iter(k.fleet)).ledger, "free_blocks", 3), "w", "free 3 + held 8 != capacity 10"),
    (lambda k: setattr(next(iter(k.fleet)).ledger, "sequences", 2), "w", "sequences 2 differ"),
    (lambda k: next(iter(k.fleet)).ledger._sequences_by_channel.update(batch=2), "w", "sequences {'batch': 2} differ"),
    (lambda k: next(iter(k.fleet)).ledger.drop(), "backlog", f"request {HELD} (granted) has no credits in epoch 1"),
    (lambda k: setattr(entry(k, HELD), "epoch", 9), "backlog", f"request {HELD} (granted) has no credits in epoch 9"),
    (lambda k: k.channel("batch").leave(entry(k, WAITING)), "backlog", f"request {WAITING} (waiting) is in no line"),
    (lambda k: setattr(entry(k, WAITING), "epoch", 1), "backlog", f"request {WAITING} (waiting) names epoch 1"),
    (lambda k: setattr(entry(k, HELD), "state", State.ABSENT), "backlog", f"request {HELD} (absent) is in the backlog"),
    (lambda k: k.backlog.waiting.update(batch=2), "backlog", "the backlog counts 2 waiting requests, the channels 1"),
    (lambda k: k.backlog.waiting.update(other=-1), "backlog", "a channel counts less than no request"),
]


@pytest.mark.parametrize(("damage", "whose", "sentence"), DAMAGE, ids=[sentence for *_, sentence in DAMAGE])
def test_damage_is_named_counted_and_reported(damage: Callable[[Machine], object], whose: str, sentence: str) -> None:
    made = rig()
    damage(made.machine)
    found = [effect for effect in made.machine.step(m.Tick(), made.now_ns) if isinstance(effect, m.AuditFailed)]
    texts = [text for effect in found if effect.worker_id == whose for text in effect.violations]
    assert any(text.startswith(sentence) for text in texts), found
    assert made.machine.counters.audit_violations == sum(len(effect.violations) for effect in found)


def test_a_look_is_bounded_and_everything_comes_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "REQUESTS_PER_LOOK", 2)
    made = Rig({"batch": Share()})
    for name in ("a", "b", "c"):
        made.open(name, shape(2))
    made.announce("batch", 1, 1, 1, 1, 1, 1)
    for worker in made.machine.fleet:
        worker.ledger.free_blocks = 9
    looks = [
        [effect.worker_id for effect in made.machine.step(m.Tick(), made.now_ns) if isinstance(effect, m.AuditFailed)]
        for _ in range(6)
    ]
    assert looks == [["c"], ["b"], ["a"]] * 2
