"""What the queue says while it writes, and that nothing which a lost write said is ever said of anything else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar
from unittest.mock import patch

import pytest

from services.queue.committer import SHORT_READ_BYTES, SHORT_WRITE_NS, RefusedError
from services.queue.core import records
from services.queue.core.effects import Accepted, Announce, Deliver, Gone, Write
from services.queue.core.messages import BacklogOpened, Claim, NewRequest, Offer, SetWindow, Submit, Tick, WorkerOpened
from services.queue.storage.recovery import NUMBERS_SKIPPED, Recovery, recover, store_id_of
from services.queue.storage.store import StoreDamagedError, StoreError
from tests.support.committing import Rig, SlowStore, committing
from tests.support.memory_store import MemoryStore
from tests.support.queueing import STORE_ID, Queue, meta

T = TypeVar("T")


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """A committer with a scheduler on stream 1 and a worker on stream 2, whose disk is known to be fast."""
    async with committing() as rig:
        rig.committer.post(BacklogOpened(1))
        rig.committer.post(SetWindow(1, "batch", 10))
        await rig.settled(WorkerOpened(2, "w", "life", ()))
        await rig.submit()
        yield rig


def said(rig: Rig, kind: type[T]) -> list[T]:
    """Return what was said of one kind, in order."""
    return [effect for effect in rig.ear.effects if isinstance(effect, kind)]


async def written(rig: Rig) -> None:
    """Wait until a write is held up."""
    await asyncio.wait_for(asyncio.to_thread(rig.store.writing.wait, 30), 30)


def hold_up(rig: Rig) -> None:
    """Hold up the next write, on the commits' thread."""
    rig.committer._last_short_ns = 1 << 62
    rig.store.writing.clear()
    rig.store.may_write.clear()


async def test_the_scheduler_is_told_while_the_request_is_written_and_its_client_after(rig: Rig) -> None:
    hold_up(rig)
    answer = rig.submit()
    await written(rig)
    assert len(said(rig, Announce)) == 2
    assert len(said(rig, Accepted)) == 1
    assert not answer.done()
    rig.store.may_write.set()
    ((name, _),) = (await answer).acks
    assert said(rig, Announce)[-1].request_id == name


async def test_a_worker_has_its_request_while_the_lease_is_written(rig: Rig) -> None:
    name = said(rig, Announce)[0].request_id
    hold_up(rig)
    rig.committer.post(Claim(2, name))
    await written(rig)
    (delivery,) = said(rig, Deliver)
    assert delivery.lease.request_id == name
    assert rig.ear.effects.index(delivery) < rig.ear.effects.index(said(rig, Gone)[0]), "the worker is waited for"
    assert not rig.store.scan(records.LEASES, b"", b"", 9)


async def test_a_request_that_meets_an_offer_is_sent_while_it_is_written_itself(rig: Rig) -> None:
    await rig.settled(Offer(2, "standing/1", "batch", "m", False, 100, 0, 4))
    hold_up(rig)
    answer = rig.committer.promise(lambda ticket: Submit(ticket, (NewRequest(meta(model="m"), b"fresh"),)))
    await written(rig)
    (delivery,) = said(rig, Deliver)
    assert delivery.payload == b"fresh"
    assert not rig.store.scan(records.PAYLOADS, records.seq_key(delivery.seq), b"", 1)
    assert not answer.done(), "its client hears when it is on disk"
    rig.store.may_write.set()
    ((name, _),) = (await answer).acks
    assert delivery.lease.request_id == name


async def test_the_streams_go_first_where_the_loops_own_thread_writes(rig: Rig) -> None:
    order: list[str] = []
    loop = asyncio.get_running_loop()

    def tell_soon() -> None:
        loop.call_soon(order.append, "stream")

    rig.ear.on_early = tell_soon
    rig.store.on_write = lambda: order.append("write")
    await rig.submit()
    assert order == ["stream", "write"]


@pytest.mark.parametrize(
    ("payload_bytes", "disk_ns", "on_the_loop"),
    [
        (SHORT_READ_BYTES // 2, SHORT_WRITE_NS, True),
        (SHORT_READ_BYTES // 2 + 1, SHORT_WRITE_NS, False),
        (1, SHORT_WRITE_NS + 1, False),
    ],
)
async def test_large_requests_and_a_slow_disk_do_not_hold_the_loop_up(
    rig: Rig, payload_bytes: int, disk_ns: int, on_the_loop: bool
) -> None:
    new = tuple(NewRequest(meta(payload_bytes=payload_bytes), b"p") for _ in range(2))
    await rig.committer.promise(lambda ticket: Submit(ticket, new))
    threads: list[threading.Thread] = []
    get_many = rig.store.get_many

    def get_some(family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        threads.append(threading.current_thread())
        return get_many(family, keys)

    rig.committer._last_short_ns = disk_ns
    with patch.object(rig.store, "get_many", get_some):
        for announced in said(rig, Announce)[1:]:
            rig.committer.post(Claim(2, announced.request_id))
        await rig.submit()
    assert [thread is threading.main_thread() for thread in threads] == [on_the_loop]
    assert [delivery.seq for delivery in said(rig, Deliver)] == [2, 3]


@pytest.mark.parametrize("error", [StoreError("IO error: Input/output error"), StoreDamagedError("Corruption")])
async def test_a_request_that_cannot_be_read_is_the_trouble_of_nobody_who_did_not_claim_it(
    rig: Rig, error: StoreError
) -> None:
    bad = said(rig, Announce)[0].request_id
    await rig.submit()
    good = said(rig, Announce)[1].request_id
    get, get_many = rig.store.get, rig.store.get_many

    def get_one(family: str, key: bytes) -> bytes | None:
        if (family, key) == (records.PAYLOADS, records.seq_key(1)):
            raise error
        return get(family, key)

    def get_some(family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        return [get_one(family, key) for key in keys] if family == records.PAYLOADS else get_many(family, keys)

    with patch.object(rig.store, "get", get_one), patch.object(rig.store, "get_many", get_some):
        rig.committer.post(Claim(2, bad))
        rig.committer.post(Claim(2, good))
        await rig.submit()
    assert [delivery.seq for delivery in said(rig, Deliver)] == [1, 2]
    assert list(rig.ear.payloads) == [2], "the other is read again when its turn to be sent has come"
    assert len(rig.store.scan(records.LEASES, b"", b"", 9)) == 2, "so that the attempt counts, and they come to an end"
    assert (rig.committer.health.broken, rig.ear.resets) == ("", 0)


async def test_names_and_tokens_that_a_lost_write_has_said_are_not_given_again(rig: Rig) -> None:
    rig.store.failure = "Input/output error"
    name = said(rig, Announce)[0].request_id
    rig.committer.post(Claim(2, name))
    with pytest.raises(RefusedError):
        await rig.submit()
    rig.clock.pass_ns(10**10)
    await rig.settled(Tick())
    assert rig.ear.resets == 2, "of the machine built anew, and of the one built when the store wrote again"
    lost_name, lost_token = said(rig, Announce)[-1].request_id, said(rig, Deliver)[-1].lease.fencing_token
    rig.ear.effects.clear()
    rig.committer.post(BacklogOpened(3))
    rig.committer.post(SetWindow(3, "batch", 10))
    rig.committer.post(WorkerOpened(4, "w", "life", ()))
    await rig.submit()
    rig.committer.post(Claim(4, name))
    await rig.submit()
    names = [announced.request_id for announced in said(rig, Announce)]
    assert names[0] == name
    assert min(names[1:]) > lost_name
    assert said(rig, Deliver)[-1].lease.fencing_token > lost_token


def test_a_start_passes_over_what_the_last_life_may_have_said() -> None:
    queue = Queue()
    queue.submit(meta(), meta())
    recovery = Recovery(queue.store)
    recovery.pass_numbers_over()
    assert (recovery.counters.seq, recovery.counters.fencing_token) == (2 + NUMBERS_SKIPPED, NUMBERS_SKIPPED)
    assert recover(queue.store).counters == recovery.counters, "two starts that write nothing else pass over twice"
    assert [entry.seq for page in recovery.pages() for entry in page] == [1, 2]


def test_a_new_store_begins_with_the_first_name_and_the_next_start_does_not() -> None:
    store = MemoryStore()
    recovery = Recovery(store)
    recovery.pass_numbers_over()
    store_id_of(store, lambda: "fresh")
    assert recovery.counters.seq == 0
    recovery = Recovery(store)
    recovery.pass_numbers_over()
    assert recovery.counters.seq == NUMBERS_SKIPPED


def test_a_store_that_has_a_name_and_no_numbers_yet_is_not_new() -> None:
    """Versions that wrote the numbers with the first request left such stores."""
    store = MemoryStore()
    store.write([Write(records.META, records.STORE_ID_KEY, STORE_ID.encode())])
    for life in (1, 2):
        recovery = Recovery(store)
        recovery.pass_numbers_over()
        assert recovery.counters.seq == life * NUMBERS_SKIPPED


def test_a_start_that_cannot_write_is_none() -> None:
    store = SlowStore()
    store_id_of(store, lambda: "fresh")
    store.free_bytes = 0
    store.failure = "No space left on device"
    with pytest.raises(StoreError, match="No space left"):
        Recovery(store).pass_numbers_over()
