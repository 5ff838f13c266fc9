"""The scheduler's machine; all of its state is lost when it crashes."""

from __future__ import annotations

from collections import Counter
from typing import Any

from services.queue.core import effects as q
from services.queue.core import messages as qm
from services.queue.core.entry import Failure
from services.scheduler.core import messages as m
from services.scheduler.core.channel import Share
from services.scheduler.core.machine import Machine
from services.scheduler.core.policy import POLICIES
from tests.simulation.queue_actor import QueueActor
from tests.simulation.world import MS, Stream, World

TICK_NS = 100 * MS
RESTART_NS = 60 * MS
RECONNECT_NS = 20 * MS
GRACE_NS = 250 * MS


class SchedulerActor:
    """Steps the production machine and arbitrates once after every message."""

    def __init__(self, world: World, queue: QueueActor, policy: str) -> None:
        """Start, and connect to the queue."""
        self.world = world
        self.queue = queue
        self.policy = POLICIES[policy]
        self.up = False
        self.life = 0
        self.next_epoch = 1
        self.seen = Counter[str]()
        self.workers: dict[int, Stream] = {}
        self.backlog: Stream | None = None
        self.start()

    def start(self) -> None:
        """Begin with nothing known."""
        shares = {"interactive": Share(4.0, 0.1), "batch": Share(1.0)}
        self.machine = Machine(self.policy, shares, GRACE_NS, self.world.now_ns)
        self.up = True
        self.life += 1
        self._tick(self.life)
        self._connect(self.life)

    def _tick(self, life: int) -> None:
        if self.up and life == self.life:
            self.handle(m.Tick())
            self.world.after(TICK_NS, lambda: self._tick(life))

    def crash(self) -> None:
        """kill -9."""
        if not self.up:
            return
        self.world.note("scheduler: crashes")
        self.seen["scheduler crash"] += 1
        self.up = False
        for stream in self.workers.values():
            stream.cut(0)
            stream.close()
        self.workers.clear()
        if self.backlog is not None:
            self.backlog.cut(1)
            self.backlog.close()
            self.backlog = None
        self.world.after(RESTART_NS, self.start)

    # ---- the Backlog stream ----

    def _connect(self, life: int) -> None:
        if not self.up or life != self.life or self.backlog is not None:
            return
        stream = Stream(self.world, lambda message: None, self._from_queue)
        number = self.queue.connect(stream)
        if number is None:
            self.world.after(RECONNECT_NS, lambda: self._connect(life))
            return
        self.backlog = stream
        queue = self.queue
        stream._deliver = (queue.handle, self._from_queue)
        stream.number = number  # type: ignore[attr-defined]

        def queue_side_ends() -> None:
            queue.streams.pop(number, None)
            queue.handle(qm.BacklogClosed(number))

        stream.on_close(queue_side_ends, self._backlog_lost)
        stream.up(qm.BacklogOpened(number))

    def _backlog_lost(self) -> None:
        self.backlog = None
        self.handle(m.QueueClosed())
        life = self.life
        self.world.after(RECONNECT_NS, lambda: self._connect(life))

    def _from_queue(self, effect: Any) -> None:
        if isinstance(effect, q.BacklogReady):
            self.handle(m.QueueOpened(tuple(self.queue.machine.book.lines)))
        elif isinstance(effect, q.Announce):
            meta = effect.meta
            self.handle(
                m.Announced(
                    effect.request_id, meta.channel, meta.priority, effect.seq, effect.attempt, meta.model,
                    meta.prompt_bytes, meta.prompt_tokens, meta.max_tokens, meta.n, meta.chat,
                )
            )  # fmt: skip
        elif isinstance(effect, q.Gone):
            self.handle(m.Gone(effect.request_id, m.GoneReason(effect.reason.value)))

    # ---- workers ----

    def connect(self, stream: Stream) -> int | None:
        """Take a worker's stream in and return its epoch; None while the scheduler is down."""
        if not self.up:
            return None
        epoch, self.next_epoch = self.next_epoch, self.next_epoch + 1
        self.workers[epoch] = stream
        return epoch

    def handle(self, message: m.Input) -> None:
        """Step, arbitrate, send."""
        if not self.up:
            return
        for effect in self.machine.step(message, self.world.now_ns):
            self._send(effect)
        for effect in self.machine.arbitrate(self.world.now_ns):
            self._send(effect)
        self._audit()

    def _audit(self) -> None:
        for worker in self.machine.fleet:
            violations = worker.ledger.audit()
            assert not violations, violations
            # Only reservations that follow their output may outgrow the pool, as their engine would by preempting.
            if not self.policy.reserve_output_tokens:
                assert worker.ledger.held_blocks <= worker.shape.capacity_blocks, "more is held than there is"

    def _send(self, effect: Any) -> None:
        if isinstance(effect, m.SetWindow | m.RejectRequest):
            if self.backlog is not None:
                number = self.backlog.number  # type: ignore[attr-defined]
                self.backlog.up(self._to_queue(effect, number))
        elif isinstance(effect, m.EndStream):
            stream = self.workers.pop(effect.epoch, None)
            if stream is not None:
                stream.cut(0)
                stream.close()
        elif isinstance(effect, m.AuditFailed):
            raise AssertionError(effect.violations)
        elif isinstance(effect, m.Grant | m.Recall | m.Drain) and effect.epoch in self.workers:
            self.workers[effect.epoch].down(effect)

    @staticmethod
    def _to_queue(effect: Any, number: int) -> Any:
        if isinstance(effect, m.SetWindow):
            return qm.SetWindow(number, effect.channel, effect.limit)
        return qm.Reject(number, effect.request_id, Failure(effect.code, effect.message, effect.param))
