"""The queue's machine with a store that survives crashes; every batch is atomic, its effects may be lost."""

from __future__ import annotations

from collections import Counter
from typing import Any

from services.queue import wire
from services.queue.core import effects as e
from services.queue.core import messages as m
from services.queue.core import records
from services.queue.core.entry import RequestMeta
from services.queue.core.machine import Machine
from services.queue.core.workers import Rules
from services.queue.memory_store import MemoryStore
from services.queue.recovery import recover
from tests.simulation.world import MS, Stream, World

STORE_ID = "5eed5eed"
CHANNELS = ("interactive", "batch")
MAX_ATTEMPTS = 3
TICK_NS = 50 * MS
RESTART_NS = 80 * MS


class QueueActor:
    """Steps the production machine, commits, then releases effects; may crash before or after the commit."""

    def __init__(self, world: World) -> None:
        """Start with an empty store."""
        self.world = world
        self.store = MemoryStore()
        self.up = False
        self.life = 0
        self.crash_before_commit = False
        self.crash_after_commit = False
        self.streams: dict[int, Stream] = {}
        self.next_stream = 1
        self.answers: dict[int, Any] = {}
        self.seen = Counter[str]()
        self.ended: dict[str, tuple[Any, int]] = {}
        self.last_cursor = 0
        self.newest_lease: dict[str, int] = {}
        self.start()

    def start(self) -> None:
        """Recover from the store and serve."""
        rules = Rules(CHANNELS, MAX_ATTEMPTS, 2_000 * MS, 300 * MS, 64)
        self.machine = Machine(STORE_ID, rules, recover(self.store), self.world.now_ns)
        self.up = True
        self.life += 1
        self._tick(self.life)

    def _tick(self, life: int) -> None:
        if self.up and life == self.life:
            self.handle(m.Tick())
            self.world.after(TICK_NS, lambda: self._tick(life))

    def crash(self) -> None:
        """kill -9."""
        if not self.up:
            return
        self.world.note("queue: crashes")
        self.seen["queue crash"] += 1
        self.up = False
        for stream in self.streams.values():
            stream.cut(0)
            stream.close()
        self.streams.clear()
        self.answers.clear()
        self.world.after(RESTART_NS, self.start)

    def connect(self, stream: Stream) -> int | None:
        """Take a new stream in and return its number; None while the queue is down."""
        if not self.up:
            return None
        number, self.next_stream = self.next_stream, self.next_stream + 1
        self.streams[number] = stream
        return number

    def known(self, key: str) -> int | None:
        """Return the request that has this idempotency key in the store."""
        row = self.store.get(records.IDEMPOTENCY, records.idempotency_key("", key))
        return None if row is None else records.seq_of(row)

    def submit(self, ticket: int, key: str, meta: RequestMeta) -> None:
        """Submit one request; the answer appears in `answers` under the ticket once it is durable."""
        if self.up:
            self.handle(m.Submit(ticket, (m.NewRequest(meta, b"payload", self.known(key)),)))

    def handle(self, message: m.Message) -> None:
        """Step, commit, release."""
        if not self.up:
            return
        effects = self.machine.step(message, self.world.now_ns)
        sealed = self.machine.seal()
        if self.crash_before_commit and not isinstance(message, m.Tick):
            self.crash_before_commit = False
            self.seen["queue crash before commit"] += 1
            self.crash()
            return
        writes = [effect for effect in effects if isinstance(effect, e.Write)]
        if writes:
            results = [wire.result_write(effect) for effect in effects if isinstance(effect, e.PutResult)]
            self.store.write([*writes, sealed.counters, *results])
        for effect in effects:
            self._check(effect)
        if self.crash_after_commit and writes:
            self.crash_after_commit = False
            self.seen["queue crash after commit"] += 1
            self.crash()
            return
        for effect in effects:
            self._release(effect)

    def _check(self, effect: Any) -> None:
        """Hold what became durable against the promises."""
        if isinstance(effect, e.Ended):
            self._check_ended(effect)
        elif isinstance(effect, e.Deliver):
            token = self.newest_lease.get(effect.lease.request_id, -1)
            assert effect.lease.fencing_token > token, "a fencing token was given twice"
            self.newest_lease[effect.lease.request_id] = effect.lease.fencing_token
        elif isinstance(effect, e.Recorded) and effect.accepted:
            newest = self.newest_lease[effect.lease.request_id]
            assert effect.lease.fencing_token == newest, "a completion under a stale lease was accepted"

    def _check_ended(self, effect: e.Ended) -> None:
        assert effect.request_id not in self.ended, f"{effect.request_id} ended twice"
        assert effect.attempts <= MAX_ATTEMPTS, f"{effect.request_id} had {effect.attempts} attempts"
        assert effect.completion_seq > self.last_cursor, "the cursor went back"
        self.last_cursor = effect.completion_seq
        self.ended[effect.request_id] = (effect.outcome, effect.attempts)
        self.world.note(f"queue: {effect.request_id[-4:]} ended {effect.outcome.name} after {effect.attempts}")

    def _release(self, effect: Any) -> None:
        if isinstance(effect, e.Submitted):
            self.answers[effect.ticket] = effect.acks
        elif isinstance(effect, e.EndStream):
            stream = self.streams.pop(effect.stream, None)
            if stream is not None:
                stream.cut(0)
                stream.close()
        elif hasattr(effect, "stream") and effect.stream in self.streams:
            self.streams[effect.stream].down(effect)
