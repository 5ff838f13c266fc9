"""A machine of the queue with its store, as the committer would drive it, for tests without a loop."""

from __future__ import annotations

from penstock.request.v1.request_pb2 import Request, Result
from services.queue import wire
from services.queue.core import records
from services.queue.core.effects import Deliver, Effect, PutResult, Submitted, Write
from services.queue.core.entry import DEFAULT_TENANT, Failure, LeaseRef, RequestMeta
from services.queue.core.lifecycle import Outcome
from services.queue.core.machine import Machine
from services.queue.core.messages import (
    BacklogOpened,
    Claim,
    Complete,
    EndedRow,
    Message,
    NewRequest,
    SetWindow,
    StoodStill,
    Submit,
    Tick,
    WorkerOpened,
)
from services.queue.core.workers import Rules
from services.queue.storage.recovery import recover
from services.queue.storage.store import Store
from tests.support.memory_store import MemoryStore

STORE_ID = "0a1b2c3d"
LEASE_NS = 60
PAYLOAD = Request(text="payload").SerializeToString()
GRACE_NS = 10
PATIENCE_NS = 20
RULES = Rules(
    ("interactive", "batch"),
    max_attempts=3,
    lease_ns=LEASE_NS,
    worker_grace_ns=GRACE_NS,
    max_inflight=4,
    patience_ns=PATIENCE_NS,
)


def meta(**fields: object) -> RequestMeta:
    """Return metadata with every field at its emptiest, but for `fields`."""
    values: dict[str, object] = {
        "tenant": DEFAULT_TENANT,
        "idempotency_key": "",
        "channel": "batch",
        "model": "",
        "batch": "",
        "priority": 0,
        "deadline_ns": 0,
        "traceparent": "",
        "client_reference": "",
        "prompt_bytes": 2,
        "prompt_tokens": 0,
        "max_tokens": 4,
        "n": 1,
        "chat": False,
        "prefix_digest": 0,
    }
    return RequestMeta(**{**values, **fields})  # type: ignore[arg-type]


class Queue:
    """A machine over a memory store. Every step is committed before its effects are returned."""

    def __init__(self, rules: Rules = RULES, store: Store | None = None) -> None:
        """Start at time 1 with what `store` holds, or with an empty one in memory."""
        self.rules = rules
        self.store: Store = store or MemoryStore()
        self.store.write(
            [
                Write(records.META, records.SCHEMA_KEY, str(records.SCHEMA_VERSION).encode()),
                Write(records.META, records.STORE_ID_KEY, STORE_ID.encode()),
            ]
        )
        self.now_ns = 1
        self.machine = self._build()

    def _build(self) -> Machine:
        return Machine(STORE_ID, self.rules, recover(self.store), self.now_ns)

    def restart(self) -> None:
        """Lose all memory; keep the store."""
        self.machine = self._build()

    def step(self, *messages: Message) -> list[Effect]:
        """Take messages as one batch; return the effects other than writes."""
        effects: list[Effect] = []
        for message in messages:
            effects += self.machine.step(message, self.now_ns)
        writes = [effect for effect in effects if isinstance(effect, Write)]
        writes += [wire.result_write(effect) for effect in effects if isinstance(effect, PutResult)]
        self.store.write([*writes, self.machine.seal().counters])
        return [effect for effect in effects if not isinstance(effect, Write | PutResult)]

    def submit(self, *metas: RequestMeta) -> list[str]:
        """Submit requests; return their names."""
        effects = self.step(Submit(0, tuple(NewRequest(m, PAYLOAD) for m in metas)))
        (answer,) = (effect for effect in effects if isinstance(effect, Submitted))
        return [name for name, _ in answer.acks]

    def claim(self, stream: int, request_id: str) -> LeaseRef | None:
        """Claim a request; return its lease, or None if the claim was refused."""
        for effect in self.step(Claim(stream, request_id)):
            if isinstance(effect, Deliver):
                return effect.lease
        return None

    def complete(
        self, stream: int, lease: LeaseRef, outcome: Outcome = Outcome.COMPLETED, result: Result | None = None
    ) -> list[Effect]:
        """Complete a lease with a result."""
        body = None if result is None else wire.RunResult(result)
        return self.step(Complete(stream, lease, outcome, None, body))

    def open_backlog(self, stream: int, limit: int = 100) -> list[Effect]:
        """Open a Backlog stream with the same window for every channel."""
        windows = (SetWindow(stream, channel, limit) for channel in self.rules.channels)
        return self.step(BacklogOpened(stream), *windows)

    def tick(self, after_ns: int) -> list[Effect]:
        """Let time pass."""
        self.now_ns += after_ns
        return self.step(Tick())

    def stand_still(self, for_ns: int = PATIENCE_NS) -> list[Effect]:
        """Let time pass in which nobody is heard."""
        self.now_ns += for_ns
        return self.step(StoodStill(for_ns))


def only(kind: type, effects: list[Effect]) -> list[Effect]:
    """Return the effects of one kind."""
    return [effect for effect in effects if isinstance(effect, kind)]


def working(queue: Queue, stream: int = 1, worker: str = "w") -> Queue:
    """Return the queue with a worker connected."""
    queue.step(WorkerOpened(stream, worker, "life-1", ()))
    return queue


def dead_letter(queue: Queue) -> tuple[str, EndedRow]:
    """Have a request die; return its name and what a shell reads of its result."""
    (name,) = queue.submit(meta(idempotency_key="k"))
    for _ in range(queue.rules.max_attempts):
        lease = queue.claim(1, name)
        assert lease is not None
        queue.step(Complete(1, lease, None, Failure("out_of_memory", "no room"), None))
    ((key, row),) = queue.store.scan(records.RESULTS, b"", b"", 2)
    return name, EndedRow(records.seq_of(key), *records.decode_result(row)[0])
