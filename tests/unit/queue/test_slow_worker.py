"""A worker or scheduler that does not read what it is told: what waits for it is bounded, and loses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from penstock.queue.v1 import queue_pb2
from services.clock import SystemClock
from services.queue.core import effects as fx
from services.queue.core import records
from services.queue.core.entry import LeaseRef
from services.queue.metrics import QueueMetrics
from services.queue.outlet import Early
from services.queue.payloads import MAX_PAYLOADS_BYTES, PAYLOADS_AT_ONCE, read_payloads
from services.queue.speaker import Greeting, Link, Speaker
from services.queue.storage.store import StoreDamagedError, StoreError
from services.queue.watch.hub import WatchHub
from services.rpc.limits import MAX_UNSENT_PAYLOAD_BYTES
from services.telemetry import Telemetry
from services.worker import wire as worker_wire
from services.worker.core import messages as m
from services.worker.core.session import Session
from services.worker.core.sizing import Sizes
from tests.support.memory_store import MemoryStore
from tests.support.queueing import LEASE_NS, meta
from tests.support.serving import Peer, Request, serving

PROMPT_BYTES = 500_000
REQUESTS = 100


class Stored(MemoryStore):
    """Counts the requests that were read."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0

    def get(self, family: str, key: bytes) -> bytes | None:
        self.read += family == records.PAYLOADS
        return super().get(family, key)

    def get_many(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        self.read += len(keys) if family == records.PAYLOADS else 0
        return super().get_many(family, keys)


async def claim_all(peer: Peer, names: list[str]) -> Any:
    """Open a Work stream that claims every request and reads nothing but its first frame."""
    work = peer.stub.Work()
    await work.write(
        queue_pb2.WorkRequest(
            messages=[queue_pb2.WorkerToQueue(open=queue_pb2.WorkOpen(worker_id="w", instance_id="1"))]
        )
    )
    assert (await work.read()).messages[0].WhichOneof("message") == "open"
    claims = [queue_pb2.WorkerToQueue(claim=queue_pb2.Claim(request_id=name)) for name in names]
    for claim in claims:
        await work.write(queue_pb2.WorkRequest(messages=[claim]))
        await peer.settled()
    return work


async def test_prompts_stay_in_the_store_until_their_worker_reads() -> None:
    store = Stored()
    async with serving(Telemetry(None), store) as peer:
        texts = [f"{n}".ljust(PROMPT_BYTES, "x") for n in range(REQUESTS)]
        names = [(await peer.submit(Request(text=text)))[0] for text in texts]
        work = await claim_all(peer, names)
        (link,) = peer.service._speaker.links.values()
        assert link.outbox.size_bytes <= MAX_UNSENT_PAYLOAD_BYTES + 2 * PROMPT_BYTES
        assert len(link.outbox) > 0, "it does not read"
        delivered: list[queue_pb2.Deliver] = []
        while len(delivered) < REQUESTS:
            delivered += [message.deliver for message in (await work.read()).messages]
        assert [one.request.text for one in delivered] == texts
        assert [one.lease.request_id for one in delivered] == names


class Late:
    """A speaker with one link, whose payloads are not at hand."""

    def __init__(self, payload: bytes | None, failure: StoreError | None = None) -> None:
        def read(_: int) -> bytes | None:
            if failure is not None:
                raise failure
            return payload

        greeting = Greeting("s", 1, 1)
        self.registry = CollectorRegistry()
        metrics = QueueMetrics(self.registry)
        self.speaker = Speaker(WatchHub(), metrics, Telemetry(None), SystemClock(), greeting, read)
        self.link = self.speaker.links[1] = Link()

    def deliver(self, grant: str = "", payload: bytes | None = None) -> None:
        effect = fx.Deliver(1, 7, LeaseRef("s-7", 1, 9), False, 1, 2, meta(), grant, payload)
        self.speaker.foretell(Early([effect], {}, []))

    async def heard(self) -> list[queue_pb2.QueueToWorker]:
        self.link.outbox.close()
        frames = [queue_pb2.WorkResponse.FromString(frame) async for frame in self.link.outbox.frames()]
        return [message for frame in frames for message in frame.messages]


async def test_a_late_delivery_has_the_request() -> None:
    late = Late(Request(text="hi").SerializeToString())
    late.deliver()
    (message,) = await late.heard()
    assert (message.deliver.request.text, message.deliver.request.request_id) == ("hi", "s-7")


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (None, queue_pb2.REFUSED_REASON_ENDED),
        (StoreDamagedError("Corruption: block checksum mismatch"), queue_pb2.REFUSED_REASON_UNKNOWN),
    ],
)
async def test_a_claim_with_nothing_to_deliver_is_answered_so_that_its_credits_go_home(
    failure: StoreError | None, reason: queue_pb2.RefusedReason.ValueType
) -> None:
    late = Late(None, failure)
    late.deliver()
    (message,) = await late.heard()
    assert message.refused.reason == reason
    session = Session(Sizes(capacity_blocks=100, blocks_total=100, block_size=16, max_model_len=1024))
    session.step(m.QueueUp(LEASE_NS, 8), 1)
    session.step(m.Granted("s-7", "batch", 10, True, 1), 1)
    assert session.held_blocks == 10
    answer = worker_wire.queue_message(message)
    assert answer is not None
    session.step(answer, 2)
    assert session.idle, "neither credits nor a claim are left"


@pytest.mark.parametrize("failure", [StoreDamagedError("Corruption"), StoreError("disk gone")])
async def test_a_delivery_that_cannot_be_read_is_found_by_its_request(
    failure: StoreError, caplog: pytest.LogCaptureFixture
) -> None:
    late = Late(None, failure)
    late.deliver()
    await late.heard()
    (line,) = [record for record in caplog.records if "cannot be delivered" in record.getMessage()]
    assert line.__dict__["request_id"] == "s-7"


async def test_an_offer_with_nothing_to_deliver_is_answered_by_its_own_name() -> None:
    late = Late(None)
    late.deliver("standing/1")
    (message,) = await late.heard()
    session = Session(Sizes(capacity_blocks=100, blocks_total=100, block_size=16, max_model_len=1024))
    session.step(m.QueueUp(LEASE_NS, 8, True), 1)
    session.step(m.Granted("standing/1", "batch", 10, True, 0, 0, m.Standing("", False, 1, 1, 1)), 1)
    assert session.held_blocks == 10
    answer = worker_wire.queue_message(message)
    assert answer is not None
    session.step(answer, 2)
    assert session.idle


async def test_a_request_that_met_an_offer_is_not_read_later_for_it_may_not_be_in_the_store_yet() -> None:
    late = Late(None)
    behind = Request(text="x" * (MAX_UNSENT_PAYLOAD_BYTES + 1)).SerializeToString()
    for payload in (behind, Request(text="fresh").SerializeToString()):
        late.deliver("standing/1", payload)
    _, message = await late.heard()
    assert (message.deliver.request.text, message.deliver.grant) == ("fresh", "standing/1")


async def test_a_late_delivery_that_cannot_be_read_ends_the_stream() -> None:
    late = Late(None, StoreError("I/O error"))
    late.deliver()
    assert await late.heard() == []
    assert late.link.code is grpc.StatusCode.UNAVAILABLE
    assert "I/O error" in late.link.reason
    assert late.registry.get_sample_value("penstock_queue_store_failures_total") == 1


async def test_a_peer_with_too_much_unread_loses_its_stream_and_costs_nothing_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.queue.speaker.MAX_UNSENT_BYTES", 10_000)
    late = Late(None)
    for seq in range(1000):
        gone = fx.Gone(1, f"s-{seq}", fx.GoneReason.ENDED, 1)
        late.speaker.foretell(Early([], {}, [gone]))
    assert (len(late.link.outbox), late.link.outbox.size_bytes) == (0, 0)
    assert late.link.code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_who_does_not_read_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.rpc.outbox.MAX_UNSENT_MESSAGES", 3)
    outbox = Link().outbox
    for number in range(3):
        await asyncio.wait_for(outbox.room(), 30)
        outbox.put(queue_pb2.QueueToWorker(refused=queue_pb2.Refused(request_id=str(number))))
    waiting = asyncio.create_task(outbox.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    await anext(outbox.frames())
    await asyncio.wait_for(waiting, 30)


def test_one_batch_of_deliveries_reads_a_bounded_amount() -> None:
    store = Stored()
    large = bytes(MAX_PAYLOADS_BYTES // 20)
    for seq in range(100):
        store.write([fx.Write(records.PAYLOADS, records.seq_key(seq), large)])
    found = read_payloads(store, range(100))
    assert list(found) == list(range(2 * PAYLOADS_AT_ONCE))
    assert store.read == 2 * PAYLOADS_AT_ONCE
    assert read_payloads(store, [1, 200, 3]) == {1: large, 3: large}
