"""The scheduler's machine; all of its state is lost when it crashes."""

from __future__ import annotations

from typing import Any

from services.queue.core import effects as q
from services.queue.core import messages as qm
from services.queue.core.entry import Failure
from services.scheduler.core import messages as m
from services.scheduler.core.admission.policies import POLICIES
from services.scheduler.core.machine import Machine
from services.scheduler.core.sharing.share import Share
from services.worker.core import messages as wm
from tests.simulation.network import DOWN, UP, Network, Stream
from tests.simulation.queue_actor import QueueActor
from tests.simulation.referee import SchedulerReferee
from tests.simulation.world import MS, Process, World, demand

TICK_NS = 100 * MS
RESTART_NS = 60 * MS
RECONNECT_NS = 30 * MS
GRACE_NS = 250 * MS
REPORT_INTERVAL_NS = 20 * MS
AUDIT_EVERY = 8
"""Wake-ups from one full recount of the ledgers to the next; the referee's own books are compared at every one."""

STANDING_NS = 1000 * MS
"""Short enough that some stand unused for so long."""

SHARES = {"interactive": Share(4.0, 0.1), "batch": Share(1.0)}


class SchedulerActor(Process):
    """Steps the production machine through all that is ready, then arbitrates once, as its runner does."""

    def __init__(self, world: World, net: Network, queue: QueueActor, policy: str) -> None:
        """Connect to `queue` once started."""
        super().__init__(world, "scheduler")
        self.net = net
        self.queue = queue
        self.policy = POLICIES[policy]
        self.workers: dict[int, Stream] = {}
        self.backlog: Stream | None = None
        self.backlog_number = 0
        self.old_number = 0
        """Number of a Backlog stream that is over."""
        self.stale_dropped = 0
        self._last_epoch = 0
        self._wakes = 0
        self.machine: Machine
        self._referee: SchedulerReferee

    # ---- life ----

    def boot(self) -> None:
        """Begin with nothing known."""
        self.machine = Machine(self.policy, SHARES, GRACE_NS, self.world.now_ns(), standing_ns=STANDING_NS)
        self._referee = SchedulerReferee(self.machine)
        self._tick()
        self._connect()

    def died(self) -> None:
        """Lose everything."""
        self.workers.clear()
        self.backlog = None

    def crash(self, kept: bool) -> None:
        """kill -9; `kept` if what it had sent still arrives."""
        self.net.kill(self, kept)
        self.stop(RESTART_NS)

    def _tick(self) -> None:
        self._step(m.Tick())
        self.timer(TICK_NS, self._tick)

    # ---- the loop ----

    def _step(self, message: m.Input) -> None:
        stale = self._referee.is_stale(message)
        before = self._referee.picture() if stale else ()
        effects = self.machine.step(message, self.world.now_ns())
        if stale:
            self.stale_dropped += 1
            demand(not effects and before == self._referee.picture(), f"a message of an old epoch counted: {message}")
        self._referee.stepped(message, effects)
        self._deliver(effects)

    def woke(self) -> None:
        """Grant what fits, once per wake-up."""
        grants = self.machine.arbitrate(self.world.now_ns())
        self._referee.arbitrated(grants)
        self._deliver(grants)
        self._wakes += 1
        if not self._wakes % AUDIT_EVERY:
            for worker in self.machine.fleet:
                violations = worker.ledger.audit()
                demand(not violations, f"the ledger of {worker.worker_id}: {violations}")

    def _deliver(self, effects: list[m.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, m.SetWindow | m.RejectRequest):
                if self.backlog is not None:
                    self.backlog.up(self._to_queue(effect))
            elif isinstance(effect, m.Opened):
                if effect.epoch in self.workers:
                    self.workers[effect.epoch].down(effect.epoch)
            elif isinstance(effect, m.EndStream | m.NameTaken):
                stream = self.workers.pop(effect.epoch, None)
                if stream is not None:
                    stream.close(UP)
            elif isinstance(effect, m.Grant | m.Recall | m.TellDrain) and effect.epoch in self.workers:
                self.world.note("scheduler says", effect)
                self.workers[effect.epoch].down(effect)

    def _to_queue(self, effect: m.SetWindow | m.RejectRequest) -> qm.Message:
        if isinstance(effect, m.SetWindow):
            return qm.SetWindow(self.backlog_number, effect.channel, effect.limit, effect.served)
        failure = Failure(effect.code, effect.message, effect.param)
        return qm.Reject(self.backlog_number, effect.request_id, failure)

    # ---- the Backlog stream ----

    def _connect(self) -> None:
        stream = self.net.connect(self, self.queue)
        number = self.queue.accept(stream) if stream is not None else None
        if stream is None or number is None:
            self.timer(self.world.draw_ns(RECONNECT_NS), self._connect)
            return
        self.old_number = self.backlog_number
        self.backlog, self.backlog_number = stream, number
        stream.hear[DOWN] = lambda effect: self.post(self._from_queue, stream, effect)
        stream.over[DOWN] = lambda: self.post(self._backlog_lost, stream)
        stream.up(qm.BacklogOpened(number))

    def _backlog_lost(self, stream: Stream) -> None:
        if stream is self.backlog:
            self.backlog = None
            self._step(m.QueueClosed())
            self.timer(self.world.draw_ns(RECONNECT_NS), self._connect)

    def _from_queue(self, stream: Stream, effect: Any) -> None:
        if stream is not self.backlog:
            return
        self.world.note("scheduler hears", effect)
        if isinstance(effect, q.BacklogReady):
            self._step(m.QueueOpened(tuple(SHARES)))
        elif isinstance(effect, q.Announce):
            self._step(announced(effect))
        elif isinstance(effect, q.Gone):
            self._step(m.Gone(effect.request_id, m.GoneReason(effect.reason.value)))

    # ---- workers ----

    def accept(self, stream: Stream) -> None:
        """Take in a Credits stream; its first message makes it an epoch."""
        stream.hear[UP] = lambda message: self.post(self._from_worker, stream, message)

    def _from_worker(self, stream: Stream, message: Any) -> None:
        self.world.note("scheduler hears", message)
        if isinstance(message, m.WorkerLeaving):
            self._step(message.replace(epoch=stream.label))
            return
        if not isinstance(message, m.WorkerOpened):
            self._step(message.replace(stream=stream.label))
            return
        # As the runner draws epochs: unique over restarts of the scheduler, because they start at the present time.
        self._last_epoch = stream.label = epoch = max(self.world.now_ns(), self._last_epoch + 1)
        self.workers[epoch] = stream
        stream.over[UP] = lambda: self.post(self._worker_lost, epoch)
        self._step(message.replace(epoch=epoch))
        if stream.closed[UP]:
            self._worker_lost(epoch)

    def _worker_lost(self, epoch: int) -> None:
        if self.workers.pop(epoch, None) is not None:
            self._step(m.WorkerClosed(epoch))

    def drain(self, worker_id: str, undo: bool) -> None:
        """An operator asks for it, or takes it back."""
        self.post(self._step, m.DrainRequested(worker_id, undo))


def announced(effect: q.Announce) -> m.Announced:
    """Return what the scheduler reads in an Announce."""
    meta = effect.meta
    return m.Announced(
        effect.request_id, meta.channel, meta.priority, effect.seq, effect.attempt, meta.model, meta.prompt_bytes,
        meta.prompt_tokens, meta.max_tokens, meta.n, meta.chat, last_attempt=effect.last_attempt,
    )  # fmt: skip


def standing(most: m.Announced) -> wm.Standing:
    """Return what a worker reads of what a standing grant is for."""
    return wm.Standing(most.model, most.chat, most.prompt_bytes, most.prompt_tokens, most.max_tokens)
