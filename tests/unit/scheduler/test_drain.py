"""Draining a worker: no grants, what was not claimed comes back, and how long that lasts."""

from __future__ import annotations

from services.scheduler.core import messages as m
from services.scheduler.core.channel import Share
from tests.support.scheduling import Rig, shape


def rig() -> Rig:
    """Return a scheduler with workers `a` (epoch 1) and `b` (epoch 2), each with room for two requests of 5 blocks."""
    made = Rig({"batch": Share()})
    made.open("a", shape(10))
    made.open("b", shape(10))
    return made


def granted(made: Rig) -> list[str]:
    """Return the workers of the grants since the last look."""
    workers = [grant.worker_id for grant in made.grants]
    made.grants.clear()
    return workers


def test_a_drained_worker_gets_nothing_and_gives_back_what_it_has_not_claimed() -> None:
    made = rig()
    (first, *_) = made.announce("batch", 5, 5, 5, 5)
    assert sorted(granted(made)) == ["a", "a", "b", "b"]
    effects = made.tell(m.Gone(first, m.GoneReason.CLAIMED), m.DrainRequested("a"))
    held = list(made.machine.fleet.named("a").ledger)  # type: ignore[union-attr]
    assert m.Drain(1) in effects
    recalled = {effect.request_id for effect in effects if isinstance(effect, m.Recall)}
    assert recalled == set(held) - {first}
    made.announce("batch", 1, 1, 1)
    assert granted(made) == []


def test_an_undrained_worker_gets_grants_again() -> None:
    made = rig()
    made.tell(m.DrainRequested("a"), m.DrainRequested("b"))
    made.announce("batch", 10)
    assert granted(made) == []
    assert m.Undrain(1) in made.tell(m.DrainRequested("a", undo=True))
    assert granted(made) == ["a"]


def test_undoing_what_was_not_asked_for_says_nothing() -> None:
    made = rig()
    assert made.tell(m.DrainRequested("a", undo=True), m.DrainRequested("nobody", undo=True)) == []


def test_a_worker_away_stays_drained_and_only_a_new_life_of_it_is_not() -> None:
    made = rig()
    made.tell(m.DrainRequested("a"), m.WorkerClosed(1))
    assert made.tell(m.DrainRequested("a", undo=True)) == [], "it would say that it drains when it comes back"
    made.open("a", shape(10))
    assert made.machine.fleet.named("a").draining  # type: ignore[union-attr]
    again = m.WorkerOpened(9, "a", "another life", ("m",), shape(10), ())
    made.tell(again)
    assert not made.machine.fleet.named("a").draining  # type: ignore[union-attr]


def test_a_new_scheduler_learns_of_a_drain_from_the_worker() -> None:
    made = rig()
    made.tell(m.WorkerDraining(1, "the worker is draining"))
    made.announce("batch", 5, 5, 5)
    assert set(granted(made)) == {"b"}
