"""One simulated life of a fleet: faults first, then health, then everything must have ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from services.queue.core import messages as qm
from services.queue.core.entry import RequestMeta, request_id_of
from tests.simulation.queue_actor import CHANNELS, STORE_ID, QueueActor
from tests.simulation.scheduler_actor import SchedulerActor
from tests.simulation.worker_actor import WINDOW, WorkerActor
from tests.simulation.world import MS, START_NS, Options, World

MOST_EVENTS = 400_000
HEAL_NS = 60_000 * MS
"""Virtual time the healed fleet gets to end everything; leases expire after 2 s of it."""

RESUBMIT_NS = 200 * MS


@dataclass
class Client:
    """Submits each request under its key until it is acknowledged, and cancels some."""

    world: World
    queue: QueueActor
    options: Options
    acked: dict[str, str] = field(default_factory=dict)
    tickets: int = 0

    def begin(self) -> None:
        """Plan every submit."""
        for number in range(self.options.requests):
            when_ns = self.world.rng.randint(0, self.options.fault_window_ns)
            self.world.after(when_ns, lambda n=number: self._submit(n))  # type: ignore[misc]

    def _meta(self, number: int) -> RequestMeta:
        rng = self.world.rng
        over_long = self.world.chance(self.options.over_long_share)
        deadline = self.world.chance(self.options.deadline_share)
        return RequestMeta(
            tenant="", idempotency_key=f"key-{number}", channel=CHANNELS[number % 2], model="",
            batch=f"batch-{number % self.options.batches}", priority=rng.randint(0, 2),
            deadline_ns=self.world.now_ns + rng.randint(1, 2000) * MS if deadline else 0, traceparent="",
            client_reference=str(number), prompt_bytes=4 * (WINDOW + 10 if over_long else rng.randint(1, WINDOW - 100)),
            prompt_tokens=0, max_tokens=rng.randint(1, 99), n=1, chat=False, prefix_digest=0,
            submitted_ns=self.world.now_ns,
        )  # fmt: skip

    def _submit(self, number: int) -> None:
        meta = self._meta(number)

        def attempt() -> None:
            if meta.idempotency_key in self.acked:
                return
            self.tickets += 1
            ticket = self.tickets
            self.queue.submit(ticket, meta.idempotency_key, meta)
            self.world.after(self.world.delay_ns(), lambda: self._read_ack(ticket, meta))
            self.world.after(RESUBMIT_NS, attempt)

        attempt()

    def _read_ack(self, ticket: int, meta: RequestMeta) -> None:
        acks = self.queue.answers.pop(ticket, None)
        if acks is None:
            return
        request_id = acks[0][0]
        known = self.acked.setdefault(meta.idempotency_key, request_id)
        assert known == request_id, "one key, two requests"
        if self.world.chance(self.options.cancel_share):
            cancel = qm.Cancel(10**9 + ticket, (request_id,))
            self.world.after(self.world.rng.randint(1, 500) * MS, lambda: self.queue.handle(cancel))


@dataclass
class Simulation:
    """A fleet under one seed."""

    options: Options

    def __post_init__(self) -> None:
        options = self.options
        self.world = World(options.seed, options.most_delay_ns)
        self.queue = QueueActor(self.world)
        self.scheduler = SchedulerActor(self.world, self.queue, options.policy)
        self.workers = [
            WorkerActor(self.world, f"w{i}", self.queue, self.scheduler, options.failing_share)
            for i in range(options.workers)
        ]
        self.client = Client(self.world, self.queue, options)
        self.seen = Counter[str]()

    def run(self) -> Counter[str]:
        """Play it; return how often each fault happened. Raises AssertionError if a promise is broken."""
        self.client.begin()
        for _ in range(self.options.faults):
            self.world.after(self.world.rng.randint(0, self.options.fault_window_ns), self._fault)
        deadline_ns = START_NS + self.options.fault_window_ns + HEAL_NS
        while not (self._faults_over() and self._all_ended() and self._all_home()):
            assert self.world.now_ns < deadline_ns, f"not everything ended: {self._left()}"
            assert self.world.events < MOST_EVENTS, f"too many events: {self._left()}"
            assert self.world.step(), "nothing left to do, but not everything ended"
        self._check_end()
        for happened in (self.queue.seen, self.scheduler.seen, *(worker.seen for worker in self.workers)):
            self.seen.update(happened)
        return self.seen

    # ---- faults ----

    def _fault(self) -> None:
        worker = self.world.rng.choice(self.workers)
        streams = {"Work": worker.work, "Credits": worker.credits, "Backlog": self.scheduler.backlog}
        kind = self.world.rng.choice(
            ["queue", "before", "after", "scheduler", "worker", "Work", "Credits", "Backlog", "partition", "partition"]
        )
        if kind == "queue":
            self.queue.crash()
        elif kind == "before":
            self.queue.crash_before_commit = True
        elif kind == "after":
            self.queue.crash_after_commit = True
        elif kind == "scheduler":
            self.scheduler.crash()
        elif kind == "worker":
            worker.crash()
        elif kind == "partition":
            worker.partition(self.world.rng.randint(100, 2000) * MS)
        else:
            stream = streams[kind]
            if stream is not None:
                self.world.note(f"{worker.name}: the {kind} stream breaks")
                self.seen[f"{kind} stream broken"] += 1
                stream.close()

    # ---- the end ----

    def _faults_over(self) -> bool:
        return self.world.now_ns - START_NS > self.options.fault_window_ns

    def _all_ended(self) -> bool:
        return len(self.client.acked) == self.options.requests and len(self.queue.ended) >= self.options.requests

    def _all_home(self) -> bool:
        workers = list(self.scheduler.machine.fleet)
        return (
            len(workers) == self.options.workers
            and all(w.closed_ns is None and w.ledger.free_blocks == w.shape.capacity_blocks for w in workers)
            and all(worker.up and worker.session.idle for worker in self.workers)
        )

    def _left(self) -> str:
        entries = [f"{e.seq}:{e.state.name}" for e in self.queue.machine.book.entries.values()]
        ledgers = {w.worker_id: sorted(w.ledger) for w in self.scheduler.machine.fleet}
        waiting = {e.request_id[-4:]: e.state.name for e in self.scheduler.machine.backlog.entries()}
        held = {w.name: [(e.request_id[-4:], e.state.name) for e in w.session._held.by_request.values()]
                for w in self.workers}  # fmt: skip
        return f"queue {entries}; ledgers {ledgers}; backlog {waiting}; sessions {held}"

    def _check_end(self) -> None:
        ids = set(self.client.acked.values())
        assert len(ids) == self.options.requests, "two keys, one request"
        assert set(self.queue.ended) == ids, "something ended that nobody asked for, or is lost"
        assert all(request_id.startswith(request_id_of(STORE_ID, 0)[:9]) for request_id in ids)
        for name, line in self.queue.machine.book.lines.items():
            assert len(line) == 0, f"{name} still has a line"
        assert not self.queue.machine.book.leases
