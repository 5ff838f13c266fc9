"""What waits is looked at again where the fleet can hold less than it could, and not for who only comes back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.scheduler.core import messages as m
from services.scheduler.core.admission.estimate import rejection
from services.scheduler.core.fleet import Worker
from services.scheduler.core.hopeless import Hopeless
from services.scheduler.core.sharing.share import Share
from tests.support.modules import COMPILED
from tests.support.scheduling import SECOND_NS, Rig, announced, shape


def rig_of(*capacities: int) -> Rig:
    """Return a fleet of workers `w0`, `w1` ... of one model."""
    rig = Rig({"a": Share()})
    for number, capacity in enumerate(capacities):
        rig.open(f"w{number}", shape(capacity))
    return rig


def rejected(rig: Rig) -> list[str]:
    return [effect.request_id for effect in rig.effects if isinstance(effect, m.RejectRequest)]


def lose(rig: Rig, epoch: int) -> None:
    """Let a worker go and its grace period end."""
    rig.tell(m.WorkerClosed(epoch))
    rig.wait(6_000)
    rig.tell(m.Tick())


@pytest.mark.skipif(COMPILED, reason="nothing patches a compiled module")
def test_a_worker_that_comes_back_costs_no_look_at_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of(100, 100)
    rig.announce("a", *[100] * 200)
    looks = 0

    def counting(request: m.Announced, shapes: Sequence[m.EngineShape]) -> m.RejectRequest | None:
        nonlocal looks
        looks += 1
        return rejection(request, shapes)

    monkeypatch.setattr("services.scheduler.core.machine.rejection", counting)
    for _ in range(3):
        rig.open("w0", shape(100))
        rig.open("w1", shape(100))
    rig.open("w2", shape(150))
    assert looks == 3 * 2, "at the one that each of them had"
    looks = 0
    waiting = rig.machine.backlog.waiting["a"]
    rig.open("w2", shape(100))
    assert looks == waiting + 2, "at the one that ran there both as one that waits and as one that came back"


def test_who_waits_for_the_largest_worker_is_rejected_when_that_is_gone_or_smaller() -> None:
    rig = rig_of(100, 50)
    rig.announce("a", 80, 50)
    large, _small = rig.announce("a", 90, 40)
    rig.open("w0", shape(85))
    assert rejected(rig) == [large]
    rig.announce("a", 80)
    epoch = rig.worker("w0").epoch
    assert rejected(rig) == [large]
    lose(rig, epoch)
    assert len(rejected(rig)) == 3, "the one that ran there, too, waits again and is as hopeless as the last"


def test_changes_before_the_fleet_is_known_count_when_it_is() -> None:
    rig = Rig({"a": Share()}, connected=False)
    rig.now_ns = SECOND_NS
    rig.tell(m.QueueOpened(("a",)))
    rig.announce("a", 80)
    rig.open("w0", shape(50))
    assert rejected(rig) == []
    rig.wait(5_000)
    rig.tell(m.Tick())
    assert len(rejected(rig)) == 1


def test_the_first_to_serve_a_model_shows_who_is_too_large_for_it() -> None:
    rig = rig_of(100)
    (other,) = rig.announce("a", 80, model="other")
    rig.open("w1", shape(50), model="other")
    assert rejected(rig) == [other]


def test_a_change_of_one_group_has_only_those_looked_at_that_it_could_have_run() -> None:
    rig = rig_of(100)
    rig.open("w1", shape(100), model="other")
    hopeless = Hopeless(rig.machine.fleet)
    hopeless.models_to_review()
    rig.open("w1", shape(50), model="other")
    assert hopeless.models_to_review() == {"", "other"}
    rig.open("w1", shape(60), model="other")
    assert hopeless.models_to_review() == set(), "it is larger"


def test_one_that_parted_and_waits_again_is_looked_at_again() -> None:
    """The queue has not said that it is gone, and meanwhile the only worker that could hold it is."""
    rig = rig_of(100, 50)
    (name,) = rig.announce("a", 80)
    (grant,) = rig.grants
    rig.release(grant)
    rig.tell(m.WorkerClosed(grant.epoch))
    rig.tell(m.WorkerOpened(99, "w0", "i", ("m",), shape(50), (), False, False))
    assert rejected(rig) == []
    rig.wait(2_000)
    rig.tell(m.Tick())
    assert rejected(rig) == [name]


def test_what_was_announced_to_a_worker_that_came_back_smaller_at_once_is_looked_at() -> None:
    rig = rig_of(50)
    rig.machine.step(m.WorkerOpened(98, "w1", "i", ("m",), shape(100), (), False, False), rig.now_ns)
    rig.machine.step(announced("large", "a", 80, 1), rig.now_ns)
    rig.tell(m.WorkerOpened(99, "w1", "i", ("m",), shape(50), (), False, False))
    assert rejected(rig) == ["large"]


def test_what_a_worker_had_by_its_own_account_is_looked_at_when_it_waits_again() -> None:
    """It could not be told that it is hopeless as long as a worker said that it runs there."""
    rig = Rig({"a": Share()}, connected=False)
    rig.now_ns = SECOND_NS
    rig.tell(m.QueueOpened(("a",)))
    (name,) = rig.announce("a", 80)
    rig.open("w1", shape(50))
    rig.open("w0", shape(50), inventory=(m.Holding(name, "a", 40, 0),))
    rig.wait(5_000)
    rig.tell(m.Tick())
    assert rejected(rig) == []
    rig.open("w0", shape(50))
    assert rejected(rig) == [name]


@pytest.mark.skipif(COMPILED, reason="nothing patches a compiled module")
def test_many_workers_that_come_in_one_pass_cost_each_some_looks_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the scheduler has been restarted."""
    many, looks = 200, 0
    takes_grants = Worker.takes_grants

    def counted(worker: Worker, now_ns: int) -> bool:
        nonlocal looks
        looks += 1
        return takes_grants(worker, now_ns)

    rig = Rig({"a": Share()})
    rig.announce("a", 30)
    monkeypatch.setattr(Worker, "takes_grants", counted)
    rig.tell(*(m.WorkerOpened(epoch, f"w{epoch}", "i", ("m",), shape(), (), False, False) for epoch in range(many)))
    assert len(rig.granted) == 1
    assert looks < 20 * many
