"""One loop around the session: everything that is ready goes in, and what it asks for is done.

The runner owns the attempts' data (`Run`); the session owns their lives. One
wake-up takes all messages that have arrived, then a `Tick` that sends what was
gathered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from penstock.queue.v1 import queue_pb2 as q
from penstock.scheduler.v1 import scheduler_pb2 as s
from services.clock import Clock
from services.worker import wire
from services.worker.alarm import Alarm
from services.worker.completions import Completions
from services.worker.core import messages as m
from services.worker.core.messages import EndingKind
from services.worker.core.session import Session
from services.worker.engine import (
    Engine,
    EngineDeadError,
    EngineStep,
    Rendered,
    RequestRefusedError,
    StepTokens,
    Tokenizer,
)
from services.worker.gen_ai import RunSpans
from services.worker.metrics import WorkerMetrics
from services.worker.run import UNREADABLE, UNWRITABLE, Run
from services.worker.tokenizer import Answer

log = logging.getLogger("worker")


class Identity(NamedTuple):
    """Who this worker is."""

    worker_id: str
    instance_id: str
    capacity_blocks: int


class SchedulerStream(Protocol):
    """The Credits link as the runner uses it."""

    def open(self, message: s.WorkerToScheduler) -> None:
        """Open the stream."""

    def send(self, message: s.WorkerToScheduler | bytes) -> None:
        """Send on the stream."""


class QueueStream(Protocol):
    """The Work link as the runner uses it."""

    def open(self, message: q.WorkerToQueue) -> None:
        """Open the stream."""

    def send(self, message: q.WorkerToQueue | bytes) -> None:
        """Send on the stream."""

    def send_later(self, make: Callable[[], bytes]) -> None:
        """Send on the stream what `make` returns when its turn has come."""


class _Grant(NamedTuple):
    """What a grant's span needs to know of it."""

    traceparent: str
    claimed_ns: int


class Runner:
    """Feeds the session and carries out its effects."""

    def __init__(
        self,
        identity: Identity,
        session: Session,
        engine: Engine,
        tokenizer: Tokenizer,
        clock: Clock,
        metrics: WorkerMetrics,
        spans: RunSpans,
    ) -> None:
        """Bind the parts together; `connect` adds the links."""
        self._identity = identity
        self._session = session
        self._engine = engine
        self._shape = engine.shape
        self._tokenizer = tokenizer
        self._clock = clock
        self._metrics = metrics
        self._spans = spans
        self._traced = spans.enabled
        """Asked here: where spans lead nowhere, a request does not even ask."""
        self._inbox: list[m.Message] = []
        self._ready = asyncio.Event()
        self._alarm = Alarm(self._ready.set)
        self._runs: dict[str, Run] = {}
        self.completions = Completions()
        """Of runs that have ended, until they are recorded."""
        self._grants: dict[str, _Grant] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._to_scheduler: list[s.WorkerToScheduler | bytes] = []
        """Sent at the end of a wake-up, behind what the queue is waiting for: claims and completions."""
        self._scheduler: SchedulerStream
        self._queue: QueueStream
        self.dead_reason = ""
        """Why the engine or the tokenizer died; empty while they live."""
        self.dead = asyncio.Event()
        """Set with it."""
        self.idle = asyncio.Event()
        """Set while nothing is held."""
        self._do: dict[type[Any], Callable[[Any, int], None]] = {
            m.OpenCredits: self._open_credits,
            m.SendTokenizerAck: self._send_tokenizer_ack,
            m.SendCompletionAck: self._send_completion_ack,
            m.SendReport: lambda e, _: self._to_scheduler.append(wire.engine_report(e)),
            m.SendLeaving: lambda e, _: self._to_scheduler.append(wire.leaving(e.reason)),
            m.OpenWork: self._open_work,
            m.SendGrantUsed: lambda e, _: self._to_scheduler.append(wire.grant_used(e)),
            m.SendClaim: self._send_claim,
            m.SendOffer: lambda e, _: self._queue.send(wire.offer(e)),
            m.SendWithdraw: lambda e, _: self._queue.send(wire.withdraw(e.grant)),
            m.WatchTokens: self._watch_tokens,
            m.SendTokens: self._send_tokens,
            m.SendComplete: self._send_complete,
            m.KeepComplete: self._finish,
            m.SendRenew: lambda e, _: self._queue.send(wire.renew(e.leases)),
            m.SendGiveBack: lambda e, _: self._queue.send(wire.give_back(e.leases, e.reason)),
            m.Tokenize: self._tokenize,
            m.DropPrompt: lambda e, _: self._tokenizer.forget(e.run_id),
            m.StartEngine: self._start_engine,
            m.TellAt: self._tell_at,
            m.AbortEngine: self._abort_engine,
            m.GiveUpEngine: lambda e, _: self.died(e.reason),
            m.Forget: self._forget,
            m.AuditFailed: _report_audit,
        }

    def connect(self, scheduler: SchedulerStream, queue: QueueStream) -> None:
        """Set the links; before `run`."""
        self._scheduler = scheduler
        self._queue = queue

    def post(self, message: m.Message) -> None:
        """Put a message before the session and wake the loop."""
        if not self._inbox:
            self._ready.set()
        self._inbox.append(message)

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            while True:
                self._wake_up()
                await self._wait()
        finally:
            self._alarm.cancel()

    def _wake_up(self) -> None:
        now_ns = self._clock.now_ns()
        inbox, self._inbox = self._inbox, []
        self._ready.clear()
        # Of any type: compiled, each would be tried against every kind of message and effect that there is.
        messages: tuple[Any, ...] = (*inbox, m.Tick())
        for message in messages:
            effects: list[Any] = self._session.step(message, now_ns)
            for effect in effects:
                self._do[type(effect)](effect, now_ns)
        for told in self._to_scheduler:
            self._scheduler.send(told)
        self._to_scheduler.clear()
        if self._session.idle:
            self.idle.set()
        else:
            self.idle.clear()

    async def _wait(self) -> None:
        """Wait for a message or for what the session has planned."""
        now_ns = self._clock.now_ns()
        due_ns = self._session.due_ns(now_ns)
        if due_ns is not None:
            self._alarm.within((due_ns - now_ns) / 1e9)
        await self._ready.wait()

    # ---- what arrives ----

    def grant_arrived(self, grant: s.Grant) -> None:
        """Take a grant; of its trace keep what spans need."""
        if self._traced:
            self._grants[grant.request_id] = _Grant(grant.traceparent, 0)
        self.post(wire.granted(grant))

    def deliver_arrived(self, deliver: q.Deliver) -> None:
        """Keep the request of a Deliver, and tell the session of it."""
        request = deliver.request
        delivered = wire.delivered(deliver)
        lease, met = delivered.lease, delivered.met
        now_ns = self._clock.now_ns()
        run_id = lease.run_id
        run = Run(lease, run_id, request, deliver.submitted_unix_ns, now_ns, self._shape.tells_reasoning)
        grant = self._grants.pop(lease.request_id if met is None else met.grant, None)
        if grant is not None and met is None:
            self._spans.claimed(lease.request_id, grant.traceparent, grant.claimed_ns or now_ns, now_ns)
        self._runs[run_id] = run
        self.post(delivered)

    def tokenized(self, run_id: str, answer: Answer) -> None:
        """Take an answer of the tokenizer."""
        run = self._runs.get(run_id)
        if run is None:
            return
        run.tokenized_ns = self._clock.now_ns()
        self._metrics.tokenizer.observe((run.tokenized_ns - run.delivered_ns) / 1e9)
        if isinstance(answer, Rendered):
            run.prompt_ids = answer.token_ids
            run.prompt_text = answer.text
            if self._traced:
                self._spans.tokenized(run)
            self.post(m.Tokenized(run_id, len(answer.token_ids)))
        else:
            self._spans.tokenized(run, answer.code, answer.param)
            self.post(m.TokenizeFailed(run_id, answer.code, answer.message, answer.param, answer.rejects))

    def died(self, reason: str) -> None:
        """Take the death of the engine; whoever finds it out, the service ends (`dead`)."""
        self._end(reason, m.EngineDied(reason))

    def tokenizer_died(self, reason: str) -> None:
        """Take it that nothing will be rendered any more; the service ends."""
        self._end(reason, m.TokenizerDied(reason))

    def _end(self, reason: str, death: m.Message) -> None:
        if not self.dead_reason:
            self.dead_reason = reason
            self.dead.set()
            log.error("%s", reason)
            self.post(death)

    # ---- effects: scheduler ----

    def _open_credits(self, effect: m.OpenCredits, _: int) -> None:
        who = self._identity
        # What an earlier stream was still to be told is in the inventory, and grants that are not in it are over.
        self._to_scheduler.clear()
        held = {holding.request_id for holding in effect.inventory}
        self._grants = {request_id: grant for request_id, grant in self._grants.items() if request_id in held}
        self._scheduler.open(
            wire.credits_open(who.worker_id, who.instance_id, self._shape, who.capacity_blocks, effect)
        )

    def _send_tokenizer_ack(self, effect: m.SendTokenizerAck, _: int) -> None:
        self._to_scheduler.append(wire.tokenizer_ack(effect))

    def _send_completion_ack(self, effect: m.SendCompletionAck, now_ns: int) -> None:
        grant = self._grants.pop(effect.request_id, None)
        if grant is not None and grant.claimed_ns:
            self._spans.claimed(effect.request_id, grant.traceparent, grant.claimed_ns, now_ns, effect.cause.value)
        self._to_scheduler.append(wire.completion_ack(effect))

    # ---- effects: queue ----

    def _open_work(self, effect: m.OpenWork, _: int) -> None:
        self._queue.open(wire.work_open(self._identity.worker_id, self._identity.instance_id, effect.held))

    def _send_claim(self, effect: m.SendClaim, now_ns: int) -> None:
        grant = self._grants.get(effect.request_id)
        if grant is not None:
            self._grants[effect.request_id] = grant._replace(claimed_ns=now_ns)
        self._queue.send(wire.claim(effect.request_id))

    def _watch_tokens(self, effect: m.WatchTokens, _: int) -> None:
        run = self._runs[effect.run_id]
        run.watched = effect.watched
        run.output.untell()
        self._engine.tell_at(run.run_id, run.wanted_at_tokens)

    def _send_tokens(self, effect: m.SendTokens, _: int) -> None:
        run = self._runs[effect.run_id]
        try:
            messages = run.token_messages()
        except Exception:
            # The end will say the same; until then there is nothing to tell.
            log.exception("%s: its tokens cannot be written", run.run_id, extra=run.about)
            self.post(m.Watched(run.lease.request_id, False))
            return
        for message in messages:
            self._queue.send(message)

    def _send_complete(self, effect: m.SendComplete, now_ns: int) -> None:
        self._finish(effect, now_ns)
        # Read when there is room to send it: all that waited for a queue to return are not held in memory again.
        self._queue.send_later(partial(self.completions.read, effect.run_id))

    def _finish(self, effect: m.SendComplete | m.KeepComplete, now_ns: int) -> None:
        """Make the completion of a run, unless there is one already."""
        run_id, ending = effect.run_id, effect.ending
        if run_id in self.completions:
            return
        run = self._runs[run_id]
        end_ns = run.last_token_ns or now_ns
        run.completed_ns = now_ns
        self._metrics.request.observe((end_ns - run.delivered_ns) / 1e9)
        if ending.kind is EndingKind.FAILED:
            log.warning("%s: the attempt failed: %s", run_id, wire.told(ending.message), extra=run.about)
        run.ending = ending
        if self._traced:
            self._spans.generated(run, effect.credits, end_ns)
        lost = partial(wire.failed, run.lease, UNREADABLE)
        self.completions.keep(run_id, self._completion(run, ending, effect.credits), lost)

    def _completion(self, run: Run, ending: m.Ending, spent: m.Credits) -> bytes:
        """Return the completion of a run; one that cannot be written fails that run, and no other."""
        model = wire.reported_model(self._shape, run.request.model)
        try:
            return run.finish(ending, model, spent)
        except Exception:
            log.exception("%s: its result cannot be written", run.run_id, extra=run.about)
            self._metrics.unwritable_results.inc()
            return run.finish(UNWRITABLE, model, spent)

    def _forget(self, effect: m.Forget, now_ns: int) -> None:
        self.completions.forget(effect.run_id)
        run = self._runs.pop(effect.run_id, None)
        if run is not None and self._traced:
            self._spans.recorded(run, now_ns)

    # ---- effects: tokenizer and engine ----

    def _tokenize(self, effect: m.Tokenize, _: int) -> None:
        self._tokenizer.render(effect.run_id, wire.prompt_spec(self._runs[effect.run_id].request))

    def _start_engine(self, effect: m.StartEngine, now_ns: int) -> None:
        run = self._runs[effect.run_id]
        run.engine_started_ns = now_ns
        run.tell_at_tokens = effect.tell_at_tokens
        self._metrics.prompt_tokens.inc(len(run.prompt_ids))
        run.generation = self._spawn(self._generate(run, effect), f"generate {effect.run_id}")

    def _tell_at(self, effect: m.TellAt, _: int) -> None:
        run = self._runs[effect.run_id]
        run.tell_at_tokens = effect.tokens
        self._tell_progress(run)
        self._engine.tell_at(run.run_id, run.wanted_at_tokens)

    def _tell_progress(self, run: Run) -> None:
        """Tell the session, once, that a run has come as far as it wanted to hear of."""
        if run.tell_at_tokens and (tokens := run.output.longest) >= run.tell_at_tokens:
            run.tell_at_tokens = 0
            self.post(m.EngineProgress(run.run_id, tokens))

    def _abort_engine(self, effect: m.AbortEngine, _: int) -> None:
        self._spawn(self._abort(self._runs[effect.run_id]), f"abort {effect.run_id}")

    def _spawn(self, work: Any, name: str) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _generate(self, run: Run, start: m.StartEngine) -> None:
        """Iterate one generation and tell the session of what matters to it."""
        run_id = run.run_id
        try:
            async for step in self._engine.generate(run.for_engine(start.max_tokens, start.guaranteed)):
                self._take_step(run, step)
        except RequestRefusedError as refusal:
            self.post(m.EngineFailed(run_id, True, refusal.code, refusal.message, refusal.param, run.output.tokens))
        except EngineDeadError as death:
            self.died(str(death) or "the engine is dead")
        except Exception as error:
            if run.generation is not None and run.generation.cancelling():
                raise  # to the abort, which waits for the end of this, and which the engine failed at
            log.exception("%s: the engine failed", run_id, extra=run.about)
            self.post(m.EngineFailed(run_id, False, "engine_error", f"{type(error).__name__}: {error}"))

    def _take_step(self, run: Run, step: EngineStep) -> None:
        tokens = run.output.take(step)
        if tokens:
            self._observe_tokens(run)
        if step.finished:
            self.post(run.engine_ended())
            self._metrics.cached_tokens.inc(run.output.cached_tokens)
            return
        outgrown = run.outgrown()
        if outgrown is not None:
            self._spawn(self._refuse(run, outgrown), f"refuse {run.run_id}")
        self._tell_progress(run)
        if tokens and run.watched:
            self.post(m.EngineTokens(run.run_id))

    def _observe_tokens(self, run: Run) -> None:
        run.last_token_ns = now_ns = self._clock.now_ns()
        if not run.first_token_ns:
            run.first_token_ns = now_ns
            self._metrics.time_to_first_token.observe((now_ns - run.engine_started_ns) / 1e9)

    def tokens_generated(self, step: StepTokens) -> None:
        """Count what an engine step generated, whoever of its runs is handed over with it."""
        self._metrics.generation_tokens.inc(step.generated)
        for gap_s in step.gaps_s:
            self._metrics.inter_token.observe(gap_s)

    async def _abort(self, run: Run) -> None:
        await self._leave_engine(run)
        self.post(m.EngineAborted(run.run_id, run.output.tokens, run.output.preemptions))

    async def _refuse(self, run: Run, ending: m.Ending) -> None:
        """End a run that goes on in vain. If it ends otherwise meanwhile, the session has heard of that before."""
        await self._leave_engine(run)
        tokens = run.output.tokens
        self.post(m.EngineFailed(run.run_id, True, ending.code, ending.message, ending.param, tokens))

    async def _leave_engine(self, run: Run) -> None:
        """Stop the generation first, so that a start still under way cannot come after the abort.

        What an engine holds that fails to abort nobody can say, so nothing may be granted on it any more.
        """
        try:
            if run.generation is not None:
                # What the engine has held back counts: it comes within one turn of the loop.
                self._engine.tell_at(run.run_id, 1)
                await asyncio.sleep(0)
                run.generation.cancel()
                await asyncio.wait([run.generation])
                if not run.generation.cancelled():
                    run.generation.result()
            await self._engine.abort(run.run_id)
        except EngineDeadError as death:
            self.died(str(death) or "the engine is dead")
        except Exception as error:
            log.exception("%s: the engine cannot abort it", run.run_id, extra=run.about)
            self.died(f"the engine cannot abort a run: {type(error).__name__}: {error}")


def _report_audit(effect: m.AuditFailed, _: int) -> None:
    for violation in effect.violations:
        log.error("the audit found: %s", violation)
