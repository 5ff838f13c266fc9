"""A client that submits faster than the disk syncs is read only as fast as it does."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from penstock.queue.v1 import queue_pb2
from services.queue.core import records
from services.queue.core.effects import Write
from services.queue.memory_store import MemoryStore
from services.telemetry import Telemetry
from tests.support.serving import Request, serving
from tests.support.waiting import wait_for_async

FRAMES = 40
FRAME_BYTES = 1_000_000
MOST_BYTES = 5_000_000


class SlowStore(MemoryStore):
    """A store whose writes of requests wait for permission."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = threading.Event()

    def write(self, writes: Sequence[Write]) -> None:
        if any(write.family == records.PAYLOADS for write in writes):
            assert self.may_write.wait(30)
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
            await peer.stub.SubmitUnary(queue_pb2.SubmitUnaryRequest(requests=[Request()])).code()
        assert window._count <= MOST_BYTES + streams * (FRAME_BYTES + 1000), "one frame of each stream beyond it"
        store.may_write.set()
        for call in calls:
            acked = 0
            while acked < FRAMES:
                acked += len((await call.read()).acks.acks)
        assert window._count == 0


async def _full(window: object) -> bool:
    return bool(window._count >= MOST_BYTES)  # type: ignore[attr-defined]


async def _frames() -> AsyncIterator[queue_pb2.SubmitRequest]:
    yield queue_pb2.SubmitRequest(open=queue_pb2.SubmitOpen(client_id="fast"))
    for tag in range(FRAMES):
        tagged = queue_pb2.TaggedRequest(tag=tag, request=Request(text="x" * FRAME_BYTES))
        yield queue_pb2.SubmitRequest(batch=queue_pb2.SubmitBatch(requests=[tagged]))
