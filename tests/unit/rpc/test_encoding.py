"""What is put together by hand is what protobuf would have written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2
from penstock.scheduler.v1 import scheduler_pb2
from services.queue import wire
from services.queue.core.effects import Announce, Deliver, Ended, Gone, GoneReason, PutResult, Recorded
from services.queue.core.entry import LeaseRef, RequestMeta
from services.queue.core.lifecycle import Outcome
from services.rpc.encoding import encoded, length_tag, number_tag, varint, wrapped
from services.scheduler import wire as scheduler_wire
from services.scheduler.core.messages import Grant
from tests.support.scheduling import announced

META = RequestMeta("", "", "batch", "m", "b", -3, 9, "", "", 5, 0, 7, 2, True, 1 << 63, 4)
NUMBERS = st.integers(0, 2**63 - 1)
NAMES = st.text(max_size=300)


@given(NUMBERS, NAMES)
def test_fields_read_as_they_were_meant(number: int, text: str) -> None:
    content = wrapped(length_tag(queue_pb2.LeaseRef, "request_id"), text.encode())
    content += number_tag(queue_pb2.LeaseRef, "fencing_token") + varint(number)
    lease = queue_pb2.LeaseRef.FromString(content)
    assert (lease.request_id, lease.fencing_token) == (text, number)


@given(st.integers(max_value=-1))
def test_a_negative_number_is_not_written(number: int) -> None:
    with pytest.raises(ValueError, match="negative"):
        varint(number)


def test_what_is_encoded_already_stays_as_it_is() -> None:
    lease = queue_pb2.LeaseRef(request_id="r")
    assert encoded(lease) == encoded(encoded(lease)) == lease.SerializeToString()


@given(NAMES, st.integers(0, 2**32 - 1), NUMBERS, st.booleans(), NUMBERS, st.text(max_size=3000))
def test_a_delivery_is_the_stored_request_under_its_name_and_lease(
    name: str, attempt: int, token: int, watched: bool, submitted_ns: int, text: str
) -> None:
    request = request_pb2.Request(text=text, channel="batch", sampling=request_pb2.SamplingParams(max_tokens=3))
    effect = Deliver(1, 2, LeaseRef(name, attempt, token), watched, submitted_ns, 0, META)
    sent = queue_pb2.QueueToWorker.FromString(wire.deliver(effect, request.SerializeToString()))
    request.request_id = name
    lease = queue_pb2.LeaseRef(request_id=name, attempt=attempt, fencing_token=token)
    deliver = queue_pb2.Deliver(lease=lease, request=request, watched=watched, submitted_unix_ns=submitted_ns)
    assert sent == queue_pb2.QueueToWorker(deliver=deliver)


@given(NAMES, st.booleans())
def test_a_completion_is_answered_for_its_lease(name: str, accepted: bool) -> None:
    sent = queue_pb2.QueueToWorker.FromString(wire.recorded(Recorded(1, LeaseRef(name, 2, 3), accepted)))
    lease = queue_pb2.LeaseRef(request_id=name, attempt=2, fencing_token=3)
    assert sent == queue_pb2.QueueToWorker(recorded=queue_pb2.Recorded(lease=lease, accepted=accepted))


METAS = st.builds(
    RequestMeta, NAMES, NAMES, NAMES, NAMES, NAMES, st.integers(-(2**31), 2**31 - 1), NUMBERS, NAMES, NAMES, NUMBERS,
    NUMBERS, NUMBERS, st.integers(0, 2**32 - 1), st.booleans(), st.integers(0, 2**64 - 1), NUMBERS, NUMBERS,
)  # fmt: skip


@given(NAMES, NUMBERS, st.integers(0, 2**32 - 1), METAS)
def test_an_announcement_is_what_protobuf_would_write(name: str, seq: int, attempt: int, meta: RequestMeta) -> None:
    announced = queue_pb2.Announce(
        request_id=name, channel=meta.channel, priority=meta.priority, position=seq, attempt=attempt,
        model=meta.model, prompt_bytes=meta.prompt_bytes, prompt_tokens=meta.prompt_tokens,
        max_tokens=meta.max_tokens, n=meta.n, chat=meta.chat, deadline_unix_ns=meta.deadline_ns,
        traceparent=meta.traceparent, submitted_unix_ns=meta.submitted_ns, prefix_digest=meta.prefix_digest,
    )  # fmt: skip
    sent = queue_pb2.QueueToScheduler.FromString(wire.announce(Announce(1, name, seq, attempt, meta)))
    assert sent == queue_pb2.QueueToScheduler(announce=announced)


def test_the_scheduler_hears_of_requests_that_go() -> None:
    gone = queue_pb2.QueueToScheduler.FromString(wire.gone(Gone(1, "r", GoneReason.ENDED, 200))).gone
    assert (gone.request_id, gone.reason, gone.attempt) == ("r", queue_pb2.GONE_REASON_ENDED, 200)


@given(
    NAMES, NAMES, NUMBERS, st.booleans(), st.integers(0, 2**32 - 1), NAMES, st.integers(0, 300), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_a_grant_is_what_protobuf_would_have_written(
    name: str,
    channel: str,
    blocks: int,
    settles: bool,
    attempt: int,
    traceparent: str,
    reserve: int,
    stands: bool,
    guaranteed: bool,
) -> None:
    largest = announced(name, channel, 7, model="m", chat=True) if stands else None
    effect = Grant(1, "w", name, channel, blocks, settles, attempt, "", 5, reserve, largest, 1, guaranteed)
    standing = scheduler_pb2.Standing(model="m", chat=True, most_prompt_tokens=7, most_output_tokens=1)
    grant = scheduler_pb2.Grant(
        request_id=name, channel=channel, booked_blocks=blocks, settles=settles, attempt=attempt,
        traceparent=traceparent, reserve_output_tokens=reserve, standing=standing if stands else None,
        guaranteed=guaranteed,
    )  # fmt: skip
    sent = scheduler_pb2.SchedulerToWorker.FromString(scheduler_wire.grant(effect, traceparent))
    assert sent == scheduler_pb2.SchedulerToWorker(grant=grant)


def test_a_stored_result_is_watched_with_its_cursor() -> None:
    result = request_pb2.Result(request_id="r", outcome=request_pb2.OUTCOME_COMPLETED)
    event = queue_pb2.WatchEvent.FromString(wire.StoredResult(300, result.SerializeToString()).event())
    assert event == queue_pb2.WatchEvent(result=queue_pb2.WatchResult(cursor=300, result=result))


def test_a_result_told_at_once_has_the_cursor_it_is_stored_with_unless_it_is_large() -> None:
    small, large = (wire.RunResult(request_pb2.Result(prompt_text="x" * size)) for size in (10, wire.MAX_TOLD_BYTES))
    for body in (small, large):
        wire.encoded_result(PutResult("r", 7, META, Outcome.COMPLETED, None, 1, "w", 3, 5, 41, body))
    told = [wire.told_result(Ended(7, "r", META, Outcome.COMPLETED, 1, 5, 41, body)) for body in (small, large, None)]
    assert told == [wire.StoredResult(41, small.message.SerializeToString()), None, None]
    assert small.message.worker_id == "w", "it has the queue's part"
