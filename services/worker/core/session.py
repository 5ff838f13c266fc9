"""The session of one worker with scheduler, queue, tokenizer and engine.

It owns every reservation of the worker: from the grant, through the claim, the
settling and the run, to the release; and every lease until its completion is
recorded. Two laws hold whatever order the messages come in:

- each granted reservation is released exactly once: by a `SendCompletionAck`,
  or by not being in the inventory of a later `OpenCredits`;
- each lease is answered: by a `SendComplete` that is repeated on every new Work
  stream until it is recorded, by a `SendGiveBack`, or not at all if it is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.worker.core import messages as m
from services.worker.core.audit import Auditor
from services.worker.core.engine_view import EngineView
from services.worker.core.entry import Counters, Entry
from services.worker.core.lifecycle import IN_ENGINE, ON_OFFER, Input, State
from services.worker.core.messages import Cause, Ending, EndingKind
from services.worker.core.peers import Peers
from services.worker.core.reservations import Reservations
from services.worker.core.sizing import Sizes, covered_tokens, need_blocks, size
from services.worker.core.watchdog import Watchdog

CLAIM_HOLD_NS = 500_000_000
"""How long a grant is kept unclaimed while the queue is unreachable. Long enough for a restarted queue to be
found again; short enough that another worker gets the request soon. Without it, grant and release would chase
each other at the speed of the network."""

OVER_NEED_MEMORY = 1024
"""Requests remembered for having needed more than was booked. The first time a request is handed back, for its
booking may come out better; the second time the attempt fails, so that it cannot go round forever."""

CANCELLED = Ending(EndingKind.CANCELLED, "cancelled", "cancelled by the client")
EXPIRED = Ending(
    EndingKind.EXPIRED, "deadline_exceeded", "the deadline passed before the request ended", "deadline_unix_ns"
)

CAUSE_OF = {
    EndingKind.COMPLETED: Cause.COMPLETED,
    EndingKind.REJECTED: Cause.REJECTED,
    EndingKind.CANCELLED: Cause.CANCELLED,
    EndingKind.EXPIRED: Cause.EXPIRED,
    EndingKind.FAILED: Cause.FAILED,
}


class Session:
    """One worker's reservations and leases. `step` takes a message and returns what to do.

    A `Tick` ends every wake-up; it sends what is gathered (tokens, the engine
    report, renewals) and acts on what has become due.
    """

    def __init__(self, sizes: Sizes, stall_ns: int = 0) -> None:
        """Start with nothing granted, and with neither peer reachable.

        An engine with something in it that makes no step for `stall_ns` is given up; 0 means never.
        """
        self.counters = Counters()
        self.view = EngineView(sizes.blocks_total)
        self._sizes = sizes
        self._over_need: dict[str, None] = {}
        self.watchdog = Watchdog(stall_ns)
        self._out: list[m.Effect] = []
        self._peers = Peers(self._out)
        self._held = Reservations(self._out, self._peers, self.view, self.counters)
        self.auditor = Auditor(self._held, sizes, self.counters, self._out)
        self._handlers: dict[type[Any], Callable[[Any, int], None]] = {
            m.SchedulerReached: self._scheduler_reached,
            m.SchedulerUp: self._scheduler_up,
            m.SchedulerDown: self._scheduler_down,
            m.Granted: self._held.grant,
            m.Recalled: self._recalled,
            m.DrainHeard: self._drain_heard,
            m.QueueReached: self._queue_reached,
            m.QueueUp: self._queue_up,
            m.QueueDown: self._queue_down,
            m.Delivered: self._delivered,
            m.Refused: self._refused,
            m.CancelRun: self._cancel_run,
            m.Recorded: self._recorded,
            m.Watched: self._watched,
            m.Tokenized: self._tokenized,
            m.TokenizeFailed: self._tokenize_failed,
            m.TokenizerDied: self._tokenizer_died,
            m.EngineTokens: self._engine_tokens,
            m.EngineProgress: self._engine_progress,
            m.EngineFinished: self._engine_finished,
            m.EngineFailed: self._engine_failed,
            m.EngineAborted: self._engine_aborted,
            m.EngineReported: self._engine_reported,
            m.EngineDied: self._engine_died,
            m.ShutdownAsked: self._shutdown_asked,
            m.GraceOver: self._grace_over,
            m.Tick: self._tick,
        }

    def step(self, message: m.Message, now_ns: int) -> list[m.Effect]:
        """Take one message at Unix time `now_ns`; return the effects in the order they must happen."""
        self._handlers[type(message)](message, now_ns)
        effects = self._out.copy()
        self._out.clear()
        return effects

    @property
    def idle(self) -> bool:
        """Whether nothing is held, no reservation and no lease, nor is still to be handed back."""
        return not self._held.by_request and not self._held.by_run and not self._peers.owes_queue

    @property
    def held_blocks(self) -> int:
        """Blocks held over all reservations."""
        return sum(entry.held_blocks for entry in list(self._held.by_request.values()))

    def states(self) -> dict[State, int]:
        """Return how many requests are in each state."""
        entries = {id(e): e.state for e in (*self._held.by_request.values(), *self._held.by_run.values())}
        counts = dict.fromkeys(State, 0)
        for state in entries.values():
            counts[state] += 1
        return counts

    def due_ns(self, now_ns: int) -> int | None:
        """Return when a `Tick` is next wanted, if nothing else happens; None if never."""
        times: list[int] = []
        if self._peers.scheduler_up and (self.view.changed or self._peers.growing):
            times.append(self.view.due_ns(self._peers.interval_ns))
        if self._peers.queue_up and self._held.by_run:
            times.append(self._peers.renew_due_ns)
            if (tokens_ns := self._held.token_news.due_ns) is not None:
                times.append(tokens_ns)
        elif not self._peers.queue_up and self._held.unclaimed:
            times.append(next(iter(self._held.unclaimed.values())).granted_ns + CLAIM_HOLD_NS)
        if (look_ns := self.watchdog.due_ns) is not None:
            times.append(look_ns)
        return max(now_ns, min(times)) if times else None

    # ---- scheduler ----

    def _scheduler_reached(self, _: m.SchedulerReached, now_ns: int) -> None:
        # The one before stood by its grants; this one may not know what they are.
        self._held.withdraw(now_ns)
        inventory = tuple(entry.holding() for entry in self._held.by_request.values())
        self._peers.open_credits(inventory, self._held.drain, self._held.leaving)

    def _scheduler_up(self, message: m.SchedulerUp, _: int) -> None:
        self._peers.credits_opened(message.epoch, message.report_interval_ns)
        self.view.forget_told()
        if self._held.leaving:  # it may have begun since the stream was opened
            self._out.append(m.SendLeaving("the worker is ending"))

    def _scheduler_down(self, _: m.SchedulerDown, __: int) -> None:
        self._peers.credits_closed()

    def _recalled(self, message: m.Recalled, now_ns: int) -> None:
        self._held.recall(message.request_id, now_ns)

    def _drain_heard(self, message: m.DrainHeard, now_ns: int) -> None:
        self._held.hear_drain(message.drain, now_ns)

    # ---- queue ----

    def _queue_reached(self, _: m.QueueReached, __: int) -> None:
        self._peers.open_work(self._held.leases())

    def _queue_up(self, message: m.QueueUp, now_ns: int) -> None:
        self._peers.work_opened(message.lease_ns, message.max_inflight, message.takes_offers, now_ns)
        for run_id, entry in self._held.by_run.items():
            if entry.state is State.FINISHING:
                self._out.append(m.SendComplete(run_id, entry.the_ending, entry.credits()))
            elif entry.watched:
                # What the broken stream swallowed is unknown: begin again at offset 0.
                self._watch(run_id, entry, True)
        self._held.claim_what_fits(now_ns)

    def _queue_down(self, _: m.QueueDown, now_ns: int) -> None:
        self._peers.work_closed()
        unanswered = [e for e in self._held.by_request.values() if e.state is State.CLAIMING]
        self._held.return_unclaimed(unanswered, now_ns)
        for entry in self._held.on_offer():
            self._held.move(entry, Input.UNCLAIM, now_ns, Cause.RECALLED)

    def _delivered(self, message: m.Delivered, now_ns: int) -> None:
        entry = self._entry_for(message, now_ns)
        if entry is None:
            self.counters.ignored += 1
            self._held.give_back(message.lease, "the grant is gone")
            self._out.append(m.Forget(message.lease.run_id))
            return
        entry.lease = message.lease
        entry.run_id = run_id = message.lease.run_id
        entry.completions = message.completions
        entry.max_tokens = message.max_tokens
        self._held.by_run[run_id] = entry
        self._held.move(entry, Input.DELIVER, now_ns)
        if self._held.leaving:
            self._held.move(entry, Input.HAND_BACK, now_ns, Cause.LEASE_LOST)
        elif message.watched:
            self._watch(run_id, entry, True)

    def _entry_for(self, message: m.Delivered, now_ns: int) -> Entry | None:
        """Return the reservation that a delivered request has, None if there is none."""
        request_id = message.lease.request_id
        if message.met is None:
            entry = self._held.by_request.get(request_id)
            return entry if entry is not None and entry.state is State.CLAIMING else None
        entry = self._held.by_request.get(message.met.grant)
        if entry is None or entry.state not in ON_OFFER:
            return None
        if request_id in self._held.by_request:
            # The ledger has one booking per request, and an earlier run has not let go of its own.
            self._held.move(entry, Input.REFUSE, now_ns, Cause.RECALLED)
            return None
        self._held.meet(entry, request_id, message.met.announced)
        return entry

    def _refused(self, message: m.Refused, now_ns: int) -> None:
        entry = self._held.by_request.get(message.request_id)
        if entry is None:
            self.counters.ignored += 1
            return
        if entry.state in ON_OFFER:
            self._held.move(entry, Input.REFUSE, now_ns, Cause.RECALLED)
            return
        self.counters.refused_claims += 1
        cause = Cause.UNCLAIMED if message.still_waits else Cause.CLAIM_REFUSED
        self._held.move(entry, Input.REFUSE, now_ns, cause)

    def _cancel_run(self, message: m.CancelRun, now_ns: int) -> None:
        entry = self._held.by_run.get(message.lease.run_id)
        if entry is None:
            self.counters.ignored += 1
        elif message.cause is m.CancelCause.LEASE_LOST:
            self.counters.leases_lost += 1
            self._held.move(entry, Input.LOSE, now_ns, Cause.LEASE_LOST)
        else:
            ending = EXPIRED if message.cause is m.CancelCause.DEADLINE else CANCELLED
            self._held.move(entry, Input.CANCEL, now_ns, CAUSE_OF[ending.kind], ending)

    def _recorded(self, message: m.Recorded, now_ns: int) -> None:
        entry = self._held.by_run.get(message.lease.run_id)
        if entry is None:
            self.counters.ignored += 1
            return
        if not message.accepted:
            self.counters.stale_completions += 1
        self._held.move(entry, Input.RECORD, now_ns)

    def _watched(self, message: m.Watched, _: int) -> None:
        for entry in self._held.in_states(State.TOKENIZING, State.RUNNING):
            if entry.request_id == message.request_id:
                self._watch(entry.run_id, entry, message.watched)
                return
        self.counters.ignored += 1

    def _watch(self, run_id: str, entry: Entry, watched: bool) -> None:
        entry.watched, entry.told = watched, False
        self._out.append(m.WatchTokens(run_id, watched))
        if not watched:
            self._held.token_news.drop(run_id)
        elif entry.state is State.RUNNING:
            self._held.token_news.add(run_id, first=True)

    # ---- tokenizer and engine ----

    def _tokenized(self, message: m.Tokenized, now_ns: int) -> None:
        entry = self._held.by_run.get(message.run_id)
        if entry is None or entry.state is not State.TOKENIZING:
            self.counters.ignored += 1
            return
        need = size(self._sizes, message.prompt_tokens, entry.max_tokens, entry.completions)
        if isinstance(need, Ending):
            self._held.move(entry, Input.END, now_ns, Cause.REJECTED, need)
            return
        if need.blocks > entry.held_blocks and not entry.follows_output:
            self._over_booking(entry, need.blocks, now_ns)
            return
        entry.prompt_tokens = message.prompt_tokens
        entry.max_tokens = need.max_tokens
        if entry.follows_output:
            self._reserve_ahead(entry, 0)
        elif entry.settles:
            entry.held_blocks = need.blocks
            self._peers.settle(entry, need.max_tokens, 0)
        entry.settled_blocks = entry.held_blocks
        self._held.move(entry, Input.FIT, now_ns)

    def _reserve_ahead(self, entry: Entry, generated: int) -> None:
        """Hold what the next output tokens need, and plan when more will be needed.

        The engine takes its blocks whether they are reserved or not, so the scheduler is told and not asked.
        """
        wanted = min(generated + entry.reserve_output_tokens, entry.max_tokens)
        entry.held_blocks = need_blocks(self._sizes, entry.prompt_tokens, wanted, entry.completions)
        covered = covered_tokens(self._sizes, entry.prompt_tokens, entry.held_blocks, entry.completions)
        whole = covered >= entry.max_tokens
        entry.tell_at_tokens = 0 if whole else covered + 1 - entry.reserve_output_tokens
        self._peers.settle(entry, entry.max_tokens if whole else covered, generated)

    def _engine_progress(self, message: m.EngineProgress, _: int) -> None:
        entry = self._running(message.run_id)
        if entry is not None and entry.tell_at_tokens:
            self._reserve_ahead(entry, message.tokens)
            self._out.append(m.TellAt(message.run_id, entry.tell_at_tokens))

    def _over_booking(self, entry: Entry, blocks: int, now_ns: int) -> None:
        """Never run beyond the booking: hand the request back, and fail it the second time."""
        self.counters.over_need += 1
        if entry.request_id in self._over_need:
            text = f"the request needs {blocks} blocks, {entry.held_blocks} were booked, twice"
            ending = Ending(EndingKind.FAILED, "booking_too_small", text)
            self._held.move(entry, Input.END, now_ns, Cause.FAILED, ending)
            return
        self._over_need[entry.request_id] = None
        if len(self._over_need) > OVER_NEED_MEMORY:
            del self._over_need[next(iter(self._over_need))]
        self._held.move(entry, Input.HAND_BACK, now_ns, Cause.LEASE_LOST)

    def _tokenize_failed(self, message: m.TokenizeFailed, now_ns: int) -> None:
        entry = self._held.by_run.get(message.run_id)
        if entry is None or entry.state is not State.TOKENIZING:
            self.counters.ignored += 1
            return
        kind = EndingKind.REJECTED if message.rejected else EndingKind.FAILED
        ending = Ending(kind, message.code, message.message, message.param)
        self._held.move(entry, Input.END, now_ns, CAUSE_OF[kind], ending)

    def _tokenizer_died(self, message: m.TokenizerDied, now_ns: int) -> None:
        """Hand everything back: the engine lives, so no attempt has failed."""
        self._leave(message.reason, now_ns)
        self._hand_back(now_ns, State.TOKENIZING, State.RUNNING)

    def _engine_tokens(self, message: m.EngineTokens, _: int) -> None:
        entry = self._held.by_run.get(message.run_id)
        if entry is not None and entry.watched and entry.state is State.RUNNING:
            self._held.token_news.add(message.run_id, first=not entry.told)
            entry.told = True

    def _engine_finished(self, message: m.EngineFinished, now_ns: int) -> None:
        entry = self._running(message.run_id)
        if entry is None:
            return
        entry.output_tokens = message.output_tokens
        entry.preemptions = message.preemptions
        if not message.step_follows:
            self._left_outside_step()
        self._held.move(entry, Input.END, now_ns, Cause.COMPLETED, Ending(EndingKind.COMPLETED))

    def _engine_failed(self, message: m.EngineFailed, now_ns: int) -> None:
        entry = self._running(message.run_id)
        if entry is None:
            return
        entry.output_tokens = message.output_tokens
        self._left_outside_step()
        kind = EndingKind.REJECTED if message.rejected else EndingKind.FAILED
        ending = Ending(kind, message.code, message.message, message.param)
        self._held.move(entry, Input.END, now_ns, CAUSE_OF[kind], ending)

    def _left_outside_step(self) -> None:
        """Note that a run has left the engine, and that what it held and shared is in no report until the next step."""
        self.view.freed_outside_step()
        self.auditor.moved()

    def _running(self, run_id: str) -> Entry | None:
        """Return the running entry; None if an abort is under way, for its own answer releases the blocks."""
        entry = self._held.by_run.get(run_id)
        if entry is not None and entry.state is State.RUNNING:
            return entry
        self.counters.ignored += 1
        return None

    def _engine_aborted(self, message: m.EngineAborted, now_ns: int) -> None:
        entry = self._held.by_run.get(message.run_id)
        if entry is None:
            self.counters.ignored += 1
            return
        entry.output_tokens = message.output_tokens
        entry.preemptions = message.preemptions
        self._left_outside_step()
        self._held.move(entry, Input.ABORTED, now_ns)

    def _engine_reported(self, message: m.EngineReported, now_ns: int) -> None:
        self.watchdog.stepped()
        self.view.reported(message, now_ns)
        self.auditor.reported(message)
        if not self._held.in_engine:
            self.view.emptied(now_ns)

    def _engine_died(self, message: m.EngineDied, now_ns: int) -> None:
        self._leave(f"the engine is dead: {message.reason}", now_ns)
        ending = Ending(EndingKind.FAILED, "engine_dead", message.reason)
        for entry in list(self._held.by_run.values()):
            if entry.state is State.TOKENIZING:
                self._held.move(entry, Input.HAND_BACK, now_ns, Cause.LEASE_LOST)
            elif entry.state is State.RUNNING:
                self._held.move(entry, Input.END, now_ns, Cause.FAILED, ending)
            elif entry.state in IN_ENGINE:
                self._held.move(entry, Input.ABORTED, now_ns)

    # ---- shell ----

    def _shutdown_asked(self, message: m.ShutdownAsked, now_ns: int) -> None:
        self._leave(message.reason, now_ns)
        self._hand_back(now_ns, State.TOKENIZING)

    def _grace_over(self, _: m.GraceOver, now_ns: int) -> None:
        self._leave("the grace period is over", now_ns)
        self._hand_back(now_ns, State.TOKENIZING, State.RUNNING)

    def _hand_back(self, now_ns: int, *states: State) -> None:
        for entry in self._held.in_states(*states):
            self._held.move(entry, Input.HAND_BACK, now_ns, Cause.LEASE_LOST)

    def _leave(self, reason: str, now_ns: int) -> None:
        """Take nothing new for the rest of this life."""
        if not self._held.leaving and self._peers.scheduler_up:
            self._out.append(m.SendLeaving(reason))
        self._held.leave(now_ns)

    def _tick(self, _: m.Tick, now_ns: int) -> None:
        if self._peers.queue_up:
            self._out.extend(m.SendTokens(run_id) for run_id in self._held.token_news.take(now_ns))
            if now_ns >= self._peers.renew_due_ns:
                self._peers.renew(self._held.leases(), now_ns)
        elif self._held.unclaimed:
            entries = self._held.unclaimed.values()
            self._held.return_unclaimed([e for e in entries if now_ns - e.granted_ns >= CLAIM_HOLD_NS], now_ns)
        self._peers.report(self.view, now_ns)
        self.auditor.tick(now_ns)
        if self.watchdog.look(self._held.in_engine > 0, now_ns):
            silent_s = self.watchdog.stall_ns / 1e9
            self._out.append(m.GiveUpEngine(f"the engine has made no step for {silent_s:g} s, with something in it"))
