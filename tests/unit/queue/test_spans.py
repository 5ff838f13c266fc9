"""What the queue's spans say of requests and attempts with which something went wrong."""

from __future__ import annotations

import time

import pytest

from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2
from tests.support.serving import ids, serving, text
from tests.support.spans import Kept, is_error, told
from tests.support.waiting import wait_for_async

END, LAST, CAUSE = "penstock.lease.end", "penstock.attempt.last", "error.type"


async def ended(kept: Kept, count: int = 1) -> None:
    """Return once `count` requests have ended."""

    async def told_of() -> bool:
        return len(kept.named("queue.complete")) == count

    await wait_for_async(told_of, "the end")


async def test_each_attempt_tells_what_ended_it_and_the_last_one_that_it_was() -> None:
    kept = Kept()
    async with serving(kept.telemetry) as peer:
        (name,) = await peer.submit(text())
        for life in ("1", "2"):
            work = await peer.work(life=life)
            await work.claim(name)
            await work.close()
        await peer.work(life="3")  # which has neither
        await ended(kept)
    first, last = kept.named("queue.lease")
    assert told(first, END, LAST, CAUSE) == {END: "worker_lost", CAUSE: "worker_lost"}
    assert told(last, END, LAST, CAUSE) == {END: "worker_lost", CAUSE: "worker_lost", LAST: True}
    assert is_error(first)
    assert is_error(last)
    complete = kept.one("queue.complete")
    assert told(complete, "penstock.outcome", CAUSE) == {"penstock.outcome": "dead", CAUSE: "worker_lost"}
    assert is_error(complete)


async def test_what_a_worker_failed_with_is_told_by_its_code_alone() -> None:
    kept = Kept()
    async with serving(kept.telemetry) as peer:
        (name,) = await peer.submit(text())
        work = await peer.work()
        failure = request_pb2.RequestError(code="engine_error", message="of the prompt 'my secret'")
        for _ in range(2):
            await work.complete((await work.claim(name)).lease, failure=failure)
        await ended(kept)
    spans = [*kept.named("queue.lease"), kept.one("queue.complete")]
    assert [told(span, END, CAUSE) for span in spans[:2]] == [{END: "fail", CAUSE: "engine_error"}] * 2
    assert told(spans[2], CAUSE) == {CAUSE: "engine_error"}
    assert all(is_error(span) for span in spans)
    assert not any("secret" in span.to_json() for span in spans)


async def test_a_completed_request_and_one_handed_back_are_no_errors() -> None:
    kept = Kept()
    async with serving(kept.telemetry) as peer:
        (name,) = await peer.submit(text())
        work = await peer.work()
        back = queue_pb2.GiveBack(leases=[(await work.claim(name)).lease])
        await work.send(queue_pb2.WorkerToQueue(give_back=back))
        await work.complete((await work.claim(name)).lease)
        await ended(kept)
    spans = [*kept.named("queue.lease"), kept.one("queue.complete")]
    assert [told(span, END, LAST, CAUSE) for span in spans] == [{END: "give_back"}, {END: "complete"}, {}]
    assert not any(is_error(span) for span in spans)


async def test_an_end_names_the_attempt_that_its_lease_names_after_a_requeue_too() -> None:
    kept = Kept()
    async with serving(kept.telemetry) as peer:
        (name,) = await peer.submit(text())
        work = await peer.work()
        for _ in range(2):
            await work.complete((await work.claim(name)).lease, failure=request_pb2.RequestError(code="x"))
        await ended(kept)
        await peer.stub.RequeueDead(queue_pb2.RequeueDeadRequest(request_ids=ids(name)))
        await work.complete((await work.claim(name)).lease)
        await ended(kept, 2)
    attempts = [told(span, "penstock.attempt")["penstock.attempt"] for span in kept.named("queue.lease")]
    ends = [told(span, "penstock.attempt")["penstock.attempt"] for span in kept.named("queue.complete")]
    assert (attempts, ends) == ([1, 2, 3], [2, 3])


@pytest.mark.parametrize(
    ("outcome", "code", "error", "cause"),
    [
        (request_pb2.OUTCOME_REJECTED, "context_length_exceeded", False, "context_length_exceeded"),
        (request_pb2.OUTCOME_EXPIRED, "deadline_exceeded", True, "deadline_exceeded"),
        (request_pb2.OUTCOME_EXPIRED, "", True, "expired"),
        (request_pb2.OUTCOME_CANCELLED, "cancelled", False, None),
    ],
)
async def test_an_end_is_an_error_unless_it_was_the_request_s_own_doing(
    outcome: request_pb2.Outcome.ValueType, code: str, error: bool, cause: str | None
) -> None:
    kept = Kept()
    async with serving(kept.telemetry) as peer:
        (name,) = await peer.submit(text())
        work = await peer.work()
        result = request_pb2.Result(outcome=outcome)
        if code:
            result.error.code = code
        await work.complete((await work.claim(name)).lease, result=result)
        await ended(kept)
    complete = kept.one("queue.complete")
    assert told(complete, CAUSE) == ({CAUSE: cause} if cause else {})
    assert is_error(complete) is error
    assert not is_error(kept.one("queue.lease")), "the attempt itself was not lost"


async def test_a_wait_that_ends_without_a_lease_is_a_span_too() -> None:
    kept = Kept()
    async with serving(kept.telemetry) as peer:
        cancelled, expired = await peer.submit(text(), text(deadline_unix_ns=time.time_ns() + 1_000_000_000))
        await peer.stub.Cancel(queue_pb2.CancelRequest(request_ids=ids(cancelled)))
        await ended(kept, 2)
    waits, ends = kept.named("queue.wait"), kept.named("queue.complete")
    assert [told(span, "penstock.request.id", "penstock.channel", "penstock.attempt") for span in waits] == [
        {"penstock.request.id": name, "penstock.channel": "interactive", "penstock.attempt": 1}
        for name in (cancelled, expired)
    ]
    for wait, end in zip(waits, ends, strict=True):
        assert wait.start_time is not None
        assert wait.end_time is not None
        assert wait.start_time < wait.end_time == end.start_time
        assert not is_error(wait)


async def test_the_wait_for_another_attempt_is_one_of_its_own_and_what_ran_has_waited_once() -> None:
    kept = Kept()
    async with serving(kept.telemetry) as peer:
        waited, ran = await peer.submit(text(), text())
        work = await peer.work()
        await work.complete((await work.claim(waited)).lease, failure=request_pb2.RequestError(code="oom"))
        await work.complete((await work.claim(ran)).lease)
        await peer.stub.Cancel(queue_pb2.CancelRequest(request_ids=ids(waited)))
        await ended(kept, 2)
    waits = [told(span, "penstock.request.id", "penstock.attempt") for span in kept.named("queue.wait")]
    assert waits == [
        {"penstock.request.id": name, "penstock.attempt": attempt}
        for name, attempt in ((waited, 1), (ran, 1), (waited, 2))
    ]
