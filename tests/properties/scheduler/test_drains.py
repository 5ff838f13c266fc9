"""Who drains, between the scheduler's machine and a worker's session, whatever crosses on a stream or is lost with it.

A story is a string of steps, each a letter (`World.STEPS`). At its end everything arrives: then both say the same, it
is what operators asked last, and the one request that waits is granted if, and only if, the worker takes grants.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import ClassVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.core.drain import Drain
from services.scheduler.core import messages as m
from services.scheduler.core.admission.policies import POLICIES
from services.scheduler.core.fleet import Worker
from services.scheduler.core.machine import Machine
from services.scheduler.core.sharing.share import Share
from services.worker.core import messages as w
from services.worker.core.session import Session
from services.worker.core.sizing import Sizes
from tests.support.effort import examples
from tests.support.scheduling import SECOND_NS, announced, shape

GRACE_NS = 5 * SECOND_NS


class World:
    """One worker, one scheduler, and the stream between them."""

    STEPS: ClassVar[dict[str, Callable[[World], None]]] = {
        "d": lambda world: world.ask(wanted=True),
        "u": lambda world: world.ask(wanted=False),
        "x": lambda world: world.break_stream(),
        "o": lambda world: world.open_stream(),
        "h": lambda world: world.worker_hears(),
        "s": lambda world: world.scheduler_hears(),
        "r": lambda world: world.restart_scheduler(),
        "g": lambda world: world.pass_time(2 * GRACE_NS),
        "t": lambda world: world.stop_worker(),
        "n": lambda world: world.replace_worker(),
    }
    """Drain, undrain, the stream breaks, opens, the worker and the scheduler hear one message, the scheduler restarts,
    the grace passes, SIGTERM to the worker, a new life of it."""

    def __init__(self) -> None:
        self.now_ns = SECOND_NS
        self.epoch = 0
        self.seq = 0
        self.life = 0
        self.streaming = False
        self.up: deque[m.Input] = deque()
        self.down: deque[m.Effect] = deque()
        self.wanted = False
        """What operators asked last, of which a new scheduler knows no more than the worker has heard."""
        self.machine: Machine
        self.session = Session(Sizes(10, 10, 1, 10_000))
        self.restart_scheduler()

    def worker(self) -> Worker | None:
        return self.machine.fleet.named("w")

    def do(self, story: str) -> None:
        for step in story:
            self.STEPS[step](self)

    # ---- steps ----

    def ask(self, wanted: bool) -> None:
        worker = self.worker()
        if worker is not None and worker.instance_id == f"i{self.life}":
            self.wanted = wanted
        self.tell(m.DrainRequested("w", undo=not wanted))

    def break_stream(self) -> None:
        if self.streaming:
            self.streaming = False
            self.up.clear()
            self.down.clear()
            self.tell(m.WorkerClosed(self.epoch))
            self.hear(w.SchedulerDown())

    def open_stream(self) -> None:
        self.break_stream()
        self.streaming = True
        self.epoch += 1
        self.hear(w.SchedulerReached())

    def worker_hears(self) -> None:
        if self.down:
            said = self.down.popleft()
            if isinstance(said, m.Opened):
                self.hear(w.SchedulerUp(said.epoch, 0))
            elif isinstance(said, m.TellDrain):
                self.hear(w.DrainHeard(said.drain))
            elif isinstance(said, m.Recall):
                self.hear(w.Recalled(said.request_id))
            elif isinstance(said, m.Grant):
                self.hear(w.Granted(said.request_id, said.channel, said.booked_blocks, said.settles, said.attempt))

    def scheduler_hears(self) -> None:
        if self.up:
            self.tell(self.up.popleft())

    def restart_scheduler(self) -> None:
        self.break_stream()
        self.machine = Machine(POLICIES["virtual-channels"], {"batch": Share()}, GRACE_NS, 0)
        self.wanted = self.session._held.drain.wanted
        self.tell(m.Tick())
        self.tell(m.QueueOpened(("batch",)))
        self.tell(announced("r", "batch", 5))

    def pass_time(self, passed_ns: int) -> None:
        self.now_ns += passed_ns
        self.tell(m.Tick())

    def stop_worker(self) -> None:
        self.hear(w.ShutdownAsked("SIGTERM"))

    def replace_worker(self) -> None:
        self.break_stream()
        self.life += 1
        self.session = Session(Sizes(10, 10, 1, 10_000))
        self.wanted = False

    # ---- wires ----

    def tell(self, message: m.Input) -> None:
        effects = [*self.machine.step(message, self.now_ns), *self.machine.arbitrate(self.now_ns)]
        # What is for an earlier stream, which the scheduler has not heard the end of, goes nowhere.
        self.down += [said for said in effects if self.streaming and getattr(said, "epoch", 0) == self.epoch]

    def hear(self, message: w.Message) -> None:
        for said in self.session.step(message, self.now_ns):
            if isinstance(said, w.OpenCredits):
                assert not self.up, "nothing comes before the open"
                holds = tuple(m.Holding(*holding) for holding in said.inventory)
                opened = m.WorkerOpened(self.epoch, "w", f"i{self.life}", ("m",), shape(10), holds)
                self.up.append(opened.replace(drain=said.drain, leaving=said.leaving))
            elif isinstance(said, w.SendLeaving):
                self.up.append(m.WorkerLeaving(self.epoch, said.reason))
            elif isinstance(said, w.SendCompletionAck):
                cause = m.ReleaseCause[said.cause.name]
                self.up.append(m.CompletionAck(self.epoch, said.epoch, said.request_id, said.seq, cause))

    def settle(self) -> Worker:
        """Let everything arrive."""
        if not self.streaming:
            self.open_stream()
        for _ in range(3):
            while self.up or self.down:
                self.scheduler_hears()
                self.worker_hears()
            self.pass_time(SECOND_NS)  # a grant that came back unclaimed keeps others away for a moment
        worker = self.worker()
        assert worker is not None
        return worker


def told(story: str, leaving: bool | None = None) -> bool:
    """Tell a story to its end; return whether the worker is drained."""
    world = World()
    world.do(story)
    worker = world.settle()
    held = world.session._held
    assert (worker.drain, worker.leaving) == (held.drain, held.leaving), "both say the same"
    assert worker.drain.wanted == world.wanted, "what was asked last"
    assert leaving is None or worker.leaving == leaving
    assert list(world.session._held.by_request) == list(worker.ledger) == ([] if worker.draining else ["r"])
    return worker.drain.wanted


OPEN = "oshhhh"
"""The worker is let in, and has its grant."""


@pytest.mark.parametrize(
    ("story", "drained"),
    [
        ("d", True),
        ("dhhu", False),
        ("dhhuhhd", True),
        ("xd", True),
        ("xdg", True),
        ("xdu", False),
        ("dhhxu", False),
        ("dhhxug", False),
        ("dhhxugosxo", False),
        ("dxosuxos", False),
        ("dhhr", True),
        ("dhhrosu", False),
        ("dhhrosd", True),
        ("dr", False),
        ("dhhur", True),
        ("dhhuhhr", False),
        ("dhhn", False),
        ("xdgn", False),
        ("dhhrosuxos", False),
        ("dhhroosu", False),
    ],
)
def test_a_drain_is_what_operators_asked_last(story: str, drained: bool) -> None:
    assert told(OPEN + story, leaving=False) == drained


@pytest.mark.parametrize(
    "story", ["t", "tx", "tsr", "dhht", "dhhtu", "tdu", "tsdsu", "dhhtxu", "xot", "xost", "xt", "rt"]
)
def test_a_worker_that_was_told_to_stop_takes_nothing_whatever_operators_ask(story: str) -> None:
    told(OPEN + story, leaving=True)


def test_a_scheduler_grants_nothing_to_a_worker_that_comes_drained_or_leaving() -> None:
    """Not even until the word after the first is heard."""
    for before in ("dhhr", "tr", "dhhxu" + "xdr"):
        world = World()
        world.do(OPEN + before + "o")
        world.up = deque([world.up[0]])
        world.do("s")
        assert not [said for said in world.down if isinstance(said, m.Grant)], before


def test_a_word_that_comes_late_or_twice_changes_nothing() -> None:
    session = Session(Sizes(10, 10, 1, 10_000))
    for drain, takes in ((Drain(2, False), True), (Drain(1, True), True), (Drain(3, True), False), (Drain(2), False)):
        session.step(w.DrainHeard(drain), 0)
        session.step(w.DrainHeard(drain), 0)
        assert session._held.open == takes
    assert session._held.drain == Drain(3, True)


@settings(max_examples=examples(600), deadline=None)
@given(story=st.text(st.sampled_from(sorted(World.STEPS)), max_size=40))
@example(story="osnod")  # the former life is drained, whose end the scheduler has not heard of
def test_whatever_crosses_or_is_lost_both_end_up_with_what_was_asked_last(story: str) -> None:
    told(story)
