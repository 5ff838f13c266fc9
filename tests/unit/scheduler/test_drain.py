"""Draining a worker: no grants, what was not claimed comes back, and how long that lasts."""

from __future__ import annotations

import pytest

from services.core.drain import Drain
from services.scheduler.core import messages as m
from services.scheduler.core.drains import MOST_REMEMBERED, Drains
from services.scheduler.core.sharing.share import Share
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
    assert m.TellDrain(1, Drain(1, True)) in effects
    recalled = {effect.request_id for effect in effects if isinstance(effect, m.Recall)}
    assert recalled == set(held) - {first}
    made.announce("batch", 1, 1, 1)
    assert granted(made) == []


def test_an_undrained_worker_gets_grants_again() -> None:
    made = rig()
    made.tell(m.DrainRequested("a"), m.DrainRequested("b"))
    made.announce("batch", 10)
    assert granted(made) == []
    assert m.TellDrain(1, Drain(2, False)) in made.tell(m.DrainRequested("a", undo=True))
    assert granted(made) == ["a"]


def test_asking_for_what_is_so_says_nothing() -> None:
    made = rig()
    assert made.tell(m.DrainRequested("a", undo=True), m.DrainRequested("nobody", undo=True)) == []
    made.tell(m.DrainRequested("a"))
    assert made.tell(m.DrainRequested("a")) == []


def test_a_worker_away_stays_drained_and_only_a_new_life_of_it_is_not() -> None:
    made = rig()
    made.tell(m.DrainRequested("a"), m.WorkerClosed(1))
    epoch = made.open("a", shape(10))
    assert made.worker("a").draining
    made.tell(m.WorkerClosed(epoch), m.WorkerOpened(9, "a", "another life", ("m",), shape(10), ()))
    assert not made.worker("a").draining


def test_a_drain_holds_however_long_the_worker_was_away() -> None:
    """Its stream was broken when it was asked, and the worker has not heard of it."""
    made = rig()
    made.tell(m.WorkerClosed(1), m.DrainRequested("a"))
    made.wait(60_000)
    made.tell(m.Tick())
    assert made.machine.fleet.named("a") is None
    made.open("a", shape(10))
    assert made.worker("a").draining
    made.announce("batch", 10)
    assert granted(made) == ["b"]


def test_a_drain_is_undone_also_while_the_worker_is_away() -> None:
    made = rig()
    made.tell(m.DrainRequested("a"), m.WorkerClosed(1), m.DrainRequested("a", undo=True))
    made.tell(m.WorkerOpened(9, "a", "i", ("m",), shape(10), drain=Drain(1, True)))
    assert m.TellDrain(9, Drain(2, False)) in made.effects
    assert not made.worker("a").draining


def test_a_worker_is_told_in_each_epoch_until_it_has_heard() -> None:
    made = rig()
    made.tell(m.DrainRequested("a"), m.DrainRequested("a", undo=True))
    opened = m.WorkerOpened(9, "a", "i", ("m",), shape(10))
    for epoch, heard, told in ((9, Drain(1, True), True), (10, Drain(1, True), True), (11, Drain(2, False), False)):
        effects = made.tell(opened.replace(epoch=epoch, drain=heard))
        assert (m.TellDrain(epoch, Drain(2, False)) in effects) == told
        assert not made.worker("a").draining


def test_an_undone_drain_gives_no_grants_to_a_worker_that_is_leaving() -> None:
    made = rig()
    made.tell(m.DrainRequested("a"), m.WorkerLeaving(1, "SIGTERM"), m.DrainRequested("a", undo=True))
    made.announce("batch", 5, 5, 5)
    assert set(granted(made)) == {"b"}


def test_of_more_drains_than_are_remembered_that_of_who_left_longest_ago_is_forgotten() -> None:
    made, drains = rig(), Drains()
    worker = made.worker("a")
    worker.drain = Drain(1, True)

    def opened(name: str) -> m.WorkerOpened:
        return m.WorkerOpened(9, name, worker.instance_id, ("m",), shape(10))

    names = [f"w{number}" for number in range(MOST_REMEMBERED)]
    for worker.worker_id in names:
        drains.left(worker)
    assert drains.returned(opened(names[0])) == worker.drain
    for worker.worker_id in (names[0], "one more"):
        drains.left(worker)
    assert [name for name in [*names, "one more"] if drains.returned(opened(name)) == Drain()] == [names[1]]


def test_what_a_worker_heard_from_another_scheduler_later_holds() -> None:
    made = rig()
    made.tell(m.DrainRequested("a"), m.WorkerClosed(1))
    made.tell(m.WorkerOpened(9, "a", "i", ("m",), shape(10), drain=Drain(2, False)))
    assert made.worker("a").drain == Drain(2, False)
    assert not [effect for effect in made.effects if isinstance(effect, m.TellDrain) and effect.epoch == 9]


def test_a_new_scheduler_learns_of_a_drain_from_the_worker() -> None:
    made = rig()
    made.tell(m.WorkerOpened(9, "a", "i", ("m",), shape(10), drain=Drain(3, True)))
    assert not [effect for effect in made.effects if isinstance(effect, m.TellDrain)]
    made.announce("batch", 5, 5, 5)
    assert set(granted(made)) == {"b"}


AWAY: dict[str, m.Input] = {
    "drained": m.DrainRequested("big"),
    "leaving": m.WorkerLeaving(1, ""),
    "closed": m.WorkerClosed(1),
}


@pytest.mark.parametrize("policy", ["virtual-channels", "predictive"])
class TestWhoOnlyOneThatIsAwayCouldRun:
    """Workers `big` and `small`; more requests that only `big` can hold than a line's front has, then small ones."""

    BIG, SMALL = 20, 60

    def rig(self, policy: str, **shares: Share) -> Rig:
        made = Rig(shares or {"batch": Share()}, policy)
        made.open("big", shape(200))
        made.open("small", shape(50))
        return made

    def wait_for(self, made: Rig, channel: str = "batch") -> tuple[list[str], list[str]]:
        """Have what `big` runs end, and all announced; return the names of the large and of the small ones."""
        return made.announce(channel, *[150] * self.BIG), made.announce(channel, *[10] * self.SMALL)

    def run_all(self, made: Rig) -> None:
        """Have what is granted claimed and ended until nothing more is."""
        ended = 0
        while ended < len(made.grants):
            made.wait(10)
            made.finish(made.grants[ended])
            ended += 1

    @pytest.mark.parametrize("away", AWAY)
    def test_holds_up_nobody_behind_it(self, policy: str, away: str) -> None:
        made = self.rig(policy)
        made.tell(AWAY[away])
        large, small = self.wait_for(made)
        self.run_all(made)
        assert made.granted == small
        assert made.machine.backlog.waiting["batch"] == len(large)
        assert not [effect for effect in made.tell(m.Tick()) if isinstance(effect, m.AuditFailed)]

    def test_comes_first_when_it_is_back(self, policy: str) -> None:
        made = self.rig(policy)
        made.tell(m.DrainRequested("big"))
        large, _ = self.wait_for(made)
        made.tell(m.Gone(large[1], m.GoneReason.ENDED))
        made.grants.clear()
        made.tell(m.DrainRequested("big", undo=True))
        assert made.granted[0] == large[0]
        self.run_all(made)
        order = [name for name in made.granted if name in large]
        assert order == [large[0], *large[2:]]
        made.check()

    def test_goes_to_another_that_comes(self, policy: str) -> None:
        made = self.rig(policy)
        made.tell(m.DrainRequested("big"))
        large, _ = self.wait_for(made)
        made.open("third", shape(200))
        assert made.granted[-1] == large[0]

    def test_keeps_no_blocks_for_its_channel(self, policy: str) -> None:
        made = self.rig(policy, batch=Share(), large=Share(guaranteed_share=0.5))
        made.tell(m.DrainRequested("big"))
        made.announce("large", *[150] * self.BIG)
        made.announce("batch", *[10] * 5)
        assert len(made.granted) == 5

    def test_keeps_no_blocks_where_it_cannot_run(self, policy: str) -> None:
        made = self.rig(policy, batch=Share(), large=Share(guaranteed_share=0.5))
        made.announce("large", 150, 150)
        made.announce("batch", *[10] * 8)
        assert len([grant for grant in made.grants if grant.worker_id == "small"]) == 5

    @pytest.mark.parametrize("away", AWAY)
    def test_is_passed_where_it_does_not_fit_while_its_worker_is_there_and_when_it_is_gone(
        self, policy: str, away: str
    ) -> None:
        made = self.rig(policy, batch=Share(ceiling_share=0.5))
        held, waits, passes = made.announce("batch", 90, 90, 10)
        assert made.granted == [held, passes]
        made.tell(AWAY[away])
        (later,) = made.announce("batch", 10)
        assert made.granted == [held, passes, later]
        assert waits in made.machine.backlog.names()

    def test_takes_what_there_is_once_its_worker_is_gone(self, policy: str) -> None:
        made = self.rig(policy)
        made.tell(m.DrainRequested("big"))
        (waits,) = made.announce("batch", 0, prompt_tokens=0, prompt_bytes=10, chat=True)
        made.announce("batch", 10)
        assert waits not in made.granted
        made.tell(m.WorkerClosed(1))
        made.wait(5000)
        made.finish(made.grants[0])
        made.tell(m.Tick())
        assert made.granted[-1] == waits
        assert made.grants[-1].worker_id == "small"

    def test_is_looked_at_again_when_several_come_back_at_once(self, policy: str) -> None:
        made = self.rig(policy)
        made.open("large", shape(200))
        made.announce("batch", 150, 150)
        for grant in list(made.grants):
            made.release(grant, m.ReleaseCause.UNCLAIMED)
        made.grants.clear()
        (passes,) = made.announce("batch", 10)
        assert made.granted == [passes]
        made.wait(1000)
        made.tell(m.Tick())
        assert len(made.granted) == 3

    def test_is_not_looked_at_for_one_that_is_no_larger_than_another(self, policy: str) -> None:
        made = self.rig(policy)
        made.open("other", shape(50))
        made.tell(m.DrainRequested("big"), m.DrainRequested("other"))
        self.wait_for(made)
        self.run_all(made)
        assert made.machine.channel("batch").heads() == []
        made.machine.step(m.DrainRequested("other", undo=True), made.now_ns)
        made.machine._arbiter.begin(made.now_ns)
        assert made.machine.channel("batch").heads() == []
        made.machine.step(m.DrainRequested("big", undo=True), made.now_ns)
        made.machine._arbiter.begin(made.now_ns)
        assert made.machine.channel("batch").heads() != []

    def test_stays_where_it_is_while_nobody_takes_grants(self, policy: str) -> None:
        made = self.rig(policy)
        made.tell(m.DrainRequested("big"), m.DrainRequested("small"))
        large, _ = self.wait_for(made)
        (head,) = [entry for _, entry in made.machine.channel("batch").heads()]
        assert head.request_id == large[0]

    def test_is_passed_also_by_what_was_known_before(self, policy: str) -> None:
        made = self.rig(policy)
        made.announce("batch", 150, 40)
        held = dict(zip(made.granted, made.grants, strict=True))
        large, small = self.wait_for(made)
        made.tell(m.DrainRequested("big"))
        for grant in held.values():
            made.finish(grant)
        del made.grants[:2]
        self.run_all(made)
        assert made.granted == small
        made.tell(m.DrainRequested("big", undo=True))
        assert made.granted[-1] == large[0]
