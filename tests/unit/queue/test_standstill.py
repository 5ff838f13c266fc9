"""A queue whose process or disk stood still hears its workers before it takes their leases for lost."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.files.v1 import files_pb2, files_pb2_grpc
from penstock.queue.v1 import queue_pb2
from services.queue.clockwork import Clockwork
from services.queue.committer import MAX_INBOX
from services.queue.core.effects import Deliver, StopRun, Submitted, Write
from services.queue.core.entry import LeaseRef
from services.queue.core.messages import Claim, Renew, StoodStill, Tick, WorkerOpened
from services.telemetry import Telemetry
from tests.support.committing import Rig, committing
from tests.support.memory_store import MemoryStore
from tests.support.queueing import LEASE_NS
from tests.support.serving import Peer, serving, text


async def test_a_queue_that_was_stopped_for_longer_than_a_lease_hears_its_workers_first() -> None:
    async with serving(Telemetry(None)) as peer:
        peer.service.committer.machine.book._lease_ns = 10**9
        (name,) = await peer.submit(text())
        work = await peer.work()
        delivery = await work.claim(name)
        time.sleep(2.5)  # as SIGSTOP does, it stops the service's own loop
        assert (await work.complete(delivery.lease)).accepted


async def test_a_queue_that_was_stopped_until_its_workers_gave_it_up_takes_nothing_for_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(Telemetry(None)) as peer:
        (name,) = await peer.submit(text())
        work = await peer.work()
        await work.claim(name)
        peer.service._clock._offset_ns += 40 * 10**9
        while "the queue stood still for 40." not in caplog.text:
            await asyncio.sleep(0.01)
        await work.close()
        await peer.work(life="2")
        got = await peer.stub.Get(queue_pb2.GetRequest(request_id=name))
        assert (got.state, got.attempts) == (queue_pb2.REQUEST_STATE_READY, 0)


async def stalled_beside_a_run(rig: Rig) -> tuple[LeaseRef, asyncio.Future[Submitted]]:
    """Return the lease of a run, and a submit whose write stands still."""
    acks = await rig.submit()
    await rig.settled(WorkerOpened(1, "w", "i", ()))
    await rig.settled(Claim(1, acks.acks[0][0]))
    (delivered,) = [effect for effect in rig.ear.effects if isinstance(effect, Deliver)]
    rig.store.writing.clear()
    rig.store.may_write.clear()
    stalled = rig.submit(40)
    while not rig.store.writing.is_set():
        await asyncio.sleep(0)
    return delivered.lease, stalled


async def test_what_a_worker_said_while_the_disk_stood_still_is_heard_before_its_leases_are_looked_at() -> None:
    async with committing() as rig:
        lease, stalled = await stalled_beside_a_run(rig)
        rig.clock.pass_ns(LEASE_NS + 1)
        rig.committer.post(Tick())
        rig.committer.post(Renew(1, (lease,)))
        rig.store.may_write.set()
        await stalled
        await rig.settled(Tick())
        assert not [effect for effect in rig.ear.effects if isinstance(effect, StopRun)]
        assert rig.committer.machine.runs(lease.request_id, lease.attempt)


async def test_what_readers_hold_while_the_inbox_is_full_is_heard_before_leases_are_looked_at() -> None:
    async with committing() as rig:
        lease, stalled = await stalled_beside_a_run(rig)
        for _ in range(MAX_INBOX):
            rig.committer.post(Renew(2, ()))

        async def read() -> None:
            await rig.committer.room()
            rig.committer.post(Renew(1, (lease,)))

        reader = asyncio.ensure_future(read())
        rig.clock.pass_ns(LEASE_NS + 1)
        rig.committer.post(Tick())
        await asyncio.sleep(0)
        rig.store.may_write.set()
        await stalled
        await reader
        await rig.settled(Tick())
        assert not [effect for effect in rig.ear.effects if isinstance(effect, StopRun)]


class Late:
    """A loop whose every turn is late by so much, and the time it takes."""

    def __init__(self, late_s: float) -> None:
        self.late_s = late_s
        self.time_ns = 0
        self.posted: list[object] = []
        self.loaded = asyncio.Event()
        self.turns = 0

    def now_ns(self) -> int:
        """Return the time."""
        return self.time_ns

    def post(self, item: object) -> None:
        """Keep what is posted."""
        self.posted.append(item)

    async def sleep(self, delay_s: float) -> None:
        """Take longer; load at the third turn, and end at the thousandth."""
        self.time_ns += int((delay_s + self.late_s) * 1e9)
        self.turns += 1
        if self.turns == 3:
            self.loaded.set()
        if self.turns == 1000:
            raise TimeoutError

    async def ticks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Run a clockwork on it."""
        monkeypatch.setattr("services.queue.clockwork.asyncio", SimpleNamespace(sleep=self.sleep))
        works = object.__new__(Clockwork)
        monkeypatch.setattr(works, "_settings", SimpleNamespace(worker_grace_s=2.0, channels=()), raising=False)
        monkeypatch.setattr(works, "_clock", self, raising=False)
        monkeypatch.setattr(works, "_committer", self, raising=False)
        monkeypatch.setattr(works, "_keep_house", lambda: None)
        with pytest.raises(TimeoutError):
            await works.ticks()

    @property
    def machine(self) -> Any:
        """Return a machine without requests."""
        return SimpleNamespace(book=SimpleNamespace(entries=()), overview=lambda: SimpleNamespace(lines=()))


@pytest.mark.parametrize("late_s", [0.0, 1.1, 70.0])
async def test_a_queue_that_is_late_again_and_again_ticks_all_the_same(
    monkeypatch: pytest.MonkeyPatch, late_s: float
) -> None:
    loop = Late(late_s)
    await loop.ticks(monkeypatch)
    ticks = sum(isinstance(item, Tick) for item in loop.posted)
    assert ticks >= (80 if late_s else 990), "ten turns of a fifth of a second are a grace"
    stood = [item.for_ns for item in loop.posted if isinstance(item, StoodStill)]
    assert {round(each / 1e9, 3) for each in stood} == ({late_s} if late_s else set())


async def test_a_standstill_while_the_store_is_loaded_is_told_before_the_first_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Late(70.0)
    await loop.ticks(monkeypatch)
    first = next(place for place, item in enumerate(loop.posted) if isinstance(item, Tick))
    assert [type(item) for item in loop.posted[:first]] == [StoodStill] * 3


SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
QUEUE, FILES = "penstock.queue.v1.QueueService", "penstock.files.v1.FilesService"


class HangingStore(MemoryStore):
    """A store whose disk answers only when a test lets it; what cannot wait is not written at once."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.answers.set()
        self.asked = threading.Event()

    def write(self, writes: Sequence[Write]) -> None:
        """Write once the disk answers."""
        self.asked.set()
        assert self.answers.wait(60)
        super().write(writes)

    def write_at_once(self, writes: Sequence[Write]) -> bool:
        """Leave it to `write`."""
        return False


def submit(peer: Peer) -> Any:
    return peer.stub.SubmitUnary(queue_pb2.SubmitUnaryRequest(requests=[text()]))


def upload(peer: Peer) -> Any:
    return files_pb2_grpc.FilesServiceStub(peer.channel).CreateFile(files_pb2.CreateFileRequest(file_id="f"))


async def test_a_tick_that_waits_while_the_queue_is_stopped_in_a_commit_takes_no_lease() -> None:
    store = HangingStore()
    async with serving(Telemetry(None), store) as peer:
        (name,) = await peer.submit(text())
        work = await peer.work()
        delivery = await work.claim(name)
        store.answers.clear()
        store.asked.clear()
        submitted = asyncio.ensure_future(submit(peer))
        assert await asyncio.to_thread(store.asked.wait, 30)
        while peer.service.committer._tick is None:
            await asyncio.sleep(0.01)
        peer.service._clock._offset_ns += 70 * 10**9
        store.answers.set()
        await submitted
        assert (await work.complete(delivery.lease)).accepted


@pytest.mark.parametrize("change", [submit, upload], ids=["requests", "files"])
async def test_a_queue_whose_disk_does_not_answer_says_that_it_takes_no_changes_and_lives(change: Any) -> None:
    store = HangingStore()
    async with serving(Telemetry(None), store) as peer:
        health = health_pb2_grpc.HealthStub(peer.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=QUEUE))
        assert (await watch.read()).status == SERVING
        store.answers.clear()
        store.asked.clear()
        call = asyncio.ensure_future(change(peer))
        assert await asyncio.to_thread(store.asked.wait, 30)
        peer.service._clock._offset_ns += 20 * 10**9
        assert (await watch.read()).status == NOT_SERVING
        told = (await health.List(health_pb2.HealthListRequest())).statuses
        assert {name: told[name].status for name in told} == {"": SERVING, QUEUE: NOT_SERVING, FILES: NOT_SERVING}
        age_s = peer.registry.get_sample_value("penstock_queue_commit_age_seconds")
        assert age_s is not None
        assert age_s >= 20
        store.answers.set()
        assert (await watch.read()).status == SERVING
        await call
