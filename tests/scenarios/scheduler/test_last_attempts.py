"""Two requests on their last attempt never share a worker, and one that waits for that holds up nobody."""

from __future__ import annotations

import random

import pytest

from services.queue.core import effects as q
from services.queue.core import messages as qm
from services.queue.core.entry import Failure, LeaseRef
from services.queue.core.lifecycle import Outcome
from services.queue.core.workers import Rules
from services.scheduler.core import messages as m
from services.scheduler.core.entry import Entry
from services.scheduler.core.sharing.line import Line
from services.scheduler.core.sharing.share import Share
from tests.simulation.scheduler_actor import announced as heard
from tests.support.queueing import Queue, meta
from tests.support.scheduling import Rig, announced, shape

POLICIES = ("virtual-channels", "predictive")
BOTH = {"a": Share(), "b": Share()}

ENGINE_DIED = Failure("engine_dead", "it is gone")


def ended(rig: Rig, name: str) -> None:
    """A granted request has been claimed, and has run to its end."""
    (grant,) = [grant for grant in rig.grants if grant.request_id == name]
    rig.finish(grant)


def last(rig: Rig, channel: str, *sizes: int, **changes: object) -> list[str]:
    """Announce requests on their last attempt."""
    return rig.announce(channel, *sizes, last_attempt=True, attempt=3, **changes)


@pytest.mark.parametrize("policy", POLICIES)
def test_those_behind_one_whose_worker_is_drained_have_the_others(policy: str) -> None:
    rig = Rig(BOTH, policy)
    rig.open("big", shape(100))
    rig.open("small", shape(20))
    last(rig, "a", 50, 50)
    behind = last(rig, "a", 5, 5)
    rig.tell(m.DrainRequested("big"))
    rig.tell(m.Tick())
    assert rig.granted[1:] == behind[:1]
    ended(rig, behind[0])
    assert rig.granted[1:] == behind


@pytest.mark.parametrize("weight", [1.0, 10.0])
@pytest.mark.parametrize("others", [0, 1])
def test_weights_say_whose_turn_it_is_for_the_place_of_a_worker(weight: float, others: int) -> None:
    """`crowd` keeps a worker busy, `before` has many on their last attempt when `after` comes with some."""
    rig = Rig({"after": Share(weight), "before": Share(), "crowd": Share()})
    rig.open("w", model="x", aliases=("z",))
    for number in range(others):
        rig.open(f"of-the-pool-{number}", model="y", aliases=("z",))
    last(rig, "before", *[5] * 400, model="x")
    running: list[tuple[int, m.Grant]] = []
    choose = random.Random(1)
    wanted: list[str] = []
    seen = 0
    for step in range(1_500):
        rig.announce("crowd", *[10] * (8 - len(rig.machine.channel("crowd"))), model="x")
        if step == 100:
            wanted = last(rig, "after", *[5] * 10, model="x")
        running += [(step + choose.randint(16, 24), grant) for grant in rig.grants[seen:]]
        seen = len(rig.grants)
        rig.wait(50)
        for until, grant in [one for one in running if one[0] <= step]:
            running.remove((until, grant))
            rig.finish(grant)
    assert set(wanted) <= set(rig.granted)


def test_those_that_come_back_have_their_turn_one_by_one() -> None:
    rig = Rig(BOTH)
    rig.open("big", shape(100))
    rig.open("small", shape(20))
    (running,) = last(rig, "a", 50)
    rig.tell(m.DrainRequested("big"))
    waiting = last(rig, "a", *[50] * 20)
    rig.tell(m.DrainRequested("big", undo=True))
    channel = rig.machine.channel("a")
    assert len(channel.beyond) == 1, "each that waits for the worker is looked at whenever something ends there"
    ended(rig, running)
    assert rig.granted == [running, waiting[0]]
    assert len(channel.beyond) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_each_worker_runs_one_on_its_last_attempt_beside_others(policy: str) -> None:
    rig = Rig(BOTH, policy)
    rig.open("w0")
    rig.open("w1")
    lasts = last(rig, "a", 5, 5, 5, 5)
    others = rig.announce("a", 5, 5, 5)
    assert {*rig.granted} == {*lasts[:2], *others}
    assert {grant.worker_id for grant in rig.grants if grant.last_attempt} == {"w0", "w1"}
    for name in (*lasts[:2], lasts[2]):
        ended(rig, name)
    assert rig.granted[-2:] == lasts[2:], "in their order, each as soon as one has ended"
    rig.check()


def test_one_that_waits_neither_saves_nor_pays_nor_keeps_anything_from_others() -> None:
    rig = Rig({"a": Share(0.5), "b": Share()})
    rig.open("w0", shape(20))
    (running,) = last(rig, "b", 5)
    last(rig, "a", 15)
    assert rig.machine._arbiter._savings.on(rig.worker("w0")) is None
    assert not list(rig.machine._arbiter._deposits)
    own, of_others = rig.announce("a", 5)[0], rig.announce("b", 5, 5)
    assert rig.granted == [running, own, *of_others]


def test_it_starts_at_its_place_in_line_once_it_may() -> None:
    rig = Rig(BOTH)
    rig.open("w0", shape(20))
    (running,) = last(rig, "b", 5)
    (waiting,) = last(rig, "a", 15)
    first = rig.announce("a", 15)[0]
    rig.announce("a", *[5] * 6)
    ended(rig, running)
    ended(rig, first)
    assert rig.granted[:3] == [running, first, waiting]


def test_where_one_saves_no_other_takes_its_place() -> None:
    """A large one waits for room. A small one would fit into what is left beside it, and keep it out."""
    rig = Rig(BOTH)
    rig.open("w0", shape(20))
    before = rig.announce("b", 1)[0]
    rig.wait(10)
    ended(rig, before)
    filling = rig.announce("b", 10, 5)
    (large,) = last(rig, "a", 18)
    saving = rig.machine._arbiter._savings.on(rig.worker("w0"))
    assert saving is not None
    assert saving.entry.request_id == large
    (small,) = last(rig, "b", 2)
    assert not list(rig.machine._arbiter._deposits)
    (passing,) = rig.announce("b", 2)
    assert rig.granted[1:] == [*filling, passing]
    for name in filling:
        ended(rig, name)
    assert rig.granted[-1] == large
    ended(rig, large)
    assert rig.granted[-1] == small


def test_a_lower_tier_takes_the_place_and_nothing_is_saved_for_it_meanwhile() -> None:
    rig = Rig({"a": Share(tier=1), "b": Share()})
    rig.open("w0", shape(20))
    (filling,) = rig.announce("a", 15)
    (large,) = last(rig, "a", 18)
    assert rig.machine._arbiter._savings.on(rig.worker("w0")) is not None
    (small,) = last(rig, "b", 2)
    rig.tell(m.Tick())
    assert rig.machine._arbiter._savings.on(rig.worker("w0")) is None
    ended(rig, filling)
    assert rig.granted == [filling, small]
    ended(rig, small)
    assert rig.granted == [filling, small, large]


def test_one_that_waits_behind_a_ceiling_keeps_nobody_from_small_workers() -> None:
    rig = Rig({"a": Share(ceiling_share=0.5), "b": Share()})
    rig.open("small", shape(8))
    (running,) = last(rig, "b", 2)
    rig.open("w0", shape(20))
    first = rig.announce("a", 5)[0]
    rig.announce("a", 10)
    last(rig, "a", 3)
    (behind,) = rig.announce("a", 3)
    assert rig.granted == [running, first, behind]
    assert [grant.worker_id for grant in rig.grants] == ["small", "w0", "small"]


def test_one_of_a_line_is_looked_at_however_many_there_are() -> None:
    line = Line("")
    entries = [Entry(f"r{position}") for position in range(100)]
    for position, entry in enumerate(entries):
        entry.announce(announced(entry.request_id, "a", 5, position, last_attempt=True), 0)
        line.enter(entry)
    assert line.first(9) == entries[:1]
    for entry in entries[1:50]:
        line.leave(entry)
    line.leave(entries[0])
    line.let_next_last(entries[0])
    assert line.first(9) == entries[50:51]
    assert (len(line), line.aside) == (50, 49)


def test_one_that_saves_leaves_its_place_when_it_is_cancelled() -> None:
    rig = Rig(BOTH)
    rig.open("w0", shape(20))
    rig.announce("b", 10, 5)
    (large,) = last(rig, "a", 18)
    (small,) = last(rig, "b", 5)
    assert small not in rig.granted
    rig.tell(m.Gone(large, m.GoneReason.ENDED))
    assert rig.granted[-1] == small


@pytest.mark.parametrize("leaves", [0, 1, 2])
def test_whoever_of_those_that_wait_is_cancelled_the_others_have_their_turns(leaves: int) -> None:
    rig = Rig(BOTH)
    rig.open("w0")
    (running,) = last(rig, "a", 5)
    waiting = last(rig, "a", 5, 5, 5)
    rig.tell(m.Gone(waiting.pop(leaves), m.GoneReason.ENDED))
    for name in (running, *waiting):
        ended(rig, name)
    assert rig.granted == [running, *waiting]
    assert rig.machine.backlog.names() == []
    rig.check()


def test_the_first_that_wants_a_worker_which_is_drained_does_not_hold_up_the_next() -> None:
    rig = Rig(BOTH)
    rig.open("large", shape(100))
    rig.open("small", shape(20))
    rig.tell(m.DrainRequested("large"))
    (beyond,) = last(rig, "a", 50)
    (within,) = last(rig, "a", 5)
    assert rig.granted == [within]
    rig.tell(m.DrainRequested("large", undo=True))
    assert rig.granted == [within, beyond]


def test_one_of_a_higher_priority_waits_behind_none_of_a_lower() -> None:
    rig = Rig(BOTH)
    rig.open("w0", shape(20))
    filling = rig.announce("a", 20)[0]
    low = last(rig, "a", 5, priority=5)[0]
    rig.announce("a", 20, 20, priority=3)
    high = last(rig, "a", 5, priority=1)[0]
    ended(rig, filling)
    assert rig.granted == [filling, high]
    assert low not in rig.granted


def test_a_new_worker_takes_one() -> None:
    rig = Rig(BOTH)
    rig.open("w0")
    lasts = last(rig, "a", 5, 5, 5)
    rig.open("w1")
    assert rig.granted == lasts[:2]
    epoch = rig.worker("w0").epoch
    rig.tell(m.WorkerClosed(epoch))
    rig.wait(6_000)
    rig.tell(m.Tick())
    rig.open("w2")
    assert {grant.worker_id for grant in rig.grants[2:]} == {"w2"}


def test_what_a_worker_brings_along_counts() -> None:
    rig = Rig(BOTH)
    rig.open("w0", inventory=[m.Holding("old", "a", 5, 1, last_attempt=True), m.Holding("other", "a", 5, 1)])
    (waiting,) = last(rig, "a", 5)
    assert rig.granted == []
    rig.tell(m.CompletionAck(1, 1, "other", 2, m.ReleaseCause.COMPLETED))
    assert rig.granted == []
    rig.tell(m.CompletionAck(1, 1, "old", 2, m.ReleaseCause.COMPLETED))
    assert rig.granted == [waiting]


def test_a_window_has_room_beside_those_that_wait() -> None:
    rig = Rig(BOTH)
    rig.open("w0", shape(100, 8))
    last(rig, "a", *[1] * 64)
    rig.tell(m.Tick())
    limits = [effect.limit for effect in rig.effects if isinstance(effect, m.SetWindow) and effect.channel == "a"]
    assert limits[-1] > 64 + 8


class Engines:
    """Queue and scheduler, and workers whose engines die with all that they run once a poison request is in them."""

    def __init__(self, workers: int, max_attempts: int) -> None:
        """Have all of them connected."""
        self.queue = Queue(Rules(("a",), max_attempts, 1 << 60, worker_grace_ns=0, max_inflight=1000, patience_ns=0))
        self.rig = Rig({"a": Share()})
        self.queue.step(qm.BacklogOpened(1000), qm.SetWindow(1000, "a", 1000, ("m",)))
        self.streams: dict[str, int] = {}
        self.running: dict[str, dict[str, LeaseRef]] = {}
        self.lives = 0
        self.deaths = 0
        for number in range(workers):
            self._start(f"w{number}")

    def _start(self, worker: str) -> None:
        self.lives += 1
        self.running[worker] = {}
        self.streams[worker] = self.lives
        self._hear(self.queue.step(qm.WorkerOpened(self.lives, worker, f"life-{self.lives}", ())))
        self.rig.open(worker, shape(100))

    def _hear(self, effects: list[q.Effect]) -> None:
        """Tell the scheduler what the queue says."""
        for effect in effects:
            if isinstance(effect, q.Announce):
                self.rig.tell(heard(effect))
            elif isinstance(effect, q.Gone):
                self.rig.tell(m.Gone(effect.request_id, m.GoneReason(effect.reason.value)))

    def submit(self, count: int) -> list[str]:
        """Submit requests of 10 blocks each."""
        effects = self.queue.step(
            qm.Submit(0, tuple([qm.NewRequest(meta(channel="a", prompt_tokens=10, max_tokens=1), b"")] * count))
        )
        self._hear(effects)
        (answer,) = [effect for effect in effects if isinstance(effect, q.Submitted)]
        return [name for name, _ in answer.acks]

    def claim(self) -> None:
        """Claim what has been granted."""
        while self.rig.grants:
            grant = self.rig.grants.pop(0)
            effects = self.queue.step(qm.Claim(self.streams[grant.worker_id], grant.request_id))
            self.running[grant.worker_id] |= {e.lease.request_id: e.lease for e in effects if isinstance(e, q.Deliver)}
            self._hear(effects)

    def play(self, poison: str) -> None:
        """Have engines die of the poison, and otherwise finish what they run, until nothing is left."""
        self.claim()
        while busy := [worker for worker, runs in self.running.items() if runs]:
            deadly = [worker for worker in busy if poison in self.running[worker]]
            if deadly:
                self._die(deadly[0])
            else:
                self._finish(busy[0])
            self.claim()

    def _die(self, worker: str) -> None:
        self.deaths += 1
        stream = self.streams[worker]
        effects = self.queue.step(
            *[qm.Complete(stream, run, None, ENGINE_DIED, None) for run in self.running[worker].values()]
        )
        effects += self.queue.step(qm.WorkerClosed(stream))
        self.rig.tell(m.WorkerClosed(self.rig.worker(worker).epoch))
        self._hear(effects)
        self._start(worker)

    def _finish(self, worker: str) -> None:
        name, lease = self.running[worker].popitem()
        effects = self.queue.step(qm.Complete(self.streams[worker], lease, Outcome.COMPLETED, None, None))
        epoch = self.rig.worker(worker).epoch
        self.rig.tell(m.CompletionAck(epoch, epoch, name, 1, m.ReleaseCause.COMPLETED))
        self._hear(effects)


@pytest.mark.parametrize(("workers", "max_attempts"), [(1, 3), (2, 3), (3, 2), (1, 2), (2, 5)])
def test_a_poison_request_among_full_engines_is_the_only_dead_letter(workers: int, max_attempts: int) -> None:
    engines = Engines(workers, max_attempts)
    names = engines.submit(25)
    engines.play(names[3])
    book = engines.queue.machine.book
    assert [book.name_of(seq) for seq in book.dead] == [names[3]]
    assert engines.deaths == max_attempts
    assert len(book.entries) == 1, "all others have their results"


def test_where_there_is_one_attempt_all_run_beside_each_other() -> None:
    engines = Engines(1, max_attempts=1)
    engines.submit(10)
    engines.claim()
    assert len(engines.running["w0"]) == 10
