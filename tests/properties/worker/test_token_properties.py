"""Whoever watches is sent every token: soon, before the result, and nothing of a run that is forgotten."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from services.worker.core import messages as m
from services.worker.core.session import Session
from services.worker.core.sizing import Sizes
from services.worker.core.token_news import TOKEN_WAIT_NS
from tests.support.effort import examples

SIZES = Sizes(capacity_blocks=60, blocks_total=64, block_size=16, max_model_len=512)
LEASE_NS = 10**15

picks = st.integers(0, 7)


class Watching(RuleBasedStateMachine):
    """A queue that watches some runs, and an engine that generates for all."""

    def __init__(self) -> None:
        super().__init__()
        self.session = Session(SIZES)
        self.now_ns = 0
        self.numbers = itertools.count(1)
        self.queue_up = False
        self.running: list[m.Lease] = []
        self.aborting: list[m.Lease] = []
        self.recordable: list[m.Lease] = []
        self.watched: set[str] = set()
        self.since_ns: dict[str, int] = {}
        """When the first token came of those that a watched run has and the queue has not, by run."""
        self.forgotten: set[str] = set()

    def tell(self, message: m.Message) -> None:
        for effect in self.session.step(message, self.now_ns):
            if isinstance(effect, m.SendTokens):
                assert self.queue_up
                assert effect.run_id not in self.forgotten
                self.since_ns.pop(effect.run_id, None)
            elif isinstance(effect, m.SendComplete):
                assert effect.run_id not in self.since_ns, "tokens come before the result"
            elif isinstance(effect, m.WatchTokens):
                self.now_watched(effect)
            elif isinstance(effect, m.Forget):
                self.forgotten.add(effect.run_id)

    def now_watched(self, effect: m.WatchTokens) -> None:
        """Begin anew with a run: what it has is told from the start, or not at all."""
        self.watched.discard(effect.run_id)
        self.since_ns.pop(effect.run_id, None)
        if effect.watched:
            self.watched.add(effect.run_id)
            if effect.run_id in {lease.run_id for lease in self.running}:
                self.since_ns[effect.run_id] = self.now_ns

    def tick(self) -> None:
        """End a wake-up as the runner does: with everything sent that may not wait."""
        self.tell(m.Tick())
        if self.queue_up:
            late = [run_id for run_id, since_ns in self.since_ns.items() if since_ns + TOKEN_WAIT_NS <= self.now_ns]
            assert not late
            wanted_ns = self.session.due_ns(self.now_ns)
            assert not self.since_ns or (
                wanted_ns is not None and self.now_ns < wanted_ns <= self.now_ns + TOKEN_WAIT_NS
            )

    def take(self, leases: list[m.Lease], pick: int) -> m.Lease:
        return leases.pop(pick % len(leases))

    @initialize()
    def queue_comes(self) -> None:
        self.queue_up = True
        self.tell(m.QueueReached())
        self.tell(m.QueueUp(LEASE_NS, 100))
        self.tick()

    @precondition(lambda self: not self.queue_up)
    @rule()
    def queue_comes_back(self) -> None:
        self.queue_comes()

    @precondition(lambda self: self.queue_up)
    @rule()
    def queue_goes(self) -> None:
        self.queue_up = False
        self.recordable.clear()
        self.tell(m.QueueDown())
        self.tick()

    @precondition(lambda self: self.queue_up and len(self.running) < 4)
    @rule(watched=st.booleans())
    def one_begins(self, watched: bool) -> None:
        lease = m.Lease(f"r{next(self.numbers)}", 1, 1)
        self.tell(m.Granted(lease.request_id, "batch", 10, True, 1))
        self.tell(m.Delivered(lease, 1, 50, watched))
        self.tell(m.Tokenized(lease.run_id, 20))
        self.running.append(lease)
        self.tick()

    @precondition(lambda self: self.running)
    @rule(picked=st.lists(picks, min_size=1, max_size=3), ends=st.booleans())
    def some_generate(self, picked: list[int], ends: bool) -> None:
        for pick in picked:
            run_id = self.running[pick % len(self.running)].run_id
            if run_id in self.watched:
                self.since_ns.setdefault(run_id, self.now_ns)
            self.tell(m.EngineTokens(run_id))
        if ends:
            self.one_ends(picked[0])
        self.tick()

    def one_ends(self, pick: int) -> None:
        lease = self.take(self.running, pick)
        if not self.queue_up:
            self.since_ns.pop(lease.run_id, None)  # the queue gets its result alone
        self.tell(m.EngineFinished(lease.run_id, 3, 0))
        self.recordable.append(lease)

    @precondition(lambda self: self.queue_up and self.running)
    @rule(pick=picks, watched=st.booleans())
    def one_is_watched_or_not(self, pick: int, watched: bool) -> None:
        self.tell(m.Watched(self.running[pick % len(self.running)].request_id, watched))
        self.tick()

    @precondition(lambda self: self.queue_up and self.running)
    @rule(pick=picks)
    def one_loses_its_lease(self, pick: int) -> None:
        lease = self.take(self.running, pick)
        self.since_ns.pop(lease.run_id, None)
        self.aborting.append(lease)
        self.tell(m.CancelRun(lease, m.CancelCause.LEASE_LOST))
        self.tick()

    @precondition(lambda self: self.aborting)
    @rule(pick=picks)
    def one_is_aborted(self, pick: int) -> None:
        self.tell(m.EngineAborted(self.take(self.aborting, pick).run_id, 1, 0))
        self.tick()

    @precondition(lambda self: self.queue_up and self.recordable)
    @rule(pick=picks)
    def one_is_recorded(self, pick: int) -> None:
        self.tell(m.Recorded(self.take(self.recordable, pick), True))
        self.tick()

    @rule(passed_ns=st.sampled_from([1, TOKEN_WAIT_NS // 2, TOKEN_WAIT_NS - 1, TOKEN_WAIT_NS]))
    def time_passes(self, passed_ns: int) -> None:
        """Let time pass as the runner does: with a tick when the session wants one."""
        until_ns = self.now_ns + passed_ns
        while (wanted_ns := self.session.due_ns(self.now_ns)) is not None and wanted_ns <= until_ns:
            self.now_ns = wanted_ns
            self.tick()
        self.now_ns = until_ns
        self.tick()


Watching.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestWatching = Watching.TestCase
