"""Penstock in virtual time: the production scheduler machine and the production worker session, with a queue between.

The queue is reduced to what they see of it: announcements within the windows, one delivery for a claim, a record
for a completion. Every message takes a hop; grants, claims, deliveries and ACKs therefore cost what they cost a
real deployment, only in virtual time.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.admission.clock import MS, SECOND_NS, Clock
from benchmarks.admission.engine import Engine, Step
from benchmarks.admission.workloads import CHANNEL, Item
from services.core.value import fields
from services.scheduler.core import messages as sm
from services.scheduler.core.admission.policies import POLICIES
from services.scheduler.core.machine import Machine
from services.scheduler.core.sharing.share import Share
from services.worker.core import messages as wm
from services.worker.core.session import Session
from services.worker.core.sizing import Sizes
from services.worker.engine import priority_of

REPORT_INTERVAL_NS = 20 * MS
"""Engine reports at most this often, as the scheduler's default setting."""

TICK_NS = 200 * MS
"""Pause between the scheduler's ticks, as in the service."""

TOKENIZE_NS = MS // 2
"""What rendering and counting a prompt takes; hidden behind the other hops of a full engine."""

FOREVER_NS = 10**18
"""A lease that is never renewed: nothing is lost here."""


class Inbox:
    """Collects what arrives at one moment and wakes its owner once for all of it."""

    def __init__(self, clock: Clock, wake: Callable[[list[Any]], None]) -> None:
        """Deliver to `wake`."""
        self._clock, self._wake = clock, wake
        self._messages: list[Any] = []

    def put(self, message: Any, delay_ns: int = 0) -> None:
        """Deliver a message after `delay_ns`."""
        self._clock.after(delay_ns, lambda: self._arrive(message))

    def _arrive(self, message: Any) -> None:
        self._messages.append(message)
        if len(self._messages) == 1:
            self._clock.after(0, self._deliver)

    def _deliver(self) -> None:
        messages, self._messages = self._messages, []
        self._wake(messages)


class Penstock:
    """Scheduler, queue and one worker per engine under one policy."""

    def __init__(
        self,
        clock: Clock,
        engines: Sequence[Engine],
        items: Sequence[Item],
        policy: str,
        hop_ns: int,
        shares: Mapping[str, Share] | None = None,
    ) -> None:
        """Open every worker; requests may be submitted from now on, for channels with these shares."""
        shares = shares or {CHANNEL: Share()}
        self.machine = Machine(POLICIES[policy], shares, SECOND_NS, -2 * SECOND_NS)
        self.items, self.clock, self.hop_ns = items, clock, hop_ns
        self.inbox = Inbox(clock, self._wake)
        self.granted_ns: dict[int, int] = {}
        """When each request had its grant."""
        self._backlog: dict[str, deque[int]] = defaultdict(deque)
        self._limit: Counter[str] = Counter()
        self._announced: Counter[str] = Counter()
        self.workers = [WorkerSide(self, engine, epoch) for epoch, engine in enumerate(engines, 1)]
        self._wake([sm.Tick(), sm.QueueOpened(tuple(shares))])
        for worker in self.workers:
            worker.open()
        clock.after(TICK_NS, self._tick)

    def submit(self, index: int) -> None:
        """Put a request into the queue."""
        channel = self.items[index].channel
        self._backlog[channel].append(index)
        self._announce(channel)

    def waiting(self, channel: str) -> int:
        """Return how many requests of the channel have no grant yet."""
        return self.machine.backlog.waiting[channel] + len(self._backlog[channel])

    def _announce(self, channel: str) -> None:
        """Announce what the channel's window has room for."""
        backlog = self._backlog[channel]
        while backlog and self._announced[channel] < self._limit[channel]:
            index = backlog.popleft()
            self._announced[channel] += 1
            item = self.items[index]
            request = sm.Announced(
                str(index), channel, 0, index, 1, "", item.prompt_bytes, 0, item.max_tokens, 1, False
            )
            self.inbox.put(request, self.hop_ns)

    def claim(self, worker: WorkerSide, request_id: str) -> None:
        """Hand a claimed request to the worker; the first claim wins, as there is never a second."""
        item = self.items[int(request_id)]
        self._announced[item.channel] -= 1
        self.inbox.put(sm.Gone(request_id, sm.GoneReason.CLAIMED), self.hop_ns)
        self._announce(item.channel)
        worker.inbox.put(wm.Delivered(wm.Lease(request_id, 1, 1), 1, item.max_tokens, False), self.hop_ns)

    def _tick(self) -> None:
        self.inbox.put(sm.Tick())
        self.clock.after(TICK_NS, self._tick)

    def _wake(self, messages: list[Any]) -> None:
        now_ns = self.clock.now_ns
        for message in messages:
            self._do_all(self.machine.step(message, now_ns))
        self._do_all(self.machine.arbitrate(now_ns))

    def _do_all(self, effects: list[sm.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, sm.Grant):
                self.granted_ns.setdefault(int(effect.request_id), self.clock.now_ns)
                grant = wm.Granted(
                    effect.request_id, effect.channel, effect.booked_blocks, effect.settles, effect.attempt,
                    effect.reserve_output_tokens, guaranteed=effect.guaranteed,
                )  # fmt: skip
                self.workers[effect.epoch - 1].inbox.put(grant, self.hop_ns)
            elif isinstance(effect, sm.SetWindow):
                self._limit[effect.channel] = effect.limit
                self._announce(effect.channel)
            elif isinstance(effect, sm.RejectRequest | sm.AuditFailed | sm.Recall):
                raise RuntimeError(f"the workload cannot be run: {effect}")


class WorkerSide:
    """One worker: the session, and the engine it starts requests on."""

    def __init__(self, penstock: Penstock, engine: Engine, epoch: int) -> None:
        """Make a worker whose streams are not open yet."""
        shape = engine.shape
        self._penstock, self._engine, self._epoch = penstock, engine, epoch
        self._session = Session(Sizes(shape.blocks, shape.blocks, shape.block_size, shape.window_tokens))
        self._tell_at: dict[str, int] = {}
        self._wake_ns: int | None = None
        self.inbox = Inbox(penstock.clock, self._wake)
        engine.listen = self._stepped

    def open(self) -> None:
        """Open both streams."""
        shape = self._engine.shape
        engine_shape = sm.EngineShape(
            shape.blocks, shape.block_size, shape.window_tokens, shape.max_num_seqs, 0, True, 1
        )
        opened = sm.WorkerOpened(
            self._epoch, f"worker-{self._epoch}", "i", ("sim",), engine_shape, guaranteed_first=self._engine.by_priority
        )
        self._penstock.inbox.put(opened)
        up = wm.SchedulerUp(self._epoch, REPORT_INTERVAL_NS)
        self._wake([wm.SchedulerReached(), up, wm.QueueReached(), wm.QueueUp(FOREVER_NS, FOREVER_NS)])

    def _stepped(self, step: Step) -> None:
        """Say what the session hears of a step: ends and progress first, then the engine's statistics."""
        for sequence in step.ended:
            self._tell_at.pop(sequence.key, None)
            self.inbox.put(wm.EngineFinished(sequence.key, sequence.generated, sequence.preemptions))
        if self._tell_at:
            for sequence in step.sampled:
                self._tell(sequence.key, sequence.generated)
        self.inbox.put(step.report)

    def _tell(self, run_id: str, generated: int) -> None:
        wanted = self._tell_at.get(run_id, 0)
        if 0 < wanted <= generated:
            del self._tell_at[run_id]
            self.inbox.put(wm.EngineProgress(run_id, generated))

    def _wake(self, messages: list[Any]) -> None:
        now_ns = self._penstock.clock.now_ns
        for message in (*messages, wm.Tick()):
            for effect in self._session.step(message, now_ns):
                self._do(effect)
        due_ns = self._session.due_ns(now_ns)
        if due_ns is not None and due_ns < FOREVER_NS // 4 and (self._wake_ns is None or due_ns < self._wake_ns):
            self._wake_ns = due_ns
            self._penstock.clock.at(due_ns, self._due)

    def _due(self) -> None:
        if self._wake_ns is not None and self._wake_ns <= self._penstock.clock.now_ns:
            self._wake_ns = None
            self._wake([])

    def _do(self, effect: wm.Effect) -> None:
        penstock, hop_ns = self._penstock, self._penstock.hop_ns
        if isinstance(effect, wm.SendTokenizerAck):
            ack = sm.TokenizerAck(
                self._epoch, effect.epoch, effect.request_id, effect.seq, effect.held_blocks, effect.prompt_tokens,
                effect.generated_tokens, effect.output_limit_tokens,
            )  # fmt: skip
            penstock.inbox.put(ack, hop_ns)
        elif isinstance(effect, wm.SendCompletionAck):
            cause = sm.ReleaseCause[effect.cause.name]
            done = sm.CompletionAck(
                self._epoch, effect.epoch, effect.request_id, effect.seq, cause, effect.output_tokens
            )
            penstock.inbox.put(done, hop_ns)
        elif isinstance(effect, wm.SendReport):
            penstock.inbox.put(sm.EngineReport(self._epoch, **fields(effect)), hop_ns)
        elif isinstance(effect, wm.SendClaim):
            request_id = effect.request_id
            penstock.clock.after(hop_ns, lambda: penstock.claim(self, request_id))
        else:
            self._do_run(effect)

    def _do_run(self, effect: wm.Effect) -> None:
        clock, hop_ns = self._penstock.clock, self._penstock.hop_ns
        if isinstance(effect, wm.Tokenize):
            prompt_tokens = self._item(effect.run_id)[1].prompt_tokens
            self.inbox.put(wm.Tokenized(effect.run_id, prompt_tokens), TOKENIZE_NS)
        elif isinstance(effect, wm.StartEngine):
            self._tell_at[effect.run_id] = effect.tell_at_tokens
            index, item = self._item(effect.run_id)
            self._engine.add(effect.run_id, item, index, priority_of(effect.guaranteed))
        elif isinstance(effect, wm.TellAt):
            self._tell_at[effect.run_id] = effect.tokens
        elif isinstance(effect, wm.SendComplete):
            request_id = effect.run_id.partition(".")[0]
            clock.after(2 * hop_ns, lambda: self.inbox.put(wm.Recorded(wm.Lease(request_id, 1, 1), True)))
        elif isinstance(effect, wm.SendGiveBack | wm.AbortEngine):
            raise RuntimeError(f"nothing is aborted or handed back here: {effect}")

    def _item(self, run_id: str) -> tuple[int, Item]:
        index = int(run_id.partition(".")[0])
        return index, self._penstock.items[index]
