"""Whatever the order of events: each reservation is released once, each lease is answered, none outruns its booking."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.core.drain import Drain
from services.worker.core import messages as m
from services.worker.core.lifecycle import State
from services.worker.core.session import Session
from services.worker.core.sizing import Sizes
from tests.support.effort import examples

SIZES = Sizes(capacity_blocks=60, blocks_total=64, block_size=16, max_model_len=512)

REPORT_INTERVAL_NS = 20_000_000

picks = st.integers(0, 1 << 16)


class World(RuleBasedStateMachine):
    """A scheduler, a queue, a tokenizer and an engine that keep books of what the session does."""

    def __init__(self) -> None:
        super().__init__()
        self.session = Session(SIZES)
        self.now_ns = 0
        self.numbers = itertools.count(1)
        self.tokens = itertools.count(1)
        self.epoch = 0
        self.scheduler_up = False
        self.queue_up = False
        self.booked: dict[str, int] = {}
        """What the scheduler believes to be booked."""
        self.granted: dict[str, int] = {}
        self.following: set[str] = set()
        """Requests whose reservations follow their output."""
        self.tell_at: dict[str, int] = {}
        self.claims: list[str] = []
        self.offers: list[str] = []
        """Standing grants that the queue knows of."""
        self.leases: dict[m.Lease, str] = {}
        """Leases and how the queue heard of their end: "", "completed", "given back", "lost"."""
        self.withdrawn: list[str] = []
        """Those that the session wants back."""
        self.tokenizing: list[str] = []
        self.ahead: set[str] = set()
        """Those that will be answered whatever happens."""
        self.engine: list[str] = []
        self.aborts: list[str] = []
        self.left_since = False
        """Whether a run has left the engine outside a step since it last reported one."""
        self.seq = 0

    def tell(self, message: m.Message) -> None:
        self.now_ns += 1_000_000
        for effect in self.session.step(message, self.now_ns):
            handler: Callable[[Any], None] | None = getattr(self, f"on_{type(effect).__name__}", None)
            if handler is not None:
                handler(effect)

    # ---- what the session does ----

    def on_OpenCredits(self, effect: m.OpenCredits) -> None:
        names = [holding.request_id for holding in effect.inventory]
        assert len(names) == len(set(names))
        assert set(names) <= set(self.granted), "nothing is held that was not granted"
        self.booked = {holding.request_id: holding.held_blocks for holding in effect.inventory}

    def on_SendTokenizerAck(self, effect: m.SendTokenizerAck) -> None:
        self.ack(effect)
        if effect.request_id in self.following:
            assert effect.generated_tokens <= effect.reserved_output_tokens <= effect.output_limit_tokens
        else:
            assert effect.held_blocks <= self.booked[effect.request_id], "settling never grows a booking"
        self.booked[effect.request_id] = effect.held_blocks

    def on_SendCompletionAck(self, effect: m.SendCompletionAck) -> None:
        self.ack(effect)
        del self.booked[effect.request_id]  # a second release, or one of nothing, fails here

    def on_SendGrantUsed(self, effect: m.SendGrantUsed) -> None:
        assert self.scheduler_up
        assert effect.epoch == self.epoch
        self.booked[effect.announced] = self.booked.pop(effect.grant)

    def on_SendReport(self, effect: m.SendReport) -> None:
        if self.left_since:
            assert effect.blocks_free in {None, SIZES.blocks_total}, "what it held is not known to be free"
            assert effect.blocks_shared == 0, "it may have been its own"

    def ack(self, effect: m.SendTokenizerAck | m.SendCompletionAck) -> None:
        assert self.scheduler_up
        assert effect.epoch == self.epoch
        assert effect.seq > self.seq
        self.seq = effect.seq

    def on_SendClaim(self, effect: m.SendClaim) -> None:
        assert self.queue_up
        self.claims.append(effect.request_id)

    def on_SendOffer(self, effect: m.SendOffer) -> None:
        assert self.queue_up
        assert effect.grant in self.booked or not self.scheduler_up
        self.offers.append(effect.grant)

    def on_SendWithdraw(self, effect: m.SendWithdraw) -> None:
        assert self.queue_up
        self.withdrawn.append(effect.grant)

    def on_Tokenize(self, effect: m.Tokenize) -> None:
        self.tokenizing.append(effect.run_id)

    def on_DropPrompt(self, effect: m.DropPrompt) -> None:
        if effect.run_id in self.tokenizing and effect.run_id not in self.ahead:
            self.tokenizing.remove(effect.run_id)

    def on_StartEngine(self, effect: m.StartEngine) -> None:
        name = effect.run_id.rpartition(".")[0]
        assert effect.held_blocks <= self.granted[name] or name in self.following
        assert not effect.tell_at_tokens or name in self.following
        self.engine.append(effect.run_id)
        self.tell_at[effect.run_id] = effect.tell_at_tokens

    def on_TellAt(self, effect: m.TellAt) -> None:
        assert effect.tokens == 0 or effect.tokens > self.tell_at[effect.run_id], "progress goes on"
        self.tell_at[effect.run_id] = effect.tokens

    def on_AbortEngine(self, effect: m.AbortEngine) -> None:
        self.aborts.append(effect.run_id)

    def on_SendComplete(self, effect: m.SendComplete) -> None:
        self.answered(effect.run_id, "completed")

    def on_KeepComplete(self, effect: m.KeepComplete) -> None:
        assert not self.queue_up
        assert any(lease.run_id == effect.run_id for lease in self.leases)

    def on_SendGiveBack(self, effect: m.SendGiveBack) -> None:
        for lease in effect.leases:
            self.answered(lease.run_id, "given back")

    def answered(self, run_id: str, how: str) -> None:
        lease = next(lease for lease in self.leases if lease.run_id == run_id)
        assert self.leases[lease] in {"", how}, f"{run_id}: {self.leases[lease]}, then {how}"
        self.leases[lease] = how

    def on_OpenWork(self, effect: m.OpenWork) -> None:
        for lease, how in self.leases.items():
            if lease not in effect.held and how == "":
                self.leases[lease] = "lost"

    # ---- what happens to the session ----

    @initialize()
    def both_peers_come(self) -> None:
        self.scheduler_comes()
        self.queue_comes()

    @precondition(lambda self: not self.scheduler_up)
    @rule()
    def scheduler_comes(self) -> None:
        self.tell(m.SchedulerReached())
        self.epoch += 1
        self.scheduler_up = True
        self.tell(m.SchedulerUp(self.epoch, REPORT_INTERVAL_NS))

    @precondition(lambda self: not self.scheduler_up)
    @rule(events=st.lists(st.tuples(st.sampled_from(["tokenized", "finished", "aborted", "refused"]), picks)))
    def scheduler_comes_slowly(self, events: list[tuple[str, int]]) -> None:
        self.tell(m.SchedulerReached())
        for name, pick in events:
            getattr(self, name)(pick)
        self.epoch += 1
        self.scheduler_up = True
        self.tell(m.SchedulerUp(self.epoch, REPORT_INTERVAL_NS))

    @precondition(lambda self: self.scheduler_up)
    @rule()
    def scheduler_goes(self) -> None:
        self.scheduler_up = False
        self.tell(m.SchedulerDown())

    @precondition(lambda self: not self.queue_up)
    @rule()
    def queue_comes(self) -> None:
        self.claims.clear()
        self.tell(m.QueueReached())
        self.queue_up = True
        self.tell(m.QueueUp(60_000_000_000, 4, takes_offers=True))

    @precondition(lambda self: self.queue_up)
    @rule()
    def queue_goes(self) -> None:
        self.queue_up = False
        self.claims.clear()
        self.offers.clear()
        self.withdrawn.clear()
        self.tell(m.QueueDown())

    @precondition(lambda self: self.scheduler_up)
    @rule(blocks=st.integers(1, 60), settles=st.booleans(), reserve=st.sampled_from([0, 0, 1, 2, 40]))
    def granted_one(self, blocks: int, settles: bool, reserve: int) -> None:
        name = f"r{next(self.numbers)}"
        self.booked[name] = self.granted[name] = blocks
        if settles and reserve:
            self.following.add(name)
        self.tell(m.Granted(name, "batch", blocks, settles, 1, reserve))

    @precondition(lambda self: self.scheduler_up)
    @rule(blocks=st.integers(1, 60), reserve=st.sampled_from([0, 2]))
    def granted_in_advance(self, blocks: int, reserve: int) -> None:
        name = f"standing/{next(self.numbers)}"
        self.booked[name] = self.granted[name] = blocks
        self.tell(m.Granted(name, "batch", blocks, True, 0, reserve, m.Standing("", False, 9, 9, 0)))

    @precondition(lambda self: self.offers)
    @rule(pick=picks, tokens=st.integers(1, 600), watched=st.booleans())
    def met(self, pick: int, tokens: int, watched: bool) -> None:
        grant = self.offers.pop(pick % len(self.offers))
        name = f"r{next(self.numbers)}"
        self.granted[name] = self.granted[grant]
        if self.session._held.by_request[grant].follows_output:
            self.following.add(name)
        lease = m.Lease(name, 1, next(self.tokens))
        self.leases[lease] = ""
        self.tell(m.Delivered(lease, 1, tokens, watched, m.Met(grant, name)))

    @precondition(lambda self: self.withdrawn)
    @rule(pick=picks)
    def had_back(self, pick: int) -> None:
        grant = self.withdrawn.pop(pick % len(self.withdrawn))
        if grant in self.offers:
            self.offers.remove(grant)
            self.tell(m.Refused(grant, False))

    @precondition(lambda self: self.granted)
    @rule(pick=picks)
    def recalled_in_advance(self, pick: int) -> None:
        self.tell(m.Recalled(list(self.granted)[pick % len(self.granted)]))

    @rule(pick=picks)
    def progressed(self, pick: int) -> None:
        waited_for = [run_id for run_id in self.engine if self.tell_at[run_id]]
        if waited_for:
            run_id = waited_for[pick % len(waited_for)]
            self.tell(m.EngineProgress(run_id, self.tell_at[run_id] + pick % 2))

    @rule(pick=picks)
    def recalled(self, pick: int) -> None:
        self.tell(m.Recalled(f"r{pick % 20}"))

    @precondition(lambda self: self.claims)
    @rule(pick=picks, tokens=st.integers(0, 600), n=st.integers(1, 3), watched=st.booleans())
    def delivered(self, pick: int, tokens: int, n: int, watched: bool) -> None:
        name = self.claims.pop(pick % len(self.claims))
        lease = m.Lease(name, 1, next(self.tokens))
        self.leases[lease] = ""
        self.tell(m.Delivered(lease, n, tokens, watched))

    @rule(pick=picks)
    def refused(self, pick: int) -> None:
        if self.claims:
            self.tell(m.Refused(self.claims.pop(pick % len(self.claims)), bool(pick & 1)))

    @rule(pick=picks)
    def tokenized(self, pick: int) -> None:
        if self.tokenizing:
            run_id = self.tokenizing.pop(pick % len(self.tokenizing))
            if pick % 7 == 0:
                self.tell(m.TokenizeFailed(run_id, "invalid_prompt", "no", "prompt", bool(pick & 1)))
            else:
                self.tell(m.Tokenized(run_id, 1 + pick % 550))

    @precondition(lambda self: self.scheduler_up and self.queue_up)
    @rule(pick=picks)
    def one_starts(self, pick: int) -> None:
        """Grant, deliver and tokenize one, which by chance alone follow each other seldom."""
        self.granted_one(60, True, pick % 3)
        if self.claims:
            self.delivered(len(self.claims) - 1, 100, 1, False)
            self.tokenized(pick)

    @precondition(lambda self: self.scheduler_up and self.queue_up)
    @rule(pick=picks)
    def one_of_two_ends(self, pick: int) -> None:
        """Between two steps, as far as the scheduler is told."""
        self.one_starts(pick)
        self.one_starts(pick)
        self.reported(9, 2, 5)
        self.finished(pick)
        self.time_passes(20)

    @rule(pick=picks)
    def goes_ahead(self, pick: int) -> None:
        if self.tokenizing:
            self.ahead.add(self.tokenizing[pick % len(self.tokenizing)])

    @rule(pick=picks)
    def finished(self, pick: int) -> None:
        if self.engine:
            run_id = self.engine.pop(pick % len(self.engine))
            # Of one that is being aborted the answer to that tells.
            self.left_since |= run_id not in self.aborts and (pick % 5 == 0 or not pick & 1)
            if pick % 5 == 0:
                self.tell(m.EngineFailed(run_id, bool(pick & 1), "engine_error", "no"))
            else:
                self.tell(m.EngineFinished(run_id, 3, 0, bool(pick & 1)))

    @rule(pick=picks)
    def aborted(self, pick: int) -> None:
        if self.aborts:
            run_id = self.aborts.pop(pick % len(self.aborts))
            self.engine = [other for other in self.engine if other != run_id]
            self.left_since = True
            self.tell(m.EngineAborted(run_id, 1, 0))

    @precondition(lambda self: self.queue_up and self.leases)
    @rule(pick=picks, cause=st.sampled_from(m.CancelCause))
    def cancelled(self, pick: int, cause: m.CancelCause) -> None:
        lease = list(self.leases)[pick % len(self.leases)]
        if cause is m.CancelCause.LEASE_LOST and self.leases[lease] == "":
            self.leases[lease] = "lost"
        self.tell(m.CancelRun(lease, cause))

    @precondition(lambda self: self.queue_up)
    @rule(pick=picks, accepted=st.booleans())
    def recorded(self, pick: int, accepted: bool) -> None:
        done = [lease for lease, how in self.leases.items() if how == "completed"]
        if done:
            self.tell(m.Recorded(done[pick % len(done)], accepted))

    @rule(free=st.integers(0, 64), running=st.integers(0, 9), shared=st.integers(0, 9))
    def reported(self, free: int, running: int, shared: int) -> None:
        self.left_since = False
        self.tell(m.EngineReported(free, running, 0, 0, 1_000_000, 1 - free / 64, blocks_shared=shared))

    @rule(passed_ms=st.integers(0, 2000))
    def time_passes(self, passed_ms: int) -> None:
        self.now_ns += passed_ms * 1_000_000
        self.tell(m.Tick())
        if self.scheduler_up and passed_ms * 1_000_000 >= REPORT_INTERVAL_NS:
            assert sum(self.booked.values()) == self.session.held_blocks, "growth waits no longer than a report"

    @rule(version=st.integers(0, 9))
    def drain_heard(self, version: int) -> None:
        self.tell(m.DrainHeard(Drain(version, version % 2 == 1)))

    # ---- what must hold ----

    @invariant()
    def no_prompt_waits_that_nobody_wants(self) -> None:
        wanted = {entry.run_id for entry in self.session._held.in_states(State.TOKENIZING)}
        assert set(self.tokenizing) - self.ahead <= wanted

    @invariant()
    def the_ledger_and_the_session_agree(self) -> None:
        if self.scheduler_up:
            told, held = sum(self.booked.values()), self.session.held_blocks
            # Growth waits for company, nothing else does.
            assert told == held or (told < held and self.following)

    @invariant()
    def the_audit_finds_nothing_but_what_this_scheduler_overbooks(self) -> None:
        found = [text for text in self.session.auditor.whole() if "the capacity is" not in text]
        assert not found, found

    def teardown(self) -> None:
        """Stop the worker and answer everything: all must have come home, and an engine that lives has failed none."""
        if not self.scheduler_up:
            self.scheduler_comes()
        if not self.queue_up:
            self.queue_comes()
        completed = [lease for lease, how in self.leases.items() if how == "completed"]
        cancelled = len(self.session._held.in_states(State.CANCELLING))
        self.tell(m.TokenizerDied("killed") if self.now_ns % 2_000_000 else m.GraceOver())
        while self.claims:
            self.refused(0)
        while self.withdrawn:
            self.had_back(0)
        assert not self.offers, "what is offered is taken back at the end"
        while self.aborts:
            self.aborted(0)
        for lease, how in list(self.leases.items()):
            if how == "completed":
                self.tell(m.Recorded(lease, True))
        now_completed = [lease for lease, how in self.leases.items() if how == "completed"]
        self.no_prompt_waits_that_nobody_wants()
        assert len(now_completed) <= len(completed) + cancelled, "what ran is handed back"
        assert self.session.idle
        assert self.booked == {}
        assert all(self.leases.values()), f"a lease was never answered: {self.leases}"


World.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestSession = World.TestCase
