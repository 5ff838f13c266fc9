"""A client that submits faster than the disk syncs is read only as fast as it does, and keeps nobody else waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from penstock.credentials import TENANT
from penstock.queue.v1 import queue_pb2
from services.auth.caller import CALLER, Caller, open_caller
from services.queue.core import records
from services.queue.core.effects import Write
from services.queue.servicer import CHECKED_AT_ONCE
from services.queue.submits.intake import Intake
from services.queue.submits.turns import BYTES_LIKE_ONE_MORE, SUBMITS_AT_ONCE
from services.telemetry import Telemetry
from tests.support.memory_store import MemoryStore
from tests.support.modules import COMPILED
from tests.support.serving import Peer, Request, serving
from tests.support.waiting import wait_for_async

FRAMES = 40
FRAME_BYTES = 1_000_000
MOST_BYTES = 5_000_000

NEVER_NS = 1 << 60
"""No write takes so long, also not the one that a test holds up: none counts as one of a slow disk."""


class SlowStore(MemoryStore):
    """A store whose writes of requests wait for permission."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = threading.Event()
        self.writing = threading.Event()
        self.batches: list[int] = []
        """How many requests each write stored, of those that stored any."""

    def write(self, writes: Sequence[Write]) -> None:
        if payloads := sum(write.family == records.PAYLOADS for write in writes):
            self.writing.set()
            assert self.may_write.wait(30)
            self.batches.append(payloads)
        super().write(writes)


@pytest.mark.parametrize("streams", [1, 3])
async def test_unsynced_submits_are_bounded_over_all_streams(monkeypatch: pytest.MonkeyPatch, streams: int) -> None:
    monkeypatch.setattr("services.queue.servicer.MAX_UNACKED_BYTES", MOST_BYTES)
    store = SlowStore()
    async with serving(Telemetry(None), store) as peer:
        window = peer.service.servicer._bytes
        calls = [peer.stub.Submit(_frames()) for _ in range(streams)]
        for call in calls:
            assert (await call.read()).WhichOneof("message") == "open"
        await wait_for_async(lambda: _full(window), "the window to be full")
        for _ in range(100):
            await peer.stub.Identify(queue_pb2.IdentifyRequest())  # time to be read further
        assert window._count <= MOST_BYTES + FRAME_BYTES + 1000 + BYTES_LIKE_ONE_MORE, "one frame beyond it"
        store.may_write.set()
        for call in calls:
            acked = 0
            while acked < FRAMES:
                acked += len((await call.read()).acks.acks)
        assert window._count == 0


@pytest.mark.parametrize("size", [0, 1, 2])
async def test_a_client_that_does_not_read_its_acks_is_read_no_further(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("services.queue.servicer.MAX_UNACKED", 10)
    async with serving(Telemetry(None), MemoryStore()) as peer:
        sent = 0

        async def requests() -> AsyncIterator[queue_pb2.SubmitRequest]:
            nonlocal sent
            yield queue_pb2.SubmitRequest(open=queue_pb2.SubmitOpen(client_id="deaf"))
            for _ in range(FRAMES):
                sent += 1
                yield _batch(size)

        # Without a connection, which would take in some acks for the client.
        acks = peer.service.servicer.Submit(requests(), None)  # type: ignore[arg-type]
        assert (await anext(acks)).WhichOneof("message") == "open"
        assert len((await anext(acks)).acks.acks) == size
        for _ in range(FRAMES):
            await _unary(peer)  # time for all of it to be read and synced
        assert sent <= 10 // max(size, 1) + 2, "one more is read, and waits for room"
        assert peer.service.servicer._bytes._count == 0, "what is durable takes nothing of what all may have"
        rest = [response async for response in acks]
        assert [len(response.acks.acks) for response in rest] == [size] * (FRAMES - 1)
        assert sent == FRAMES


async def test_one_who_submits_much_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.queue.submits.turns.SUBMITS_WRITE_NS", NEVER_NS)
    store = SlowStore()
    async with serving(Telemetry(None), store) as peer:
        held_up = asyncio.ensure_future(_unary(peer))
        await asyncio.to_thread(store.writing.wait, 30)
        much, little = await _opened(peer), await _opened(peer)
        await much.write(_batch(5 * SUBMITS_AT_ONCE))
        await wait_for_async(lambda: _waiting(peer, 5), "much to wait")
        await little.write(_batch(1))
        await wait_for_async(lambda: _waiting(peer, 6), "little to wait")
        singles = [asyncio.ensure_future(_unary(peer)) for _ in range(2)]
        await wait_for_async(lambda: _waiting(peer, 8), "single ones to wait")
        store.may_write.set()
        await asyncio.gather(held_up, *singles, little.read())
        for _ in range(5):
            await much.read()
        n = SUBMITS_AT_ONCE
        assert store.batches == [1, n, 3 + n, n, n, n]


async def test_large_requests_take_turns_for_what_they_weigh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.queue.submits.turns.SUBMITS_WRITE_NS", NEVER_NS)
    store = SlowStore()
    async with serving(Telemetry(None), store) as peer:
        held_up = asyncio.ensure_future(_unary(peer))
        await asyncio.to_thread(store.writing.wait, 30)
        call = await _opened(peer)
        for _ in range(3):
            await call.write(_batch(1, SUBMITS_AT_ONCE * BYTES_LIKE_ONE_MORE))
        await wait_for_async(lambda: _waiting(peer, 3), "all to wait")
        store.may_write.set()
        await held_up
        for _ in range(3):
            await call.read()
        assert store.batches == [1, 1, 1, 1]


async def test_a_frame_is_taken_in_parts_by_weight() -> None:
    async with serving(Telemetry(None), MemoryStore()) as peer:
        call = await _opened(peer)
        await call.write(_batch(4, SUBMITS_AT_ONCE * BYTES_LIKE_ONE_MORE // 2))
        await call.write(_batch(1))
        parts = [len((await call.read()).acks.acks) for _ in range(3)]
        assert parts == [2, 2, 1]


async def test_what_a_dropped_stream_submitted_is_cancelled_with_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.queue.submits.turns.SUBMITS_WRITE_NS", NEVER_NS)
    store = SlowStore()
    async with serving(Telemetry(None), store) as peer:
        held_up = asyncio.ensure_future(_unary(peer))
        await asyncio.to_thread(store.writing.wait, 30)
        call = await _opened(peer)
        await call.write(_batch(5 * SUBMITS_AT_ONCE, batch="b"))
        await wait_for_async(lambda: _waiting(peer, 5), "all to wait")
        call.cancel()
        cancelling = asyncio.ensure_future(peer.stub.Cancel(queue_pb2.CancelRequest(batch="b")))
        await wait_for_async(lambda: _behind(peer), "the cancel to wait")
        store.may_write.set()
        assert (await cancelling).cancelled == 5 * SUBMITS_AT_ONCE
        await held_up


async def test_a_cancel_waits_for_what_of_its_tenant_is_not_checked_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.queue.submits.turns.SUBMITS_WRITE_NS", NEVER_NS)
    store = SlowStore()
    async with serving(Telemetry(None), store) as peer:
        held_up = asyncio.ensure_future(_unary(peer))
        await asyncio.to_thread(store.writing.wait, 30)

        async def requests() -> AsyncIterator[queue_pb2.SubmitRequest]:
            yield queue_pb2.SubmitRequest(open=queue_pb2.SubmitOpen(client_id="c"))
            yield _batch(5 * SUBMITS_AT_ONCE, batch="b")

        servicer: Any = peer.service.servicer
        acks = servicer.Submit(requests(), None)
        await anext(acks)
        reading = asyncio.ensure_future(anext(acks))
        while not peer.service.committer._submits:
            await asyncio.sleep(0)
        assert await _waiting(peer, 1), "the others wait to be checked"
        cancelling = asyncio.ensure_future(servicer.Cancel(queue_pb2.CancelRequest(batch="b"), None))
        await wait_for_async(lambda: _behind(peer), "the cancel to wait")
        store.may_write.set()
        assert (await cancelling).cancelled == 5 * SUBMITS_AT_ONCE
        await asyncio.gather(held_up, reading)
        await acks.aclose()


async def test_a_tenant_with_many_calls_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.queue.submits.turns.SUBMITS_WRITE_NS", NEVER_NS)
    store = SlowStore()
    async with serving(Telemetry(None), store) as peer:
        held_up = asyncio.ensure_future(_unary(peer))
        await asyncio.to_thread(store.writing.wait, 30)
        many = [asyncio.ensure_future(_unary(peer, "many", SUBMITS_AT_ONCE)) for _ in range(10)]
        await wait_for_async(lambda: _waiting(peer, 10), "many to wait")
        single = asyncio.ensure_future(_unary(peer, "single"))
        await wait_for_async(lambda: _waiting(peer, 11), "the single one to wait")
        store.may_write.set()
        await asyncio.gather(held_up, *many, single)
        n = SUBMITS_AT_ONCE
        assert store.batches == [1, n, 1 + n, *[n] * 8], "after what had the turn before it came"


async def test_what_a_stream_that_is_left_submitted_counts_until_it_is_durable() -> None:
    store = SlowStore()
    async with serving(Telemetry(None), store) as peer:
        window = peer.service.servicer._bytes
        held_up = asyncio.ensure_future(_unary(peer))
        await asyncio.to_thread(store.writing.wait, 30)
        call = await _opened(peer)
        await call.write(_batch(1, FRAME_BYTES))
        await wait_for_async(lambda: _waiting(peer, 1), "the frame to wait")
        call.cancel()

        async def left() -> bool:
            return not peer.service.servicer._submits

        await wait_for_async(left, "the stream to be over")
        assert window._count >= FRAME_BYTES
        store.may_write.set()
        await held_up
        await _unary(peer)
        assert window._count == 0


async def test_calls_wait_for_room_as_streams_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.queue.servicer.MAX_UNACKED_BYTES", MOST_BYTES)
    store = SlowStore()
    async with serving(Telemetry(None), store) as peer:
        window = peer.service.servicer._bytes
        calls = [asyncio.ensure_future(_unary(peer, size=FRAME_BYTES)) for _ in range(FRAMES)]
        await wait_for_async(lambda: _full(window), "the window to be full")
        left = asyncio.ensure_future(_unary(peer, size=FRAME_BYTES))
        for _ in range(100):
            await peer.stub.Identify(queue_pb2.IdentifyRequest())
        assert window._count <= MOST_BYTES + FRAME_BYTES + 1000 + BYTES_LIKE_ONE_MORE, "one call beyond it"
        left.cancel()
        store.may_write.set()
        await asyncio.gather(*calls)
        await wait_for_async(lambda: _empty(window), "everything to have left the window")


async def test_a_call_that_is_refused_leaves_the_window() -> None:
    async with serving(Telemetry(None), MemoryStore()) as peer:
        await peer.stub.SubmitUnary(queue_pb2.SubmitUnaryRequest(requests=[Request()])).code()
        assert peer.service.servicer._bytes._count == 0


@pytest.mark.skipif(COMPILED, reason="what a compiled class does cannot be watched")
async def test_a_call_behind_many_large_ones_is_checked_after_a_few_of_their_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[str] = []
    check = Intake._checked

    def watched(self: Intake, request: Request, caller: Caller) -> Any:
        checked.append(caller.tenant)
        return check(self, request, caller)

    monkeypatch.setattr(Intake, "_checked", watched)
    async with serving(Telemetry(None), MemoryStore()) as peer:

        async def submit(tenant: str, count: int) -> int:
            CALLER.set(open_caller(tenant))
            request = queue_pb2.SubmitUnaryRequest(requests=[Request(text="x")] * count)
            answer = await peer.service.servicer.SubmitUnary(request, None)  # type: ignore[arg-type]
            return len({ack.request_id for ack in answer.acks})

        large = [asyncio.create_task(submit("large", 1000)) for _ in range(10)]
        small = asyncio.create_task(submit("small", 1))
        assert await small == 1
        assert checked.index("small") <= 2 * CHECKED_AT_ONCE
        assert await asyncio.gather(*large) == [1000] * 10


async def _opened(peer: Peer) -> Any:
    call = peer.stub.Submit()
    await call.write(queue_pb2.SubmitRequest(open=queue_pb2.SubmitOpen(client_id="c")))
    await call.read()
    return call


async def _unary(peer: Peer, tenant: str = "", count: int = 1, size: int = 1) -> None:
    request = queue_pb2.SubmitUnaryRequest(requests=[Request(text="x" * size)] * count)
    await peer.stub.SubmitUnary(request, metadata=((TENANT, tenant),) if tenant else ())


def _batch(count: int, text_bytes: int = 1, batch: str = "") -> queue_pb2.SubmitRequest:
    request = Request(text="x" * text_bytes, batch=batch)
    tagged = [queue_pb2.TaggedRequest(tag=tag, request=request) for tag in range(count)]
    return queue_pb2.SubmitRequest(batch=queue_pb2.SubmitBatch(requests=tagged))


async def _waiting(peer: Peer, items: int) -> bool:
    """Return whether so many parts of frames wait for their turn."""
    tenants = peer.service.committer._submits._tenants.values()
    return sum(len(line) for tenant in tenants for line in tenant.lines.values()) == items


async def _behind(peer: Peer) -> bool:
    return bool(peer.service.committer._submits._behind)


async def _empty(window: object) -> bool:
    return bool(window._count == 0)  # type: ignore[attr-defined]


async def _full(window: object) -> bool:
    return bool(window._count >= MOST_BYTES)  # type: ignore[attr-defined]


async def _frames() -> AsyncIterator[queue_pb2.SubmitRequest]:
    yield queue_pb2.SubmitRequest(open=queue_pb2.SubmitOpen(client_id="fast"))
    for tag in range(FRAMES):
        tagged = queue_pb2.TaggedRequest(tag=tag, request=Request(text="x" * FRAME_BYTES))
        yield queue_pb2.SubmitRequest(batch=queue_pb2.SubmitBatch(requests=[tagged]))
