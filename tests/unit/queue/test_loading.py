"""A start on a large store: submits are served at once, everything else when all requests are known."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Sequence
from unittest.mock import patch

import pytest

from penstock.queue.v1 import queue_pb2
from services.queue.committer import MAX_INBOX, Committer, RefusedError
from services.queue.core import records
from services.queue.core.effects import Announce, BacklogReady, Effect, Inspected, Write
from services.queue.core.entry import DEFAULT_TENANT, BatchKey
from services.queue.core.lifecycle import State
from services.queue.core.machine import Machine
from services.queue.core.messages import (
    BacklogOpened,
    Cancel,
    Inspect,
    NewRequest,
    SetWindow,
    Submit,
    Tick,
    WorkerOpened,
)
from services.queue.outlet import Early, Released
from services.queue.storage.loading import Loading
from services.queue.storage.recovery import Recovery, recover
from services.queue.storage.store import Row, StoreError, StoreUnusableError
from services.queue.submits.intake import submit_item
from services.telemetry import Telemetry
from tests.support.memory_store import MemoryStore
from tests.support.queueing import RULES, STORE_ID, Queue, meta
from tests.support.serving import serving, text

WAITING = 20
PAGE_ROWS = 4
FIRST_REQUESTS = 8


class GatedStore(MemoryStore):
    """A store whose metadata can be read only as far as a test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.payload_reads = 0
        self.failure = ""

    def write(self, writes: Sequence[Write]) -> None:
        if self.failure:
            raise StoreError(self.failure)
        super().write(writes)

    def scan(self, family: str, start: bytes, end: bytes, limit: int) -> list[Row]:
        if family == records.REQUESTS and start > records.seq_key(FIRST_REQUESTS):
            assert self.gate.wait(30)
        self.payload_reads += family == records.PAYLOADS
        return super().scan(family, start, end, limit)


class Ear:
    """Keeps what was released."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.progress: dict[BatchKey, tuple[int, int]] = {}

    def foretell(self, early: Early) -> None:
        self.effects += [*early.for_workers, *early.for_scheduler]

    def release(self, released: Released) -> None:
        self.effects += released.effects
        self.progress.update(released.progress)

    def reset(self, machine: Machine) -> None:
        """Not of interest."""

    def observe_commit(self, messages: int, seconds: float) -> None:
        """Not of interest."""


class Clock:
    time_ns = 1_000

    def now_ns(self) -> int:
        return self.time_ns


class Start:
    """A queue that starts on a store with waiting requests, one of them leased."""

    loop: asyncio.Task[None]

    def __init__(self) -> None:
        before = Queue()
        self.store = before.store = GatedStore()
        self.names = before.submit(*(meta(idempotency_key=f"k{n}", batch="b") for n in range(WAITING)))
        before.step(WorkerOpened(1, "w", "life", ()))
        before.claim(1, self.names[-1])
        self.store.gate.clear()
        self.ear, self.clock = Ear(), Clock()
        loading = Loading(Recovery(self.store))
        self.committer = Committer(
            self.store,
            lambda: Machine(STORE_ID, RULES, recover(self.store), 1_000),
            self.clock,
            self.ear,
            0,
            loading,
            Machine(STORE_ID, RULES, loading.first, 1_000),
        )

    def submit(self, key: str) -> asyncio.Future[object]:
        new = (NewRequest(meta(idempotency_key=key, batch="b"), b"p"),)
        return self.committer.promise(lambda ticket: submit_item(ticket, new))

    def inspect(self, *names: str) -> asyncio.Future[Inspected]:
        return self.committer.promise(lambda ticket: Inspect(ticket, names))


@pytest.fixture
async def start(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    monkeypatch.setattr("services.queue.storage.recovery.PAGE_ROWS", PAGE_ROWS)
    monkeypatch.setattr("services.queue.storage.loading.FIRST_REQUESTS", FIRST_REQUESTS)
    start = Start()
    start.loop = asyncio.create_task(start.committer.run())
    yield start
    start.store.gate.set()
    start.committer.stop()
    await asyncio.wait([start.loop])


async def test_submits_are_served_while_the_store_is_loaded(start: Start) -> None:
    new = await start.submit("fresh")
    assert new.acks[0][1]  # type: ignore[attr-defined]
    assert not start.committer.loaded.is_set()
    assert len(start.committer.machine.book.entries) < WAITING


async def test_a_known_key_is_known_before_its_request_is_loaded(start: Start) -> None:
    again = await start.submit(f"k{WAITING - 2}")
    assert again.acks == ((start.names[-2], False),)  # type: ignore[attr-defined]


async def test_everything_else_waits_for_the_last_request_and_keeps_its_order(start: Start) -> None:
    asked = start.inspect(*start.names)
    cancelled = start.committer.promise(lambda ticket: Cancel(ticket, (start.names[-2],)))
    after = start.inspect(start.names[-2])
    await start.submit("fresh")
    assert not asked.done()
    assert not cancelled.done()
    start.store.gate.set()
    views = (await asked).views
    assert [view is not None and view.state for view in views] == [State.READY] * (WAITING - 1) + [State.LEASED]
    assert (await cancelled).cancelled == 1
    assert (await after).views == (None,)


async def test_what_waits_for_the_last_request_is_bounded_and_submits_go_on(start: Start) -> None:
    for stream in range(MAX_INBOX):
        start.committer.post(BacklogOpened(stream))
    await start.submit("fresh")
    reader = asyncio.create_task(start.committer.room())
    gone = [asyncio.create_task(start.committer.ask(lambda ticket: Inspect(ticket, ()))) for _ in range(3)]
    asked = asyncio.create_task(start.committer.ask(lambda ticket: Inspect(ticket, tuple(start.names))))
    await asyncio.wait_for(start.committer.room(submits=True), 30)
    await start.submit("fresher")
    assert not reader.done()
    for one in gone:
        one.cancel()
    await asyncio.wait(gone)
    assert not asked.done()
    start.store.gate.set()
    await reader
    assert all((await asked).views)
    opened = [effect for effect in start.ear.effects if isinstance(effect, BacklogReady)]
    assert len(opened) == MAX_INBOX, "none is lost"
    told = [effect for effect in start.ear.effects if isinstance(effect, Inspected)]
    assert len(told) == 1, "nothing is kept of who has gone"


async def test_what_is_submitted_meanwhile_is_taken_in_once_and_stands_last(start: Start) -> None:
    await start.submit("fresh")
    start.committer.post(BacklogOpened(9))
    start.committer.post(SetWindow(9, "batch", 100))
    start.store.gate.set()
    await start.inspect()
    announced = [effect.seq for effect in start.ear.effects if isinstance(effect, Announce)]
    assert announced == [*range(1, WAITING), WAITING + 1]
    assert start.ear.progress[DEFAULT_TENANT, "b"] == (WAITING, 1)


async def test_a_store_that_fails_meanwhile_is_read_anew_in_one_go(start: Start) -> None:
    asked = start.inspect(*start.names)
    start.store.failure = "No space left on device"
    refused = start.submit("fresh")
    start.store.gate.set()
    with pytest.raises(RefusedError, match="No space left"):
        await refused
    assert all((await asked).views)
    assert start.committer.loaded.is_set()


async def test_a_store_that_cannot_be_read_meanwhile_is_read_when_the_queue_heals(start: Start) -> None:
    start.store.failure = "Input/output error"
    with patch.object(start.store, "wait_durable", side_effect=StoreError("Input/output error")):
        with pytest.raises(RefusedError, match="Input/output error"):
            await start.submit("fresh")
        assert start.committer.loaded.is_set(), "the ticks that heal come only then"
        with pytest.raises(RefusedError, match="Input/output error"):
            await start.inspect(*start.names)
    start.store.failure = ""
    start.store.gate.set()
    start.clock.time_ns += 2_000_000_000
    start.committer.post(Tick())
    assert all((await start.inspect(*start.names)).views)


async def test_a_store_that_turns_out_damaged_ends_the_queue(start: Start) -> None:
    start.store.write([Write(records.READY, key, None) for key, _ in start.store.scan(records.READY, b"", b"", 99)])
    start.store.gate.set()
    with pytest.raises(StoreUnusableError, match="neither ready, leased nor dead"):
        await asyncio.wait_for(start.loop, 30)


def test_no_payload_is_read() -> None:
    queue = Queue()
    queue.store = store = GatedStore()
    queue.submit(*(meta() for _ in range(WAITING)))
    recover(store)
    assert store.payload_reads == 0


def test_what_is_submitted_after_the_start_is_not_read() -> None:
    queue = Queue()
    queue.submit(meta(), meta())
    recovery = Recovery(queue.store)
    queue.submit(meta())
    assert [entry.seq for page in recovery.pages() for entry in page] == [1, 2]


def waiting_request() -> tuple[Queue, bytes, bytes]:
    """Return a queue with one waiting request, its key in `requests` and its key in `ready`."""
    queue = Queue()
    queue.submit(meta())
    ((key, _),) = queue.store.scan(records.REQUESTS, b"", b"", 9)
    ((ready, _),) = queue.store.scan(records.READY, b"", b"", 9)
    return queue, key, ready


def test_a_request_without_a_state_is_damage() -> None:
    queue, _, ready = waiting_request()
    queue.store.write([Write(records.READY, ready, None)])
    with pytest.raises(StoreUnusableError, match="request 1 is neither ready, leased nor dead"):
        recover(queue.store)


def test_a_request_in_two_states_is_damage() -> None:
    queue, key, _ = waiting_request()
    lease = queue.machine.book.entries[1]
    queue.store.write([Write(records.LEASES, key, records.encode_lease(lease))])
    with pytest.raises(StoreUnusableError, match="request 1 is in two states"):
        recover(queue.store)


@pytest.mark.parametrize("row", [b"[1]", b"[2]", b"x", b"[1],[1]", b'[1,1,"","","","",0,0,"","",0,0,4,1,false,0,1]'])
def test_a_row_that_is_no_metadata_is_damage(row: bytes) -> None:
    queue, key, _ = waiting_request()
    queue.store.write([Write(records.REQUESTS, key, row)])
    with pytest.raises(StoreUnusableError, match="the store is damaged"):
        recover(queue.store)


@pytest.mark.parametrize("seq", [-1, 1 << 64])
def test_a_dead_letter_of_a_request_that_no_key_can_name_is_damage(seq: int) -> None:
    queue, _, _ = waiting_request()
    queue.store.write([Write(records.DEAD, records.seq_key(1), f'[1,{seq},1,"x",5]'.encode())])
    with pytest.raises(StoreUnusableError, match="the store is damaged"):
        recover(queue.store)


def test_counters_that_are_none_are_damage() -> None:
    queue, _, _ = waiting_request()
    queue.store.write([Write(records.META, records.COUNTERS_KEY, b"?")])
    with pytest.raises(StoreUnusableError, match="the store is damaged"):
        recover(queue.store)


def test_a_lease_without_metadata_is_damage() -> None:
    queue, key, _ = waiting_request()
    queue.step(WorkerOpened(1, "w", "life", ()))
    queue.claim(1, f"{STORE_ID}-{1:012x}")
    queue.store.write([Write(records.REQUESTS, key, None)])
    with pytest.raises(StoreUnusableError, match="request 1 has a state but no metadata"):
        recover(queue.store)


def test_submit_is_the_only_message_that_does_not_wait() -> None:
    loading = Loading(Recovery(MemoryStore()))
    submit = Submit(1, ())
    inspect, opened = Inspect(2, ()), WorkerOpened(1, "w", "life", ())
    assert loading.admit([inspect, submit, opened]) == [submit]
    assert loading.take_held() == [inspect, opened]


class SlowlyReadStore(MemoryStore):
    """A store whose metadata is read only when a test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def scan(self, family: str, start: bytes, end: bytes, limit: int) -> list[Row]:
        if family == records.REQUESTS:
            assert self.gate.wait(30)
        return super().scan(family, start, end, limit)


async def test_a_batch_that_is_being_loaded_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.queue.storage.loading.FIRST_REQUESTS", 0)
    store = SlowlyReadStore()
    before = Queue()
    before.store = store
    before.store.write([Write(records.META, records.STORE_ID_KEY, STORE_ID.encode())])
    before.submit(meta(batch="b"))
    async with serving(Telemetry(None), store) as peer:
        events = asyncio.create_task(peer.stub.Watch(queue_pb2.WatchRequest(batch="b")).read())
        assert len(await peer.submit(text(batch="b"))) == 1, "submits are served"
        assert not events.done()
        store.gate.set()
        first = (await events).events[0]
        assert (first.progress.waiting, first.progress.running) == (2, 0)


async def test_metrics_tell_of_the_disk_at_once_and_of_nothing_that_is_not_known_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.queue.storage.loading.FIRST_REQUESTS", 0)
    store = SlowlyReadStore()
    store.write([Write(records.META, records.STORE_ID_KEY, STORE_ID.encode())])
    names = ("dead_requests", "results_kept", "workers_connected", "scheduler_connected", "watchers_open")
    async with serving(Telemetry(None), store) as peer:

        def shown(name: str) -> float:
            value = peer.registry.get_sample_value(f"penstock_queue_{name}")
            assert value is not None
            return value

        free_bytes, known = shown("disk_free_bytes"), [name for name in names if not math.isnan(shown(name))]
        store.gate.set()
        assert (free_bytes, known) == (store.free_bytes, [])
        while any(math.isnan(shown(name)) for name in names):
            await asyncio.sleep(0.01)
        assert [shown(name) for name in names] == [0] * len(names)
