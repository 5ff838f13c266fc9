"""What a request books where is found once, and found anew when the fleet or what the policy knows has changed."""

from __future__ import annotations

from services.scheduler.core import messages as m
from services.scheduler.core.admission.bookings import Bookings
from services.scheduler.core.sharing.share import Share
from tests.support.scheduling import Rig, shape


def found(rig: Rig, name: str, worker_id: str) -> list[tuple[str, int]]:
    """Return the models of the groups that may get a request in the worker's pool, and what it books there."""
    machine = rig.machine
    lines = machine.channel("batch").lines.values()
    (entry,) = [entry for line in lines for entry in line.entries() if entry.request_id == name]
    bookings = Bookings(machine.policy, machine.fleet)
    pool = rig.worker(worker_id).group.pool
    of_pool = bookings.of(entry, pool)
    assert of_pool == [each for each in bookings.of(entry) if each[0].pool is pool]
    return [(group.models[0], blocks) for group, blocks, _ in of_pool]


def test_groups_are_found_by_pool_and_anew_when_workers_come_and_go() -> None:
    rig = Rig({"batch": Share()})
    rig.open("a", shape(10), model="x")
    rig.open("b", shape(100), model="y")
    (name,) = rig.announce("batch", 40)
    (waits,) = rig.announce("batch", 80)
    assert rig.granted == [name]
    assert found(rig, waits, "a") == []
    assert found(rig, waits, "b") == [("y", 80)]
    rig.open("c", shape(100), model="x")
    assert rig.granted[-1] == waits
    (again,) = rig.announce("batch", 90)
    assert found(rig, again, "a") == [("x", 90)]
    rig.tell(m.WorkerClosed(rig.worker("c").epoch))
    rig.wait(10_000)
    rig.tell(m.Tick())
    assert found(rig, again, "a") == []
    assert found(rig, again, "b") == [("y", 90)]


def test_groups_that_are_gone_are_not_remembered() -> None:
    """One waits for the large worker, while another, alone in its group, dies and comes again."""
    rig = Rig({"batch": Share()})
    rig.open("large", shape(100))
    rig.open("small", shape(40))
    rig.tell(m.DrainRequested("large"))
    rig.announce("batch", 60)
    (entry,) = rig.machine.channel("batch").lines[""].entries()
    for _ in range(5):
        rig.open("own", shape(20).replace(max_model_len=9_000))
        rig.tell(m.WorkerClosed(rig.worker("own").epoch))
        rig.wait(10_000)
        rig.tell(m.Tick())
    assert entry.booked is not None
    assert set(entry.booked.by_geometry) == {rig.worker("large").group.geometry}
