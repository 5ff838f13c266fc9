"""The whole service over gRPC, with a store in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2
from services.queue.core.effects import Write
from services.queue.core.records import REQUESTS, seq_key
from services.queue.storage.store import StoreError
from services.queue.submits.turns import SUBMITS_AT_ONCE
from services.telemetry import Telemetry
from tests.support.serving import COMPLETED, Peer, ids, refused, serving, text
from tests.support.waiting import wait_for_async


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    async with serving(Telemetry(None)) as peer:
        yield peer


async def events(call: Any, until: Callable[[list[queue_pb2.WatchEvent]], bool]) -> list[queue_pb2.WatchEvent]:
    """Read a Watch stream until the events read satisfy `until`."""
    seen: list[queue_pb2.WatchEvent] = []
    while not until(seen):
        frame = await call.read()
        assert frame is not grpc.aio.EOF, "the stream ended"
        seen += frame.events
    return seen


async def all_events(call: Any) -> list[queue_pb2.WatchEvent]:
    """Read a Watch stream to its end."""
    seen: list[queue_pb2.WatchEvent] = []
    while (frame := await call.read()) is not grpc.aio.EOF:
        seen += frame.events
    return seen


def results(seen: list[queue_pb2.WatchEvent]) -> list[queue_pb2.WatchResult]:
    return [event.result for event in seen if event.HasField("result")]


async def test_a_submit_stream_acks_in_order_and_refuses_by_field(peer: Peer) -> None:
    call = peer.stub.Submit()
    await call.write(queue_pb2.SubmitRequest(open=queue_pb2.SubmitOpen(client_id="me")))
    opened = (await call.read()).open
    assert opened.store_id
    assert opened.max_request_bytes
    requests = [text(idempotency_key="k"), text(channel="nope"), text(idempotency_key="k")]
    tagged = [queue_pb2.TaggedRequest(tag=10 + i, request=request) for i, request in enumerate(requests)]
    await call.write(queue_pb2.SubmitRequest(batch=queue_pb2.SubmitBatch(requests=tagged)))
    acks = list((await call.read()).acks.acks)
    assert [ack.tag for ack in acks] == [10, 11, 12]
    assert [ack.status for ack in acks] == [1, 3, 2]
    assert acks[1].error.param == "channel"
    assert acks[0].request_id == acks[2].request_id
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    again = await peer.stub.SubmitUnary(queue_pb2.SubmitUnaryRequest(requests=[text(idempotency_key="k")]))
    assert again.acks[0].status == queue_pb2.SUBMIT_STATUS_DUPLICATE
    assert again.acks[0].request_id == acks[0].request_id


async def test_a_large_frame_of_submits_is_taken_in_parts_and_acked_in_order(peer: Peer) -> None:
    count = 2 * SUBMITS_AT_ONCE + 1
    call = peer.stub.Submit()
    await call.write(queue_pb2.SubmitRequest(open=queue_pb2.SubmitOpen(client_id="me")))
    await call.read()
    tagged = [queue_pb2.TaggedRequest(tag=tag, request=text(idempotency_key=f"{tag % 100}")) for tag in range(count)]
    await call.write(queue_pb2.SubmitRequest(batch=queue_pb2.SubmitBatch(requests=tagged)))
    parts = [list((await call.read()).acks.acks) for _ in range(3)]
    assert [len(part) for part in parts] == [SUBMITS_AT_ONCE, SUBMITS_AT_ONCE, 1]
    acks = [ack for part in parts for ack in part]
    assert [ack.tag for ack in acks] == list(range(count))
    assert [ack.status == queue_pb2.SUBMIT_STATUS_DUPLICATE for ack in acks] == [tag >= 100 for tag in range(count)]
    assert peer.service.servicer._bytes._count == 0
    await call.write(queue_pb2.SubmitRequest(batch=queue_pb2.SubmitBatch()))
    assert list((await call.read()).acks.acks) == [], "an answer to each frame"
    await call.done_writing()


async def test_a_unary_submit_takes_all_or_none(peer: Peer) -> None:
    bad = text(sampling=request_pb2.SamplingParams(max_tokens=0))
    call = peer.stub.SubmitUnary(queue_pb2.SubmitUnaryRequest(requests=[text(), bad]))
    await refused(call, grpc.StatusCode.INVALID_ARGUMENT, "requests[1].sampling.max_tokens")
    stats = await peer.stub.Stats(queue_pb2.StatsRequest())
    assert sum(channel.ready for channel in stats.channels) == 0
    await refused(peer.stub.SubmitUnary(queue_pb2.SubmitUnaryRequest()), grpc.StatusCode.INVALID_ARGUMENT, "requests")


async def test_a_request_goes_through_its_life(peer: Peer) -> None:
    (name,) = await peer.submit(text(batch="b", client_reference="line 1", idempotency_key="k"))
    get = queue_pb2.GetRequest(request_id=name)
    assert (await peer.stub.Get(get)).state == queue_pb2.REQUEST_STATE_READY
    work = await peer.work()
    delivery = await work.claim(name)
    assert delivery.request.request_id == name
    assert delivery.request.text == "hi"
    assert delivery.request.channel == "interactive"
    found = await peer.stub.Get(get)
    assert (found.state, found.worker_id, found.attempts) == (queue_pb2.REQUEST_STATE_LEASED, "w", 1)
    result = request_pb2.Result(
        outcome=COMPLETED, choices=[request_pb2.Choice(text="out")], usage=request_pb2.Usage(completion_tokens=2)
    )
    assert (await work.complete(delivery.lease, result=result)).accepted
    key = queue_pb2.IdempotencyKey(key="k")
    found = await peer.stub.Get(queue_pb2.GetRequest(idempotency_key=key))
    assert found.state == queue_pb2.REQUEST_STATE_DONE
    assert found.result.choices[0].text == "out"
    assert found.result.client_reference == "line 1"
    assert found.result.worker_id == "w"
    assert found.result.timings.submitted_unix_ns <= found.result.timings.completed_unix_ns
    stats = await peer.stub.Stats(queue_pb2.StatsRequest())
    interactive = next(c for c in stats.channels if c.channel == "interactive")
    assert (interactive.accepted, interactive.completion_tokens) == (1, 2)
    assert list(interactive.ended_by_outcome) == [0, 1, 0, 0, 0, 0]
    assert (stats.results, stats.workers) == (1, 1)
    assert (await peer.stub.Delete(queue_pb2.DeleteRequest(request_ids=ids(name)))).deleted == 1
    await refused(peer.stub.Get(get), grpc.StatusCode.NOT_FOUND, name)
    assert (await peer.stub.Stats(queue_pb2.StatsRequest())).results == 0


async def test_watch_resumes_after_a_cursor_and_ends_with_the_batch(peer: Peer) -> None:
    names = await peer.submit(*(text(batch="b") for _ in range(5)), text(batch="other"))
    work = await peer.work()
    watch = peer.stub.Watch(queue_pb2.WatchRequest(batch="b"))
    first = await events(watch, bool)
    assert (first[0].progress.waiting, first[0].progress.running) == (5, 0)
    for name in reversed(names[:3]):
        await work.complete((await work.claim(name)).lease)
    seen = results(await events(watch, lambda seen: len(results(seen)) == 3))
    assert [result.result.request_id for result in seen] == list(reversed(names[:3]))
    watch.cancel()
    for name in names[3:]:
        await work.complete((await work.claim(name)).lease)
    rest = await all_events(peer.stub.Watch(queue_pb2.WatchRequest(batch="b", cursor=seen[1].cursor)))
    assert [result.result.request_id for result in results(rest)] == [names[0], names[3], names[4]]
    (last,) = [event.progress for event in rest if event.HasField("progress")]
    assert (last.waiting, last.running) == (0, 0)


async def test_watch_by_name_ends_when_each_has_ended(peer: Peer) -> None:
    names = await peer.submit(text(), text())
    work = await peer.work()
    await work.complete((await work.claim(names[0])).lease)
    watch = peer.stub.Watch(queue_pb2.WatchRequest(request_ids=ids(*names)))
    assert len(results(await events(watch, lambda seen: bool(results(seen))))) == 1
    await work.complete((await work.claim(names[1])).lease)
    assert [r.result.request_id for r in results(await all_events(watch))] == [names[1]]
    unknown = peer.stub.Watch(queue_pb2.WatchRequest(request_ids=ids(names[0], "nobody")))
    await refused(unknown.read(), grpc.StatusCode.NOT_FOUND, "nobody")


async def _watchers(peer: Peer) -> int:
    return len(peer.service._hub)


async def test_a_watch_by_name_says_at_once_that_the_queue_listens(peer: Peer) -> None:
    """A client that has come back to it would not know otherwise while what it watches waits."""
    (name,) = await peer.submit(text())
    watch = peer.stub.Watch(queue_pb2.WatchRequest(request_ids=ids(name)))
    assert (await watch.read()) == queue_pb2.WatchResponse()
    watch.cancel()


async def test_watch_by_name_tells_of_an_end_that_is_on_disk_although_its_write_failed(peer: Peer) -> None:
    (name,) = await peer.submit(text())
    watch = peer.stub.Watch(queue_pb2.WatchRequest(request_ids=ids(name), tokens=True))
    await wait_for_async(partial(_watchers, peer), "the watch")
    store = peer.service._store
    write = store.write

    def write_and_fail(writes: Sequence[Write]) -> None:
        write(writes)
        raise StoreError("the sync failed")

    with patch.object(store, "write", write_and_fail):
        cancel = peer.stub.Cancel(queue_pb2.CancelRequest(request_ids=ids(name)))
        await refused(cancel, grpc.StatusCode.UNAVAILABLE, "the sync failed")
        (ended,) = results(await all_events(watch))
    assert ended.result.outcome == request_pb2.OUTCOME_CANCELLED


async def test_tokens_reach_watchers_without_gap_or_repeat(peer: Peer) -> None:
    (name,) = await peer.submit(text(batch="b"))
    work = await peer.work()
    delivery = await work.claim(name)
    assert not delivery.watched
    watch = peer.stub.Watch(queue_pb2.WatchRequest(batch="b", tokens=True))
    assert (await work.next("watched")).watched

    async def say(offset: int, tokens: list[int], words: str) -> None:
        delta = request_pb2.TokenDelta(request_id=name, attempt=1, offset=offset, token_ids=tokens, text=words)
        await work.send(queue_pb2.WorkerToQueue(tokens=delta))

    def told(seen: list[queue_pb2.WatchEvent]) -> list[int]:
        return [token for event in seen for token in event.tokens.token_ids]

    await say(0, [1, 2], "ab")
    seen = await events(watch, lambda seen: len(told(seen)) == 2)
    late = peer.stub.Watch(queue_pb2.WatchRequest(request_ids=ids(name), tokens=True))
    assert (await work.next("watched")).watched
    await say(0, [1, 2, 3], "abc")
    await say(3, [4], "d")
    seen += await events(watch, lambda more: 4 in told(more))
    assert told(seen) == [1, 2, 3, 4]
    assert "".join(event.tokens.text for event in seen) == "abcd"
    assert told(await events(late, lambda more: 4 in told(more))) == [1, 2, 3, 4]
    watch.cancel()
    late.cancel()
    assert not (await work.next("watched")).watched


async def test_cancel_ends_what_waits_and_stops_what_runs(peer: Peer) -> None:
    waiting, running = await peer.submit(text(batch="b"), text(batch="b"))
    work = await peer.work()
    lease = (await work.claim(running)).lease
    done = await peer.stub.Cancel(queue_pb2.CancelRequest(request_ids=ids(waiting, running, "nobody")))
    assert (done.cancelled, done.aborting, list(done.not_cancelled)) == (1, 1, ["nobody"])
    stop = await work.next("cancel")
    assert (stop.lease, stop.reason) == (lease, queue_pb2.CANCEL_REASON_CLIENT)
    cancelled = request_pb2.Result(outcome=request_pb2.OUTCOME_CANCELLED)
    assert (await work.complete(lease, result=cancelled)).accepted
    seen = results(await all_events(peer.stub.Watch(queue_pb2.WatchRequest(batch="b"))))
    assert [r.result.outcome for r in seen] == [request_pb2.OUTCOME_CANCELLED] * 2
    assert seen[0].result.error.code == "cancelled"


async def test_the_scheduler_sees_metadata_within_its_window(peer: Peer) -> None:
    names = await peer.submit(text(channel="batch", priority=1), text(channel="batch"), text(channel="batch"))
    backlog = peer.stub.Backlog()
    opening = queue_pb2.SchedulerToQueue(open=queue_pb2.BacklogOpen(name="s"))
    window = queue_pb2.SchedulerToQueue(window=queue_pb2.Window(channel="batch", limit=2))
    await backlog.write(queue_pb2.BacklogRequest(messages=[opening, window]))
    inbox: list[queue_pb2.QueueToScheduler] = []
    while len(inbox) < 3:
        inbox += (await backlog.read()).messages
    assert list(inbox[0].open.channels) == ["interactive", "batch"]
    announced = [message.announce for message in inbox[1:]]
    assert [a.request_id for a in announced] == names[1:]
    assert announced[0].prompt_bytes == 2
    assert announced[0].prefix_digest == announced[1].prefix_digest != 0
    reject = queue_pb2.Reject(request_id=names[1], error=request_pb2.RequestError(code="pool_too_small"))
    await backlog.write(queue_pb2.BacklogRequest(messages=[queue_pb2.SchedulerToQueue(reject=reject)]))
    inbox = []
    while len(inbox) < 2:
        inbox += (await backlog.read()).messages
    assert (inbox[0].gone.request_id, inbox[0].gone.reason) == (names[1], queue_pb2.GONE_REASON_ENDED)
    assert inbox[1].announce.request_id == names[0]
    newer = peer.stub.Backlog()
    await newer.write(queue_pb2.BacklogRequest(messages=[opening]))
    await newer.read()
    await refused(backlog.read(), grpc.StatusCode.ABORTED, "newer")


async def test_a_second_scheduler_stands_by_until_the_first_has_gone(peer: Peer) -> None:
    def opening(who: str) -> queue_pb2.BacklogRequest:
        return queue_pb2.BacklogRequest(
            messages=[queue_pb2.SchedulerToQueue(open=queue_pb2.BacklogOpen(name="s", instance_id=who))]
        )

    first, second = peer.stub.Backlog(), peer.stub.Backlog()
    await first.write(opening("one"))
    await first.read()
    await second.write(opening("two"))
    await refused(second.read(), grpc.StatusCode.ALREADY_EXISTS, "another scheduler is connected")
    await first.done_writing()
    assert await first.read() is grpc.aio.EOF
    third = peer.stub.Backlog()
    await third.write(opening("two"))
    assert (await third.read()).messages[0].HasField("open")


def raw(peer: Peer, method: str, kind: str) -> Any:
    return getattr(peer.channel, kind)(f"/penstock.queue.v1.QueueService/{method}")


@pytest.mark.parametrize("method", ["Get", "Cancel", "SubmitUnary", "ListDead"])
async def test_garbage_is_answered_by_name_of_the_message(peer: Peer, method: str) -> None:
    await refused(
        raw(peer, method, "unary_unary")(b"\xff\xff\xff"), grpc.StatusCode.INVALID_ARGUMENT, f"{method}Request"
    )


@pytest.mark.parametrize("method", ["Submit", "Work", "Backlog"])
async def test_garbage_on_a_stream_ends_that_stream_only(peer: Peer, method: str) -> None:
    work = await peer.work()
    (name,) = await peer.submit(text())
    call = raw(peer, method, "stream_stream")()
    await call.write(b"\xff\xff\xff")
    await refused(call.read(), grpc.StatusCode.INVALID_ARGUMENT, f"{method}Request")
    assert (await work.claim(name)).request.text == "hi"


BAD_CALLS = [
    ("Get", queue_pb2.GetRequest(), "key"),
    ("GetMany", queue_pb2.GetManyRequest(), "keys"),
    ("GetMany", queue_pb2.GetManyRequest(keys=["k", ""]), "keys"),
    ("Cancel", queue_pb2.CancelRequest(), "subject"),
    ("Cancel", queue_pb2.CancelRequest(request_ids=ids()), "request_ids.ids"),
    ("Cancel", queue_pb2.CancelRequest(batch=""), "batch"),
    ("Delete", queue_pb2.DeleteRequest(), "subject"),
    ("Delete", queue_pb2.DeleteRequest(batch=""), "batch"),
    ("Delete", queue_pb2.DeleteRequest(batch="x" * 600), "batch"),
    ("ListDead", queue_pb2.ListDeadRequest(page_token="x"), "page_token"),
    ("ListDead", queue_pb2.ListDeadRequest(page_size=5000), "page_size"),
    ("RequeueDead", queue_pb2.RequeueDeadRequest(), "subject"),
    ("RequeueDead", queue_pb2.RequeueDeadRequest(all=False), "all"),
]


@pytest.mark.parametrize(("method", "request_", "field_name"), BAD_CALLS)
async def test_bad_calls_name_the_field(peer: Peer, method: str, request_: Any, field_name: str) -> None:
    await refused(getattr(peer.stub, method)(request_), grpc.StatusCode.INVALID_ARGUMENT, f"{field_name}: ")


async def test_streams_must_open_first_and_say_who_they_are(peer: Peer) -> None:
    work = peer.stub.Work()
    claim = queue_pb2.WorkerToQueue(claim=queue_pb2.Claim(request_id="x"))
    await work.write(queue_pb2.WorkRequest(messages=[claim]))
    await refused(work.read(), grpc.StatusCode.INVALID_ARGUMENT, "`open`")
    nameless = peer.stub.Work()
    await nameless.write(queue_pb2.WorkRequest(messages=[queue_pb2.WorkerToQueue(open=queue_pb2.WorkOpen())]))
    await refused(nameless.read(), grpc.StatusCode.INVALID_ARGUMENT, "open.worker_id")
    submit = peer.stub.Submit()
    await submit.write(queue_pb2.SubmitRequest(batch=queue_pb2.SubmitBatch()))
    await refused(submit.read(), grpc.StatusCode.INVALID_ARGUMENT, "`open`")


async def test_a_worker_may_not_report_an_outcome_that_is_the_queues(peer: Peer) -> None:
    (name,) = await peer.submit(text())
    work = await peer.work()
    lease = (await work.claim(name)).lease
    dead = request_pb2.Result(outcome=request_pb2.OUTCOME_DEAD)
    complete = queue_pb2.Complete(lease=lease, result=dead)
    await work.send(queue_pb2.WorkerToQueue(complete=complete))
    await refused(work.call.read(), grpc.StatusCode.INVALID_ARGUMENT, "complete.result.outcome")


@pytest.mark.parametrize("field_name", ["prompt_tokens", "completion_tokens", "cached_tokens"])
async def test_a_worker_may_not_report_more_tokens_than_there_can_be(peer: Peer, field_name: str) -> None:
    (name,) = await peer.submit(text())
    work = await peer.work()
    lease = (await work.claim(name)).lease
    usage = request_pb2.Usage(**{field_name: (1 << 64) - 1})
    complete = queue_pb2.Complete(lease=lease, result=request_pb2.Result(outcome=COMPLETED, usage=usage))
    await work.send(queue_pb2.WorkerToQueue(complete=complete))
    await refused(work.call.read(), grpc.StatusCode.INVALID_ARGUMENT, f"complete.result.usage.{field_name}")


async def test_the_spans_of_a_request_are_one_trace() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    sent = f"00-{7:032x}-{9:016x}-01"
    async with serving(Telemetry(provider)) as traced:
        names = await traced.submit(text(), text(traceparent=sent))
        work = await traced.work()
        for name in names:
            delivery = await work.claim(name)
            assert delivery.request.traceparent
            await work.complete(delivery.lease)
        await traced.settled()
    for name in names:
        spans = [
            span for span in exporter.get_finished_spans() if (span.attributes or {})["penstock.request.id"] == name
        ]
        assert [span.name for span in spans] == ["queue.persist", "queue.wait", "queue.lease", "queue.complete"]
        assert len({span.context.trace_id for span in spans if span.context}) == 1
    roots = [span for span in exporter.get_finished_spans() if span.parent is None]
    assert [span.name for span in roots] == ["queue.persist"], "the queue starts a trace only if the client did not"


async def test_an_attempt_is_a_span_of_the_queue_also_when_its_worker_is_gone() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with serving(Telemetry(provider)) as traced:
        (name,) = await traced.submit(text())
        killed = await traced.work("w1")
        await killed.claim(name)
        await killed.close()
        # Another life of the worker, which knows nothing of the lease.
        work = await traced.work("w1", life="2")
        delivery = await work.claim(name)
        timings = request_pb2.Timings(first_token_unix_ns=70, last_token_unix_ns=90)
        await work.complete(delivery.lease, result=request_pb2.Result(outcome=COMPLETED, timings=timings))
        await traced.settled()
    lost, completed = [span for span in exporter.get_finished_spans() if span.name == "queue.lease"]
    for span, attempt, end in ((lost, 1, "worker_lost"), (completed, 2, "complete")):
        assert span.attributes == {
            "penstock.request.id": name,
            "penstock.channel": "interactive",
            "penstock.attempt": attempt,
            "penstock.worker.id": "w1",
            "penstock.lease.end": end,
            **({"error.type": end} if span is lost else {}),
        }
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time
    assert [(event.name, event.timestamp) for event in completed.events] == [("first_token", 70), ("last_token", 90)]
    assert not lost.events


async def test_a_lease_whose_worker_has_left_ends_a_wait_all_the_same() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with serving(Telemetry(provider)) as traced:
        (name,) = await traced.submit(text())
        work = await traced.work()
        # Its stream ends between the claim and the moment at which the lease is durable.
        traced.service._speaker.links.clear()
        await work.send(queue_pb2.WorkerToQueue(claim=queue_pb2.Claim(request_id=name)))

        async def waited() -> bool:
            return "queue.wait" in {span.name for span in exporter.get_finished_spans()}

        await wait_for_async(waited, "the end of the wait")
        work.call.cancel()


@pytest.mark.parametrize("where", ["memory", "disk"])
async def test_what_the_audit_finds_is_counted(peer: Peer, where: str) -> None:
    (name,) = await peer.submit(text(channel="batch"))
    machine = peer.service.committer.machine
    if where == "memory":
        machine.book.batches.clear()
    else:
        peer.service._store.write([Write(REQUESTS, seq_key(1), None)])

    async def counted() -> bool:
        return peer.registry.get_sample_value("penstock_queue_audit_violations_total") != 0

    await wait_for_async(counted, "the audit to find what is gone")
    assert machine.book.find(name) is not None
