"""The queue under any order of events and restarts: nothing acked is lost, nothing ends twice."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.queue.core import records
from services.queue.core.effects import Announce, Deliver, Effect, Ended, Gone, NameTaken, StopRun
from services.queue.core.entry import Entry, Failure, LeaseRef
from services.queue.core.lifecycle import Outcome, State
from services.queue.core.messages import (
    BacklogClosed,
    Cancel,
    Claim,
    Complete,
    GiveBack,
    Message,
    Reject,
    Renew,
    RequeueDead,
    SetWindow,
    WorkerClosed,
    WorkerOpened,
)
from services.queue.storage.spot_check import differences
from services.queue.storage.verify import Verifier
from tests.support.effort import examples
from tests.support.queueing import LEASE_NS, PATIENCE_NS, RULES, Queue, meta

INDEX = st.integers(0, 30)
WORKERS = ("a", "b")


def ready(entry: Entry) -> bool:
    return entry.state is State.READY


class QueueMachine(RuleBasedStateMachine):
    """Drives a queue, and keeps of each request only what a client could know."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue()
        self.names: list[str] = []
        self.ended: dict[str, Outcome] = {}
        self.leases: list[LeaseRef] = []
        self.streams: dict[str, int] = {}
        self.lives: dict[str, str] = {}
        self.next_stream = 1
        self.backlog: int | None = None
        self.announced: set[str] = set()
        self.attempts: set[tuple[str, int]] = set()
        self.last_cursor = 0
        self.last_token = 0

    def step(self, *messages: Message) -> None:
        self.see(self.queue.step(*messages))

    def lease_of(self, stream: int, request_id: str) -> LeaseRef | None:
        """Claim a request and return its lease; one that comes after its deadline ends the request."""
        effects = self.queue.step(Claim(stream, request_id))
        self.see(effects)
        return next((effect.lease for effect in effects if isinstance(effect, Deliver)), None)

    def see(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Ended):
                assert effect.request_id not in self.ended, "ended twice"
                assert effect.completion_seq > self.last_cursor, "the cursor only grows"
                assert 0 <= effect.attempts <= RULES.max_attempts
                self.last_cursor = effect.completion_seq
                self.ended[effect.request_id] = effect.outcome
            elif isinstance(effect, Announce):
                assert effect.request_id not in self.announced
                assert effect.stream == self.backlog
                self.announced.add(effect.request_id)
            elif isinstance(effect, Gone):
                self.announced.remove(effect.request_id)
            elif isinstance(effect, StopRun):
                assert effect.stream in self.streams.values()

    def pick(self, index: int) -> str:
        return self.names[index % len(self.names)] if self.names else "0a1b2c3d-00000000dead"

    @invariant()
    def the_audit_finds_nothing(self) -> None:
        assert self.queue.machine.audit.whole() == ()
        assert self.queue.machine.audit.look() == ()
        assert list(differences(self.queue.store, list(self.queue.machine.book.entries.values()))) == []

    @invariant()
    def the_store_is_sound(self) -> None:
        assert [found.line() for found in Verifier(self.queue.store).violations()] == []

    @invariant()
    def every_model_has_a_window_of_its_own(self) -> None:
        if self.backlog is not None:
            waiting = Counter(entry.meta.model for entry in self.queue.machine.book.entries.values() if ready(entry))
            known = Counter(self.model_of(request_id) for request_id in self.announced)
            assert all(known[model] >= min(count, self.limit) for model, count in waiting.items())

    def model_of(self, request_id: str) -> str:
        entry = self.queue.machine.book.find(request_id)
        assert entry is not None
        return entry.meta.model

    @rule(
        priority=st.integers(-1, 1),
        batch=st.sampled_from(["", "b"]),
        wait=st.none() | st.integers(-50, 200),
        model=st.sampled_from(["", "a", "b"]),
    )
    def submit(self, priority: int, batch: str, wait: int | None, model: str) -> None:
        deadline_ns = 0 if wait is None else max(1, self.queue.now_ns + wait)
        name = f"key-{len(self.names)}"
        made = meta(priority=priority, batch=batch, deadline_ns=deadline_ns, idempotency_key=name, model=model)
        (request_id,) = self.queue.submit(made)
        self.resync()
        self.see(self.queue.tick(0))
        assert request_id not in self.names
        self.names.append(request_id)

    def resync(self) -> None:
        """Have the effects of a helper's submit forgotten: the scheduler opens a new stream."""
        if self.backlog is not None:
            self.open_backlog(self.limit)

    @rule(worker=st.sampled_from(WORKERS), same_life=st.booleans(), keep=st.booleans())
    def open_work(self, worker: str, same_life: bool, keep: bool) -> None:
        stream = self.next_stream
        self.next_stream += 1
        life = "life" if same_life else f"life-{stream}"
        opened = WorkerOpened(stream, worker, life, tuple(self.leases) if keep else ())
        if worker in self.streams and self.lives[worker] != life:
            assert NameTaken(stream, worker) in self.queue.step(opened)
            return
        self.streams[worker], self.lives[worker] = stream, life
        self.step(opened)

    @precondition(lambda self: self.streams)
    @rule(worker=st.sampled_from(WORKERS))
    def close_work(self, worker: str) -> None:
        if worker in self.streams:
            self.step(WorkerClosed(self.streams.pop(worker)))

    @rule(limit=st.integers(0, 5))
    def open_backlog(self, limit: int) -> None:
        self.limit = limit
        self.backlog = self.next_stream
        self.next_stream += 1
        self.announced.clear()
        self.see(self.queue.open_backlog(self.backlog, limit))

    @rule(limit=st.integers(0, 5), served=st.lists(st.sampled_from(["", "a", "b"]), unique=True))
    def set_window(self, limit: int, served: list[str]) -> None:
        if self.backlog is not None:
            self.limit = limit
            self.step(SetWindow(self.backlog, "batch", limit, tuple(served)))

    @rule()
    def close_backlog(self) -> None:
        if self.backlog is not None:
            self.step(BacklogClosed(self.backlog))
            self.backlog = None
            self.announced.clear()

    @precondition(lambda self: self.streams)
    @rule(worker=st.sampled_from(WORKERS), index=INDEX)
    def claim(self, worker: str, index: int) -> None:
        if worker not in self.streams:
            return
        entry = self.queue.machine.book.find(self.pick(index))
        waits = entry is not None and ready(entry)
        lease = self.lease_of(self.streams[worker], self.pick(index))
        if lease is None:
            self.resync()
        else:
            assert waits
            self.took(lease)

    def took(self, lease: LeaseRef) -> None:
        """Note a lease of one of the helper's claims."""
        self.resync()
        assert lease.fencing_token > self.last_token
        self.last_token = lease.fencing_token
        attempt = (lease.request_id, lease.attempt)
        assert attempt not in self.attempts, "no two have one number, or tokens of both would be taken for one"
        self.attempts.add(attempt)
        self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(index=INDEX, outcome=st.none() | st.sampled_from([Outcome.COMPLETED, Outcome.CANCELLED, Outcome.REJECTED]))
    def complete(self, index: int, outcome: Outcome | None) -> None:
        lease = self.leases[index % len(self.leases)]
        failure = Failure("oom", "out of memory") if outcome is None else None
        self.step(Complete(1, lease, outcome, failure, None))

    @precondition(lambda self: self.leases)
    @rule(index=INDEX)
    def give_back(self, index: int) -> None:
        self.step(GiveBack(1, (self.leases[index % len(self.leases)],)))

    @precondition(lambda self: self.leases and self.streams)
    @rule(index=INDEX)
    def renew(self, index: int) -> None:
        stream = next(iter(self.streams.values()))
        self.step(Renew(stream, (self.leases[index % len(self.leases)],)))

    @rule(index=INDEX)
    def cancel(self, index: int) -> None:
        self.step(Cancel(1, (self.pick(index),)))

    @rule(index=INDEX)
    def reject(self, index: int) -> None:
        if self.backlog is not None:
            self.step(Reject(self.backlog, self.pick(index), Failure("pool_too_small", "9 of 4 blocks")))

    @rule(index=INDEX)
    def fail_until_dead(self, index: int) -> None:
        """Claim one request, hand it back, then let it fail until it ends, which chance alone would seldom do."""
        if "a" not in self.streams:
            self.open_work("a", True, True)
        name = self.pick(index)
        first = self.lease_of(self.streams["a"], name)
        if first is not None:
            self.took(first)
            self.step(GiveBack(1, (first,)))
        while (lease := self.lease_of(self.streams["a"], name)) is not None:
            self.took(lease)
            self.step(Complete(1, lease, None, Failure("oom", "out of memory"), None))

    @rule()
    def requeue_dead(self) -> None:
        dead = [name for name, outcome in self.ended.items() if outcome is Outcome.DEAD]
        for name in dead:
            del self.ended[name]
        self.step(RequeueDead(1, tuple(dead)))

    @rule(after_ns=st.sampled_from([1, 11, LEASE_NS + 1]))
    def tick(self, after_ns: int) -> None:
        self.see(self.queue.tick(after_ns))

    @rule(for_ns=st.sampled_from([1, PATIENCE_NS, LEASE_NS + 1]))
    def stand_still(self, for_ns: int) -> None:
        self.see(self.queue.stand_still(for_ns))

    @rule()
    def restart(self) -> None:
        self.queue.restart()
        self.streams.clear()
        self.backlog = None
        self.announced.clear()

    @invariant()
    def every_request_lives_or_has_one_result(self) -> None:
        book = self.queue.machine.book
        rows = {records.seq_of(key): row for key, row in self.queue.store.scan(records.RESULTS, b"", b"", 1000)}
        for name in self.names:
            entry = book.find(name)
            seq = int(name.partition("-")[2], 16)
            if name in self.ended:
                assert seq in rows
                assert entry is None or entry.state is State.DEAD
            else:
                assert entry is not None, "lost"
                assert entry.state not in {State.DEAD, State.DONE}
                assert seq not in rows
        assert len(rows) == len(self.ended) == book.counters.results
        log = self.queue.store.scan(records.COMPLETIONS, b"", b"", 1000)
        assert sorted(records.seq_of(value) for _, value in log) == sorted(rows)

    @invariant()
    def the_store_holds_what_memory_holds(self) -> None:
        book = self.queue.machine.book
        states = {State.READY: records.READY, State.DEAD: records.DEAD}
        for state, family in states.items():
            count = sum(entry.state is state for entry in book.entries.values())
            assert len(self.queue.store.scan(family, b"", b"", 1000)) == count
        assert len(self.queue.store.scan(records.LEASES, b"", b"", 1000)) == len(book.leases)
        assert len(self.queue.store.scan(records.PAYLOADS, b"", b"", 1000)) == len(book.entries)

    @invariant()
    def counts_add_up(self) -> None:
        book = self.queue.machine.book
        waiting = sum(len(line) for line in book.lines.values())
        assert waiting + len(book.leases) + len(book.dead) == len(book.entries)
        assert sum(book.leased_by_channel.values()) == sum(book.leased_by_batch.values()) == len(book.leases)
        assert sum(len(held) for held in book.holdings.values()) == len(book.leases)
        assert sum(len(live) for live in book.batches.values()) == waiting + len(book.leases)
        assert all(entry.attempts <= RULES.max_attempts for entry in book.entries.values())
        assert list(book.leases.values()) == sorted(book.leases.values())
        assert all(expires_ns <= self.queue.now_ns + LEASE_NS for expires_ns in book.leases.values())

    @invariant()
    def announced_requests_wait(self) -> None:
        for name in self.announced:
            entry = self.queue.machine.book.find(name)
            assert entry is not None
            assert entry.state is State.READY


QueueMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=60, deadline=None)
TestQueueMachine = QueueMachine.TestCase
