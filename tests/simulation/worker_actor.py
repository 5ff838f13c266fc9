"""A worker's session with an engine that only counts blocks."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from services.queue.core import effects as q
from services.queue.core import messages as qm
from services.queue.core.entry import Failure, LeaseRef
from services.queue.core.lifecycle import Outcome
from services.scheduler.core import messages as sm
from services.worker.core import messages as m
from services.worker.core.session import Session
from services.worker.core.sizing import Sizes
from tests.simulation.queue_actor import QueueActor
from tests.simulation.scheduler_actor import SchedulerActor
from tests.simulation.world import MS, Stream, World

RECONNECT_NS = 20 * MS
RESTART_NS = 150 * MS
TICK_NS = 20 * MS
BLOCK_SIZE = 16
WINDOW = 512
CAPACITY = 80
PREEMPTION_SHARE = 0.02
"""Reports in which an engine has preempted although its blocks would do: the scheduler cannot know better."""

STOPS = {1: m.CancelCause.CLIENT, 2: m.CancelCause.DEADLINE, 3: m.CancelCause.LEASE_LOST}
OUTCOMES = {
    m.EndingKind.COMPLETED: Outcome.COMPLETED,
    m.EndingKind.REJECTED: Outcome.REJECTED,
    m.EndingKind.CANCELLED: Outcome.CANCELLED,
    m.EndingKind.EXPIRED: Outcome.EXPIRED,
}


class Output(NamedTuple):
    """How many tokens a run will generate, from when, in how long."""

    tokens: int
    started_ns: int
    duration_ns: int


class WorkerActor:
    """Steps the production session; crashes lose everything but the worker's name."""

    def __init__(
        self, world: World, name: str, queue: QueueActor, scheduler: SchedulerActor, failing_share: float
    ) -> None:
        """Start, and connect to both peers."""
        self.world, self.name, self.queue, self.scheduler = world, name, queue, scheduler
        self.failing_share = failing_share
        self.life = 0
        self.up = False
        self.seen = Counter[str]()
        self.partitioned_until_ns = 0
        self.start()

    def start(self) -> None:
        """Begin a new life with an empty engine."""
        self.session = Session(Sizes(CAPACITY, CAPACITY, BLOCK_SIZE, WINDOW))
        self.runs: dict[str, tuple[LeaseRef, Any]] = {}
        self.engine: dict[str, int] = {}
        self.outputs: dict[str, Output] = {}
        self.preemptions = 0
        self.work: Stream | None = None
        self.credits: Stream | None = None
        self.up = True
        self.life += 1
        self._tick(self.life)
        self._reach_queue(self.life)
        self._reach_scheduler(self.life)

    @property
    def follows_output(self) -> bool:
        """Whether reservations grow with the output, so that the engine may run out of blocks."""
        return self.scheduler.policy.reserve_output_tokens > 0

    @property
    def instance(self) -> str:
        """Name of this life."""
        return f"{self.name}#{self.life}"

    def _tick(self, life: int) -> None:
        if self.up and life == self.life:
            self.handle(m.Tick())
            self.world.after(TICK_NS, lambda: self._tick(life))

    def crash(self) -> None:
        """kill -9."""
        if not self.up:
            return
        self.world.note(f"{self.name}: crashes")
        self.seen["worker crash"] += 1
        self.up = False
        for stream in (self.work, self.credits):
            if stream is not None:
                stream.cut(1)
                stream.close()
        self.world.after(RESTART_NS, self.start)

    def partition(self, duration_ns: int) -> None:
        """Cut the worker off from the queue for a while; it goes on working."""
        self.world.note(f"{self.name}: cut off from the queue for {duration_ns / MS:.0f} ms")
        self.seen["partition"] += 1
        self.partitioned_until_ns = self.world.now_ns + duration_ns
        if self.work is not None:
            self.work.close()

    def handle(self, message: m.Message) -> None:
        """Step the session and do what it says."""
        if not self.up:
            return
        for effect in self.session.step(message, self.world.now_ns):
            self._do(effect)
        if not self.follows_output:
            assert self.session.held_blocks <= CAPACITY, f"{self.name} holds more than it has"
            assert sum(self.engine.values()) <= CAPACITY, f"{self.name}'s engine would have to preempt"

    # ---- streams ----

    def _reach_queue(self, life: int) -> None:
        if not self.up or life != self.life or self.work is not None:
            return
        queue = self.queue
        stream = Stream(self.world, queue.handle, self._from_queue)
        number = None if self.world.now_ns < self.partitioned_until_ns else queue.connect(stream)
        if number is None:
            self.world.after(RECONNECT_NS, lambda: self._reach_queue(life))
            return
        self.work, self.work_number = stream, number

        def queue_side_ends() -> None:
            queue.streams.pop(number, None)
            queue.handle(qm.WorkerClosed(number))

        def lost() -> None:
            if self.up and life == self.life:
                self.work = None
                self.handle(m.QueueDown())
                self.world.after(RECONNECT_NS, lambda: self._reach_queue(life))

        stream.on_close(queue_side_ends, lost)
        self.handle(m.QueueReached())

    def _reach_scheduler(self, life: int) -> None:
        if not self.up or life != self.life or self.credits is not None:
            return
        scheduler = self.scheduler
        stream = Stream(self.world, scheduler.handle, self._from_scheduler)
        epoch = scheduler.connect(stream)
        if epoch is None:
            self.world.after(RECONNECT_NS, lambda: self._reach_scheduler(life))
            return
        self.credits, self.epoch = stream, epoch

        def scheduler_side_ends() -> None:
            scheduler.workers.pop(epoch, None)
            scheduler.handle(sm.WorkerClosed(epoch))

        def lost() -> None:
            if self.up and life == self.life:
                self.credits = None
                self.handle(m.SchedulerDown())
                self.world.after(RECONNECT_NS, lambda: self._reach_scheduler(life))

        stream.on_close(scheduler_side_ends, lost)
        self.handle(m.SchedulerReached())

    def _from_scheduler(self, effect: Any) -> None:
        if isinstance(effect, m.SchedulerUp):
            self.handle(effect)
        elif isinstance(effect, sm.Grant):
            self.handle(
                m.Granted(
                    effect.request_id, effect.channel, effect.booked_blocks, effect.settles, effect.attempt,
                    effect.reserve_output_tokens,
                )
            )  # fmt: skip
        elif isinstance(effect, sm.Recall):
            self.handle(m.Recalled(effect.request_id))
        elif isinstance(effect, sm.Drain):
            self.handle(m.DrainAsked("operator"))

    def _from_queue(self, effect: Any) -> None:
        if isinstance(effect, q.WorkOpened):
            self.handle(m.QueueUp(2_000 * MS, 64))
        elif isinstance(effect, q.Deliver):
            lease = m.Lease(*effect.lease)
            self.runs[lease.run_id] = (effect.lease, effect.meta)
            self.handle(m.Delivered(lease, effect.meta.n, effect.meta.max_tokens, effect.watched))
        elif isinstance(effect, q.Refused):
            self.handle(m.Refused(effect.request_id, effect.reason is q.RefusedReason.TOO_MANY))
        elif isinstance(effect, q.StopRun):
            self.seen[f"stop {effect.reason.name}"] += 1
            self.handle(m.CancelRun(m.Lease(*effect.lease), STOPS[effect.reason.value]))
        elif isinstance(effect, q.Recorded):
            self.seen["stale completion" if not effect.accepted else "recorded"] += 1
            self.handle(m.Recorded(m.Lease(*effect.lease), effect.accepted))

    # ---- effects ----

    def _do(self, effect: Any) -> None:
        handler = getattr(self, f"_do_{type(effect).__name__}", None)
        if handler is not None:
            handler(effect)

    def _up_credits(self, message: Any) -> None:
        if self.credits is not None:
            self.credits.up(message)
            if self.world.chance(0.05):
                self.seen["duplicate ACK"] += 1
                self.credits.up(message)

    def _up_work(self, message: Any) -> None:
        if self.work is not None:
            self.work.up(message)

    def _do_OpenCredits(self, effect: m.OpenCredits) -> None:
        shape = sm.EngineShape(CAPACITY, BLOCK_SIZE, WINDOW, 16)
        inventory = tuple(sm.Holding(*holding) for holding in effect.inventory)
        if self.credits is not None:
            self.credits.up(sm.WorkerOpened(self.epoch, self.name, self.instance, ("sim",), shape, inventory))
            self.credits.down(m.SchedulerUp(self.epoch, 20 * MS))

    def _do_SendTokenizerAck(self, ack: m.SendTokenizerAck) -> None:
        # The last token's KV is never written, and the next step has not begun.
        written = ack.prompt_tokens + ack.generated_tokens - 1
        assert ack.held_blocks * BLOCK_SIZE >= written, "the engine holds more than is reserved"
        self.seen["reservation grown"] += ack.generated_tokens > 0
        self._up_credits(
            sm.TokenizerAck(
                self.epoch, ack.epoch, ack.request_id, ack.seq, ack.held_blocks, ack.prompt_tokens,
                ack.generated_tokens, ack.output_limit_tokens,
            )
        )  # fmt: skip

    def _do_SendCompletionAck(self, ack: m.SendCompletionAck) -> None:
        cause = sm.ReleaseCause[ack.cause.name]
        self._up_credits(sm.CompletionAck(self.epoch, ack.epoch, ack.request_id, ack.seq, cause, ack.output_tokens))

    def _do_SendReport(self, report: m.SendReport) -> None:
        self._up_credits(sm.EngineReport(self.epoch, *report))

    def _do_SendDraining(self, effect: m.SendDraining) -> None:
        self._up_credits(sm.WorkerDraining(self.epoch, effect.reason))

    def _do_OpenWork(self, effect: m.OpenWork) -> None:
        held = tuple(LeaseRef(*lease) for lease in effect.held)
        self._up_work(qm.WorkerOpened(self.work_number, self.name, self.instance, held))

    def _do_SendClaim(self, effect: m.SendClaim) -> None:
        self._up_work(qm.Claim(self.work_number, effect.request_id))

    def _do_SendRenew(self, effect: m.SendRenew) -> None:
        self._up_work(qm.Renew(self.work_number, tuple(LeaseRef(*lease) for lease in effect.leases)))

    def _do_SendGiveBack(self, effect: m.SendGiveBack) -> None:
        self._up_work(qm.GiveBack(self.work_number, tuple(LeaseRef(*lease) for lease in effect.leases)))

    def _do_SendComplete(self, effect: m.SendComplete) -> None:
        lease, _ = self.runs[effect.run_id]
        ending = effect.ending
        failure = Failure(ending.code, ending.message, ending.param) if ending.code else None
        outcome = OUTCOMES.get(ending.kind)
        self._up_work(qm.Complete(self.work_number, lease, outcome, failure, None))

    def _do_Tokenize(self, effect: m.Tokenize) -> None:
        _, meta = self.runs[effect.run_id]
        self._later(m.Tokenized(effect.run_id, meta.prompt_bytes // 4 + 1))

    def _do_StartEngine(self, effect: m.StartEngine) -> None:
        run_id, life = effect.run_id, self.life
        self.engine[run_id] = effect.held_blocks
        duration_ns = self.world.rng.randint(1, 400) * MS
        tokens = self.world.rng.randint(1, effect.max_tokens) if self.follows_output else effect.max_tokens
        self.outputs[run_id] = Output(tokens, self.world.now_ns, duration_ns)
        self._report()
        self._tell_at(run_id, effect.tell_at_tokens)

        def finish() -> None:
            if self.up and life == self.life and run_id in self.engine:
                del self.engine[run_id]
                del self.outputs[run_id]
                self._report()
                if self.world.chance(self.failing_share):
                    self.seen["engine failure"] += 1
                    self.handle(m.EngineFailed(run_id, False, "engine_error", "the engine gave up"))
                else:
                    self.handle(m.EngineFinished(run_id, tokens, 0))

        self.world.after(duration_ns, finish)

    def _do_TellAt(self, effect: m.TellAt) -> None:
        self._tell_at(effect.run_id, effect.tokens)

    def _tell_at(self, run_id: str, tokens: int) -> None:
        """Tell of the run's progress when it has generated so many tokens, if it gets that far."""
        output, life = self.outputs[run_id], self.life
        if not 0 < tokens < output.tokens:
            return

        def arrive() -> None:
            if self.up and life == self.life and run_id in self.engine:
                self.engine[run_id] += 1
                self._report()
                self.handle(m.EngineProgress(run_id, tokens))

        self.world.at(output.started_ns + output.duration_ns * tokens // output.tokens, arrive)

    def _report(self) -> None:
        """Say how full the engine is; one that needs more blocks than it has preempts."""
        used = sum(self.engine.values())
        preempts = used > CAPACITY or (self.follows_output and self.world.chance(PREEMPTION_SHARE))
        if preempts:
            self.preemptions += 1
            self.seen["preemption"] += 1
        free, waiting = max(CAPACITY - used, 0), int(preempts)
        self.handle(m.EngineReported(free, len(self.engine), waiting, self.preemptions, 0, 1 - free / CAPACITY))

    def _do_AbortEngine(self, effect: m.AbortEngine) -> None:
        self.seen["abort"] += 1
        self.engine.pop(effect.run_id, None)
        self.outputs.pop(effect.run_id, None)
        self._later(m.EngineAborted(effect.run_id, 0, 0))

    def _do_Forget(self, effect: m.Forget) -> None:
        self.runs.pop(effect.run_id, None)

    def _later(self, message: m.Message) -> None:
        life = self.life

        def arrive() -> None:
            if life == self.life:
                self.handle(message)

        self.world.after(self.world.delay_ns(), arrive)
