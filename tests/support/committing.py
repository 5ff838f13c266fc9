"""A committer over a store, a clock and an outlet that a test holds in its hands."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from services.queue.committer import Committer
from services.queue.core import records
from services.queue.core.effects import Effect, Submitted, Write
from services.queue.core.machine import Machine
from services.queue.core.messages import Inspect, Message, NewRequest, Submit
from services.queue.outlet import Early, Released
from services.queue.storage.recovery import recover
from services.queue.storage.store import StoreError
from tests.support.memory_store import MemoryStore
from tests.support.queueing import RULES, STORE_ID, meta

WATERMARK_BYTES = 1000


class SlowStore(MemoryStore):
    """A store whose writes wait for permission, and fail if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = threading.Event()
        self.may_write.set()
        self.writing = threading.Event()
        self.batches: list[int] = []
        self.failure = self._failed = ""
        self.in_doubt = False
        self.reopened = 0
        self.threads: list[str] = []
        self.on_write: Callable[[], None] = lambda: None
        self.is_stalled = False
        self.tries = 0
        """Of writes that were not to wait."""

    def write(self, writes: Sequence[Write]) -> None:
        """Write once it is allowed; raises StoreError if told to."""
        self.threads.append(threading.current_thread().name)
        self.on_write()
        self.writing.set()
        assert self.may_write.wait(30)
        self._failed = self.failure
        if self.failure:
            raise StoreError(self.failure)
        super().write(writes)
        self.batches.append(sum(write.family == records.PAYLOADS for write in writes))

    def write_at_once(self, writes: Sequence[Write]) -> bool:
        """Write, unless there is a stall."""
        self.tries += 1
        return not self.is_stalled and super().write_at_once(writes)

    def reopen(self) -> None:
        """Be a good store again."""
        self.reopened += 1
        self.failure, self.in_doubt, self._failed = "", False, ""

    def doubt(self) -> str:
        """Return what failed, if that leaves a doubt."""
        return self.failure if self.in_doubt else ""

    def write_failure(self) -> str:
        """Return what failed."""
        return self._failed


class HandClock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.time_ns = 1_000_000_000_000

    def now_ns(self) -> int:
        """Return a time later than before."""
        self.time_ns += 1
        return self.time_ns

    def pass_ns(self, count_ns: int) -> None:
        """Let time pass."""
        self.time_ns += count_ns


@dataclass
class Ear:
    """Keeps what was said."""

    effects: list[Effect] = field(default_factory=list)
    payloads: dict[int, bytes] = field(default_factory=dict)
    resets: int = 0
    on_early: Callable[[], None] = lambda: None

    def foretell(self, early: Early) -> None:
        """Keep what was said early."""
        self.effects += [*early.for_workers, *early.for_scheduler]
        self.payloads |= early.payloads
        self.on_early()

    def release(self, released: Released) -> None:
        """Keep what was released."""
        self.effects += released.effects

    def reset(self, machine: Machine) -> None:
        """Count it."""
        self.resets += 1

    def observe_commit(self, messages: int, seconds: float) -> None:
        """Not of interest."""


@dataclass
class Rig:
    """A committer that runs, and all around it."""

    store: SlowStore
    clock: HandClock
    ear: Ear
    committer: Committer

    def submit(self, count: int = 1, key: str = "") -> asyncio.Future[Submitted]:
        """Submit requests together."""
        requests = tuple(NewRequest(meta(idempotency_key=key), b"p") for _ in range(count))
        return self.committer.promise(lambda ticket: Submit(ticket, requests))

    def submit_from(self, source: int, count: int) -> list[asyncio.Future[Submitted]]:
        """Submit requests one by one, as of one who submits many."""
        new = (NewRequest(meta(), b"p"),)
        batches = (new[0].meta.batch_key,)
        return [
            self.committer.submit(("t", source), 1, lambda ticket: Submit(ticket, new), batches) for _ in range(count)
        ]

    async def settled(self, message: Message) -> None:
        """Have a message handled."""
        self.committer.post(message)
        await self.committer.ask(lambda ticket: Inspect(ticket, ()))


@asynccontextmanager
async def committing() -> AsyncIterator[Rig]:
    """Yield a committer that runs."""
    store, clock, ear = SlowStore(), HandClock(), Ear()
    committer = Committer(
        store, lambda: Machine(STORE_ID, RULES, recover(store), clock.now_ns()), clock, ear, WATERMARK_BYTES
    )
    loop = asyncio.create_task(committer.run())
    yield Rig(store, clock, ear, committer)
    store.may_write.set()
    committer.stop()
    await loop
