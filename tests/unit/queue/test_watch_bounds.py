"""A reader that does not read costs the queue a bounded amount, and nobody else anything."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import grpc

from penstock.queue.v1 import queue_pb2, queue_pb2_grpc
from penstock.request.v1 import request_pb2
from services.queue.core import records
from services.queue.core.effects import Ended, Write
from services.queue.core.entry import DEFAULT_TENANT
from services.queue.core.lifecycle import Outcome
from services.queue.core.messages import NO_BATCH, WorkerOpened
from services.queue.storage.reader import MOST_CHUNK, Reader
from services.queue.watch.batch_log import PAGE_RESULTS
from services.queue.watch.frames import Results, events_in_turn, frames
from services.queue.watch.hub import MAX_BEHIND_BYTES, MERGED_BYTES, PENDING_BYTES, PIECE_BYTES, Watcher, WatchHub
from services.queue.wire import MAX_TOLD_BYTES, StoredResult, told_result
from services.telemetry import Telemetry
from tests.support.memory_store import MemoryStore
from tests.support.queueing import STORE_ID, Queue, meta
from tests.support.serving import ids, serving

if TYPE_CHECKING:
    from penstock.queue.v1.queue_pb2_grpc import QueueServiceAsyncStub

BATCH = (DEFAULT_TENANT, "b")
TEXT = "x" * 1000


def delta(number: int, offset: int = 0) -> request_pb2.TokenDelta:
    return request_pb2.TokenDelta(request_id=str(number), attempt=1, offset=offset, token_ids=[1], text=TEXT)


def kept_bytes(watcher: Watcher) -> int:
    return sum(PENDING_BYTES + delta.ByteSize() for delta in watcher.take_deltas())


def test_what_a_watcher_does_not_take_is_bounded_and_others_get_all() -> None:
    hub = WatchHub()
    with hub.batch(BATCH, True) as slow, hub.batch(BATCH, True) as fast:
        got = 0
        for number in range(20_000):
            hub.publish(number, BATCH, delta(number))
            hub.ended(number, BATCH, str(number), None)
            got += len(fast.take_deltas())
        assert got == 20_000
        assert 0.9 * MAX_BEHIND_BYTES < kept_bytes(slow) <= MAX_BEHIND_BYTES
        assert len(slow._positions) == 0


def test_what_is_merged_fits_a_frame() -> None:
    hub = WatchHub()
    with hub.batch(BATCH, True, 8 * MERGED_BYTES) as slow:
        for number in range(3_000):
            hub.publish(1, BATCH, delta(1, number))
        merged = slow.take_deltas()
        assert len(merged) > 2
        assert max(one.ByteSize() for one in merged) <= MERGED_BYTES
        assert [one.offset for one in merged][1:] == list(accumulate(len(one.token_ids) for one in merged))[:-1]
        assert sum(len(one.token_ids) for one in merged) == 3_000
        assert "".join(one.text for one in merged) == TEXT * 3_000


def test_deltas_of_a_token_each_are_bounded_by_what_they_take_in_memory_not_on_the_wire() -> None:
    hub = WatchHub()
    with hub.batch(BATCH, True) as slow, hub.batch(BATCH, True) as merging:
        for number in range(10_000):
            token = request_pb2.TokenDelta(request_id=str(number), attempt=1, token_ids=[1], text="x")
            hub.publish(number, BATCH, token)
        assert len(slow.take_deltas()) <= MAX_BEHIND_BYTES // PENDING_BYTES
        merging.take_deltas()
        for number in range(100_000):
            token = request_pb2.TokenDelta(request_id="one", attempt=1, offset=number, token_ids=[1], text="x")
            hub.publish(1, BATCH, token)
        (merged,) = merging.take_deltas()
        assert MAX_BEHIND_BYTES // PIECE_BYTES // 2 < len(merged.token_ids) <= MAX_BEHIND_BYTES // PIECE_BYTES
        assert merged.text == "x" * len(merged.token_ids)


def test_one_who_reads_again_gets_what_is_new_and_no_text_with_a_hole() -> None:
    hub = WatchHub()
    with hub.batch(BATCH, True) as watcher:
        hub.publish(1, BATCH, delta(1))
        for number in range(2, 10_000):
            hub.publish(number, BATCH, delta(number))
        hub.publish(1, BATCH, delta(1, offset=1))
        assert {d.text for d in watcher.take_deltas()} == {TEXT}, "the second delta of request 1 came too late"
        hub.publish(1, BATCH, delta(1, offset=2))
        assert watcher.take_deltas() == [], "it would leave a hole"
        hub.publish(10_000, BATCH, delta(10_000))
        assert [d.request_id for d in watcher.take_deltas()] == ["10000"]
        hub.publish(1, BATCH, request_pb2.TokenDelta(request_id="1", attempt=1, token_ids=[1, 1, 1], text=TEXT * 3))
        assert [(d.offset, d.text) for d in watcher.take_deltas()] == [(1, TEXT * 2)], "begun again for another watcher"


def test_results_handed_over_are_bounded_and_the_rest_is_read_from_the_store() -> None:
    hub = WatchHub()
    body = b"r" * 60_000
    with hub.requests(range(1000), False) as watcher:
        for seq in range(1000):
            hub.ended(seq, NO_BATCH, str(seq), StoredResult(1, body))
        told = [result for result in watcher.take_ended().values() if result is not None]
        assert sum(len(result.body) for result in told) <= MAX_BEHIND_BYTES
        hub.ended(1, NO_BATCH, "1", StoredResult(1, body))
        assert watcher.take_ended() == {1: StoredResult(1, body)}


def test_a_queue_that_starts_over_does_not_let_a_watcher_keep_more() -> None:
    hub = WatchHub()
    with hub.watcher(100) as watcher:
        for seq in range(4):
            hub.follow(watcher, seq, False)
            hub.ended(seq, NO_BATCH, str(seq), StoredResult(1, b"r" * 100))
            hub.reset({})
        assert [result for result in watcher.take_ended().values() if result is not None] == [
            StoredResult(1, b"r" * 100)
        ]


def test_a_result_is_kept_for_all_who_watch_but_those_who_have_to_read() -> None:
    hub = WatchHub()
    with hub.batch(BATCH, False) as one, hub.batch(BATCH, False) as other, hub.batch(BATCH, False) as reader:
        hub.ended(1, BATCH, "1", StoredResult(1, b"q"))
        for watcher in (one, other):
            assert watcher.take_results() is None, "what ended before it looked has to be read"
        hub.ended(2, BATCH, "2", StoredResult(2, b"r"))
        assert one.take_results() == other.take_results() == [StoredResult(2, b"r")]
        assert reader.take_results() is None


def test_a_large_result_is_left_to_be_read() -> None:
    queue = Queue()
    queue.step(WorkerOpened(1, "w", "life", ()))
    told = []
    for characters in (10, MAX_TOLD_BYTES):
        (name,) = queue.submit(meta(batch="b"))
        lease = queue.claim(1, name)
        assert lease is not None
        body = request_pb2.Result(outcome=request_pb2.OUTCOME_COMPLETED)
        body.choices.add(text="y" * characters)
        ended = [e for e in queue.complete(1, lease, Outcome.COMPLETED, body) if isinstance(e, Ended)]
        told += [told_result(effect) for effect in ended]
    small, large = told
    assert small is not None
    assert small.result().choices[0].text == "y" * 10
    assert large is None


class CountingStore(MemoryStore):
    """Counts the results that were read, and the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0
        self.most_at_once = 0

    def get_many(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        if family == records.RESULTS:
            self.read += len(keys)
            self.most_at_once = max(self.most_at_once, len(keys))
        return super().get_many(family, keys)


RESULTS = 4_000


def store_with_results() -> tuple[CountingStore, list[str]]:
    """Return a store in which every request of a batch has ended with a result of 16 KiB, last submitted first.

    64 MiB: far more than gRPC takes for a reader that has taken nothing.
    """
    queue = Queue()
    queue.now_ns = time.time_ns()  # results from long ago would be swept
    queue.store = store = CountingStore()
    store.write([Write(records.META, records.STORE_ID_KEY, STORE_ID.encode())])
    queue.step(WorkerOpened(1, "w", "life", ()))
    names = queue.submit(*(meta(batch="b") for _ in range(RESULTS)))
    body = request_pb2.Result(outcome=request_pb2.OUTCOME_COMPLETED)
    body.choices.add(text="y" * 16_384)
    for name in reversed(names):
        lease = queue.claim(1, name)
        assert lease is not None
        queue.complete(1, lease, Outcome.COMPLETED, body)
    return store, names


async def read_all(stub: QueueServiceAsyncStub, request: queue_pb2.WatchRequest) -> list[str]:
    found: list[str] = []
    async for frame in stub.Watch(request):
        found += [event.result.result.request_id for event in frame.events if event.WhichOneof("event") == "result"]
    return found


async def test_a_stalled_reader_holds_back_the_reading_for_it_and_nobody_else() -> None:
    store, names = store_with_results()
    # What a connection takes before its reader does grows with how fast it is found to be; here it stays as it begins.
    fixed = [("grpc.http2.bdp_probe", 0)]
    async with (
        serving(Telemetry(None), store) as peer,
        grpc.aio.insecure_channel(f"127.0.0.1:{peer.port}", fixed) as channel,
    ):
        stub = queue_pb2_grpc.QueueServiceStub(channel)
        stalled = [stub.Watch(queue_pb2.WatchRequest(batch="b")) for _ in range(4)]
        for call in stalled:
            await call.initial_metadata()
        assert await read_all(stub, queue_pb2.WatchRequest(batch="b")) == names[::-1]
        # All results for the one who reads; for each other a page, of which the connection takes no more than a part.
        assert store.read - RESULTS <= len(stalled) * 2 * PAGE_RESULTS
        for call in stalled:
            call.cancel()


async def test_many_named_requests_are_read_a_few_at_a_time_and_come_in_order() -> None:
    store, names = store_with_results()
    async with serving(Telemetry(None), store) as peer:
        store.most_at_once = 0
        assert await read_all(peer.stub, queue_pb2.WatchRequest(request_ids=ids(*names))) == names[::-1]
        assert store.most_at_once <= MOST_CHUNK


async def test_large_results_are_read_one_by_one() -> None:
    store = CountingStore()
    head = records.ResultHead(1, 1, "t", "", "b")
    row = records.encode_result(head, b"z" * 8_000_000)
    for seq in range(1, 20):
        store.write([Write(records.RESULTS, records.seq_key(seq), row)])
    reader = Reader(store, STORE_ID)
    sizes = [len(chunk) async for chunk in reader.in_chunks(range(1, 20))]
    reader.close()
    assert sizes == [1] * 19
    assert store.most_at_once == 1


def store_with_sizes(*sizes: int) -> CountingStore:
    """Return a store in which requests of a batch have ended with results of so many bytes."""
    store = CountingStore()
    for seq, size in enumerate(sizes, 1):
        head = records.ResultHead(seq, 1, DEFAULT_TENANT, "", "b")
        row = records.encode_result(head, b"z" * size)
        store.write([Write(records.RESULTS, records.seq_key(seq), row)])
        store.write([Write(records.COMPLETIONS, records.completion_key(BATCH, seq), records.seq_key(seq))])
    return store


async def test_a_page_that_is_cut_for_its_size_is_not_the_last() -> None:
    reader = Reader(store_with_sizes(*[600_000] * 5), STORE_ID)
    pages = [await reader.page(BATCH, cursor, PAGE_RESULTS) for cursor in (0, 2, 4, 5)]
    whole = await reader.page(BATCH, 4, 1)
    reader.close()
    assert [(len(page.results), page.cursor, page.last) for page in pages] == [
        (2, 2, False),
        (2, 4, False),
        (1, 5, True),
        (0, 5, True),
    ]
    assert not whole.last, "there may be more than were asked for"


async def test_of_large_results_that_follow_small_ones_no_more_is_kept_than_a_page_and_one() -> None:
    sizes = [*[10] * 70, *[600_000] * 70]
    reader = Reader(store_with_sizes(*sizes), STORE_ID)
    page = await reader.page(BATCH, 0, PAGE_RESULTS)
    (first, *_) = [len(chunk) async for chunk in reader.in_chunks(range(70, 140))]
    reader.close()
    assert (len(page.results), page.cursor, page.last) == (72, 72, False)
    assert first == 3


async def test_no_more_is_read_for_a_watcher_than_the_frame_that_it_does_not_take() -> None:
    store, _ = store_with_results()
    told: set[int] = set()
    async with serving(Telemetry(None), store) as peer:
        watching = peer.service._watching
        batch = watching.watch(queue_pb2.WatchRequest(batch="b"), cast(Any, None))
        for frames_of in (batch, watching._results.stored(range(1, RESULTS), told.update)):
            store.read = 0
            frame = queue_pb2.WatchResponse.FromString(await anext(frames_of))
            assert len(frame.events) <= store.read <= 1 + 2 * len(frame.events)
            await cast(Any, frames_of).aclose()


def test_nothing_is_kept_of_results_that_were_sent() -> None:
    body = request_pb2.Result(choices=[request_pb2.Choice(text="z" * 600_000)]).SerializeToString()
    results = [StoredResult(cursor, body) for cursor in range(1, 5)]
    for left, frame in zip((2, 0), frames(events_in_turn(results)), strict=True):
        assert len(queue_pb2.WatchResponse.FromString(frame).events) == 2
        assert len(results) == left


async def test_many_that_end_at_once_with_large_results_are_read_a_few_at_a_time_and_come_in_order() -> None:
    store, names = store_with_results()
    reader = Reader(store, STORE_ID)
    store.most_at_once = 0
    told: set[int] = set()
    found: list[str] = []
    async for frame in Results(reader).ended(dict.fromkeys(range(1, 1001)), told.update):
        found += [event.result.result.request_id for event in queue_pb2.WatchResponse.FromString(frame).events]
    reader.close()
    assert found == names[999::-1]
    assert told == set(range(1, 1001))
    assert store.most_at_once <= MOST_CHUNK
