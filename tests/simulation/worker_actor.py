"""A worker: the production session between its two peers, a tokenizer and an engine that counts blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.core.value import fields
from services.queue.core import effects as q
from services.queue.core import messages as qm
from services.queue.core.entry import Failure, LeaseRef
from services.queue.core.lifecycle import Outcome
from services.scheduler.core import messages as sm
from services.worker.core import messages as m
from services.worker.core.lifecycle import State
from services.worker.core.session import Session
from services.worker.core.sizing import Sizes
from tests.simulation.coverage import Coverage
from tests.simulation.engine import POISON_EVERY, SimEngine
from tests.simulation.network import DOWN, Network, Stream
from tests.simulation.plan import BLOCK_SIZE, WINDOW, Options
from tests.simulation.queue_actor import QueueActor
from tests.simulation.referee import one_dead_letter
from tests.simulation.scheduler_actor import REPORT_INTERVAL_NS, SchedulerActor, announced, standing
from tests.simulation.world import MS, Process, World, demand

RECONNECT_NS = 30 * MS
RESTART_NS = 150 * MS
SHUTDOWN_GRACE_NS = 300 * MS
FLUSH_NS = 60 * MS
"""How long a worker that ends waits for its last words to be taken."""

DEADLY_EVERY = 29
"""A prompt with one token less than a multiple of this ends the process that renders it, at every attempt."""

MAX_SEQUENCES = 16
ACKS_REMEMBERED = 8

STOPS = {
    q.StopReason.CLIENT: m.CancelCause.CLIENT,
    q.StopReason.DEADLINE: m.CancelCause.DEADLINE,
    q.StopReason.LEASE_LOST: m.CancelCause.LEASE_LOST,
}
OUTCOMES = {
    m.EndingKind.COMPLETED: Outcome.COMPLETED,
    m.EndingKind.REJECTED: Outcome.REJECTED,
    m.EndingKind.CANCELLED: Outcome.CANCELLED,
    m.EndingKind.EXPIRED: Outcome.EXPIRED,
}


class WorkerActor(Process):
    """Steps the production session; a crash loses everything but the worker's name."""

    def __init__(
        self,
        world: World,
        net: Network,
        name: str,
        queue: QueueActor,
        scheduler: SchedulerActor,
        options: Options,
        coverage: Coverage,
    ) -> None:
        """Serve `queue` and `scheduler` once started."""
        super().__init__(world, name)
        self.net, self.queue, self.scheduler = net, queue, scheduler
        self.options = options
        self.coverage = coverage
        self.healed = False
        self._grows = scheduler.policy.reserve_output_tokens > 0
        self.session: Session
        self.engine: SimEngine
        self.work: Stream | None = None
        self.work_number = 0
        self.credits: Stream | None = None
        self.epoch = 0
        self.old_epoch = 0
        self.runs: dict[str, tuple[LeaseRef, Any]] = {}
        self.prompts: set[str] = set()
        """Those that wait for the tokenizer."""
        self.acks: list[Any] = []
        """The last ACKs, for a worker that says everything twice."""
        self.leases: list[LeaseRef] = []
        """The last leases it completed, for one that completes again."""
        self.invented: tuple[sm.Holding, ...] = ()
        """What it will say that it holds and does not, when it next opens a Credits stream."""
        self._to_scheduler: list[Any] = []
        self._due_ns = 0
        self.ending = False

    # ---- life ----

    def boot(self) -> None:
        """Begin a new life with an empty engine."""
        options = self.options
        capacity = options.capacity_blocks
        self.session = Session(Sizes(capacity, capacity, BLOCK_SIZE, WINDOW))
        life = self.life
        self.engine = SimEngine(
            self.world, options, self.coverage, lambda message: self._said(life, message), self._grows
        )
        if self.healed:
            self.engine.failing_share = self.engine.preempting_share = 0.0
        self._reach_queue()
        self._reach_scheduler()

    def _said(self, life: int, message: m.Message) -> None:
        if life == self.life:
            self.post(self.handle, message)

    def died(self) -> None:
        """Lose everything."""
        self.work = self.credits = None
        self.runs.clear()
        self.prompts.clear()
        self.acks.clear()
        self.leases.clear()
        self.invented = ()
        self._to_scheduler.clear()
        self._due_ns = 0
        self.ending = False

    @property
    def instance(self) -> str:
        """Name of this life."""
        return f"{self.name}#{self.life}"

    def crash(self, kept: bool) -> None:
        """kill -9; `kept` if what it had sent still arrives."""
        self.net.kill(self, kept)
        self.stop(RESTART_NS)

    def shut_down(self) -> None:
        """SIGTERM: finish or hand back within the grace period, then end; a supervisor starts it again."""
        if not self.ending:
            self.ending = True
            self.post(self.handle, m.ShutdownAsked("the worker was asked to stop"))
            self.post(self._wind_down, self.world.now_ns() + SHUTDOWN_GRACE_NS)

    def engine_dies(self) -> None:
        """The engine's process is gone: the worker hands back what it has and ends."""
        if not self.ending:
            self.ending = True
            if self.engine.trusts and self.queue.quiet:
                one_dead_letter(self.queue.machine, self.runs, self.engine.runs)
            self.engine.runs.clear()
            self.post(self.handle, m.EngineDied("killed"))
            self.post(self._flush, self.world.now_ns() + FLUSH_NS)

    def tokenizer_dies(self) -> None:
        """The tokenizer is gone, and what would start another: the worker hands back what it has and ends."""
        if not self.ending:
            self.ending = True
            self.prompts.clear()
            self.post(self.handle, m.TokenizerDied("killed"))
            self.post(self._flush, self.world.now_ns() + FLUSH_NS)

    def _wind_down(self, until_ns: int) -> None:
        if self.session.idle or self.world.now_ns() >= until_ns:
            self.handle(m.GraceOver())
            self._flush(self.world.now_ns() + FLUSH_NS)
        else:
            self.timer(10 * MS, self._wind_down, until_ns)

    def _flush(self, until_ns: int) -> None:
        if self.session.idle or self.world.now_ns() >= until_ns:
            self.crash(True)
        else:
            self.timer(10 * MS, self._flush, until_ns)

    # ---- the loop ----

    def handle(self, message: m.Message) -> None:
        """Step the session and do what it says."""
        for effect in self.session.step(message, self.world.now_ns()):
            self._do[type(effect)](self, effect)

    def woke(self) -> None:
        """End a wake-up as the runner does: a Tick, then what is for the scheduler, then a timer."""
        self.handle(m.Tick())
        to_scheduler, self._to_scheduler = self._to_scheduler, []
        for message in to_scheduler:
            if self.credits is not None:
                self.credits.up(message)
        if not self._grows and self.engine.trusts:
            demand(self.session.held_blocks <= self.options.capacity_blocks, f"{self.name} holds more than it has")
        wanted = {entry.run_id for entry in self.session._held.in_states(State.TOKENIZING)}
        demand(self.prompts <= wanted, f"prompts wait at {self.name} that nobody wants")
        due_ns = self.session.due_ns(self.world.now_ns())
        if due_ns is not None and not self.world.now_ns() < self._due_ns <= due_ns:
            self._due_ns = due_ns
            self.timer(due_ns - self.world.now_ns(), _tick)

    # ---- streams ----

    def _reach_queue(self) -> None:
        stream = self.net.connect(self, self.queue)
        number = self.queue.accept(stream) if stream is not None else None
        if stream is None or number is None:
            self.timer(self.world.draw_ns(RECONNECT_NS), self._reach_queue)
            return
        self.work, self.work_number = stream, number
        stream.hear[DOWN] = lambda effect: self.post(self._from_queue, stream, effect)
        stream.over[DOWN] = lambda: self.post(self._queue_lost, stream)
        self.handle(m.QueueReached())

    def _queue_lost(self, stream: Stream) -> None:
        if stream is self.work:
            self.work = None
            self.handle(m.QueueDown())
            self.timer(self.world.draw_ns(RECONNECT_NS), self._reach_queue)

    def _reach_scheduler(self) -> None:
        stream = self.net.connect(self, self.scheduler)
        if stream is None:
            self.timer(self.world.draw_ns(RECONNECT_NS), self._reach_scheduler)
            return
        self.scheduler.accept(stream)
        self.credits = stream
        self._to_scheduler.clear()
        stream.hear[DOWN] = lambda effect: self.post(self._from_scheduler, stream, effect)
        stream.over[DOWN] = lambda: self.post(self._scheduler_lost, stream)
        self.handle(m.SchedulerReached())

    def _scheduler_lost(self, stream: Stream) -> None:
        if stream is self.credits:
            self.credits = None
            self.handle(m.SchedulerDown())
            self.timer(self.world.draw_ns(RECONNECT_NS), self._reach_scheduler)

    def _from_scheduler(self, stream: Stream, effect: Any) -> None:
        if stream is not self.credits:
            return
        self.world.note(self.name, "hears", effect)
        if isinstance(effect, int):
            self.old_epoch, self.epoch = self.epoch, effect
            self.handle(m.SchedulerUp(effect, REPORT_INTERVAL_NS))
        elif isinstance(effect, sm.Grant):
            self.handle(
                m.Granted(
                    effect.request_id, effect.channel, effect.booked_blocks, effect.settles, effect.attempt,
                    effect.reserve_output_tokens, standing(effect.standing) if effect.standing else None,
                    effect.completions, effect.guaranteed, effect.last_attempt,
                )
            )  # fmt: skip
        elif isinstance(effect, sm.Recall):
            self.handle(m.Recalled(effect.request_id))
        elif isinstance(effect, sm.TellDrain):
            self.handle(m.DrainHeard(effect.drain))

    def _from_queue(self, stream: Stream, effect: Any) -> None:
        if stream is not self.work:
            return
        self.world.note(self.name, "hears", effect)
        if isinstance(effect, q.WorkOpened):
            self.handle(m.QueueUp(self.options.lease_ms * MS, self.options.max_inflight, True))
        elif isinstance(effect, q.Deliver):
            self._delivered(effect)
        elif isinstance(effect, q.Refused):
            self.handle(m.Refused(effect.request_id, effect.reason is q.RefusedReason.TOO_MANY))
        elif isinstance(effect, q.StopRun):
            if effect.reason is q.StopReason.LEASE_LOST:
                self._note_loss(effect.lease)
            self.handle(m.CancelRun(_worker_lease(effect.lease), STOPS[effect.reason]))
        elif isinstance(effect, q.Recorded):
            if not effect.accepted:
                self.coverage.happened("stale completion refused", effect.lease.request_id)
            self.handle(m.Recorded(_worker_lease(effect.lease), effect.accepted))
        elif isinstance(effect, q.TokensWatched):
            self.handle(m.Watched(effect.request_id, effect.watched))

    def _delivered(self, effect: q.Deliver) -> None:
        lease = _worker_lease(effect.lease)
        self.runs[lease.run_id] = (effect.lease, effect.meta)
        met = m.Met(effect.grant, _announced(effect)) if effect.grant else None
        self.handle(m.Delivered(lease, effect.meta.n, effect.meta.max_tokens, effect.watched, met))
        if met is not None:
            self.coverage.happened("standing grant met", lease.request_id)

    def _note_loss(self, lease: LeaseRef) -> None:
        held = self.session._held.by_run.get(_worker_lease(lease).run_id)
        if held is not None:
            self.coverage.lost(held.state)

    # ---- effects: scheduler ----

    def _open_credits(self, effect: m.OpenCredits) -> None:
        shape = sm.EngineShape(self.options.capacity_blocks, BLOCK_SIZE, WINDOW, MAX_SEQUENCES)
        held = tuple(sm.Holding(*holding) for holding in effect.inventory)
        names = {holding.request_id for holding in held}  # the wire refuses a name that is listed twice
        inventory = (*held, *(holding for holding in self.invented if holding.request_id not in names))
        self.invented = ()
        if self.credits is not None:
            opened = sm.WorkerOpened(0, self.name, self.instance, ("sim",), shape, inventory, True, True)
            self.credits.up(opened.replace(drain=effect.drain, leaving=effect.leaving))

    def _ack(self, ack: sm.TokenizerAck | sm.CompletionAck | sm.GrantUsed) -> None:
        self._to_scheduler.append(ack)
        self.acks = [*self.acks[-ACKS_REMEMBERED:], ack]

    def _tokenizer_ack(self, ack: m.SendTokenizerAck) -> None:
        # The last token's KV is never written, and the next step has not begun.
        written = ack.prompt_tokens + ack.generated_tokens - 1
        demand(ack.held_blocks * BLOCK_SIZE >= written, "the engine holds more than is reserved")
        self._ack(
            sm.TokenizerAck(
                0, ack.epoch, ack.request_id, ack.seq, ack.held_blocks, ack.prompt_tokens, ack.generated_tokens,
                ack.output_limit_tokens,
            )
        )  # fmt: skip

    def _completion_ack(self, ack: m.SendCompletionAck) -> None:
        cause = sm.ReleaseCause[ack.cause.name]
        self._ack(sm.CompletionAck(0, ack.epoch, ack.request_id, ack.seq, cause, ack.output_tokens))

    def _grant_used(self, used: m.SendGrantUsed) -> None:
        self._ack(sm.GrantUsed(0, used.epoch, used.grant, used.announced))

    def _report(self, report: m.SendReport) -> None:
        self._to_scheduler.append(sm.EngineReport(0, **fields(report)))

    def _leaving(self, effect: m.SendLeaving) -> None:
        self._to_scheduler.append(sm.WorkerLeaving(0, effect.reason))

    # ---- effects: queue ----

    def up_work(self, message: qm.Message) -> None:
        """Send on the Work stream, if there is one."""
        if self.work is not None:
            self.work.up(message)

    def _open_work(self, effect: m.OpenWork) -> None:
        held = tuple(map(_queue_lease, effect.held))
        self.up_work(qm.WorkerOpened(self.work_number, self.name, self.instance, held))

    def _claim(self, effect: m.SendClaim) -> None:
        self.up_work(qm.Claim(self.work_number, effect.request_id))

    def _offer(self, effect: m.SendOffer) -> None:
        self.up_work(qm.Offer(self.work_number, effect.grant, effect.channel, **fields(effect.standing)))

    def _withdraw(self, effect: m.SendWithdraw) -> None:
        self.up_work(qm.Withdraw(self.work_number, effect.grant))

    def _renew(self, effect: m.SendRenew) -> None:
        self.up_work(qm.Renew(self.work_number, tuple(map(_queue_lease, effect.leases))))

    def _give_back(self, effect: m.SendGiveBack) -> None:
        self.up_work(qm.GiveBack(self.work_number, tuple(map(_queue_lease, effect.leases))))

    def _complete(self, effect: m.SendComplete) -> None:
        lease, _ = self.runs[effect.run_id]
        ending = effect.ending
        failure = Failure(ending.code, ending.message, ending.param) if ending.code else None
        self.leases = [*self.leases[-ACKS_REMEMBERED:], lease]
        self.up_work(qm.Complete(self.work_number, lease, OUTCOMES.get(ending.kind), failure, None))

    # ---- effects: tokenizer and engine ----

    def _tokenize(self, effect: m.Tokenize) -> None:
        self.prompts.add(effect.run_id)
        self.timer(self.world.draw_ns(self.options.tokenizer_ms * MS), self._tokenized, effect.run_id)

    def _tokenized(self, run_id: str) -> None:
        if run_id not in self.prompts:
            return
        self.prompts.discard(run_id)
        # The client's reference says how long its prompt really is.
        _, meta = self.runs[run_id]
        tokens = int(meta.client_reference)
        if (tokens + 1) % DEADLY_EVERY:
            self.handle(m.Tokenized(run_id, tokens))
        else:
            self.coverage.at("prompt ends its tokenizer", "leased")
            self.handle(m.TokenizeFailed(run_id, "tokenizer_error", "signal 9", "prompt", rejected=False))

    def _drop_prompt(self, effect: m.DropPrompt) -> None:
        self.prompts.discard(effect.run_id)

    def _start(self, effect: m.StartEngine) -> None:
        self.engine.start(effect)
        if not (int(self.runs[effect.run_id][1].client_reference) + 2) % POISON_EVERY:
            self.timer(self.world.draw_ns(self.options.tokenizer_ms * MS), self._poisoned, effect.run_id)

    def _poisoned(self, run_id: str) -> None:
        if run_id in self.engine.runs and not self.ending:
            self.coverage.at("run ends its engine", "running")
            self.engine_dies()

    def _tell_at(self, effect: m.TellAt) -> None:
        self.engine.tell_at(effect.run_id, effect.tokens)

    def _abort(self, effect: m.AbortEngine) -> None:
        self.engine.abort(effect.run_id)
        aborted = m.EngineAborted(effect.run_id, 0, 0)
        self.timer(self.world.draw_ns(self.options.abort_ms * MS), self.handle, aborted)

    def _forget(self, effect: m.Forget) -> None:
        self.runs.pop(effect.run_id, None)

    def _audit_failed(self, effect: m.AuditFailed) -> None:
        demand(not self.engine.trusts, f"the audit of {self.name}: {effect.violations}")

    def _ignore(self, effect: Any) -> None:
        """Token deltas, and what the shell keeps, are nothing the simulation looks at."""

    _do: dict[type, Callable[[WorkerActor, Any], None]] = {  # noqa: RUF012
        m.OpenCredits: _open_credits,
        m.SendTokenizerAck: _tokenizer_ack,
        m.SendCompletionAck: _completion_ack,
        m.SendReport: _report,
        m.SendLeaving: _leaving,
        m.OpenWork: _open_work,
        m.SendGrantUsed: _grant_used,
        m.SendClaim: _claim,
        m.SendOffer: _offer,
        m.SendWithdraw: _withdraw,
        m.SendRenew: _renew,
        m.SendGiveBack: _give_back,
        m.SendComplete: _complete,
        m.Tokenize: _tokenize,
        m.DropPrompt: _drop_prompt,
        m.StartEngine: _start,
        m.TellAt: _tell_at,
        m.AbortEngine: _abort,
        m.Forget: _forget,
        m.AuditFailed: _audit_failed,
        m.WatchTokens: _ignore,
        m.SendTokens: _ignore,
        m.KeepComplete: _ignore,
    }


def _tick() -> None:
    """Wake up for what is due; the wake-up itself does it."""


def _queue_lease(lease: m.Lease) -> LeaseRef:
    return LeaseRef(lease.request_id, lease.attempt, lease.fencing_token)


def _announced(effect: q.Deliver) -> sm.Announced:
    return announced(q.Announce(0, effect.lease.request_id, effect.seq, effect.lease.attempt, effect.meta))


def _worker_lease(lease: LeaseRef) -> m.Lease:
    return m.Lease(lease.request_id, lease.attempt, lease.fencing_token)
