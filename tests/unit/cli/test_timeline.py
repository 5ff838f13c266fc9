"""The timeline made of what is durable of a request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.live.timeline import Ack, Part, Timeline, timeline_of
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2 as pb

MS = 1_000_000
START = 1_700_000_000_000 * MS
TIMES = ("delivered", "engine_started", "first_token", "last_token", "completed")
NAMES = ["wait", "grant", "tokenize", "prefill", "decode", "record"]


def found(
    at_ms: dict[str, int], granted_ms: int = 5, outcome: pb.Outcome.ValueType = pb.OUTCOME_COMPLETED
) -> pb.Result:
    """Return a result with these moments, in milliseconds since the submit; those not named are unknown."""
    result = pb.Result(request_id="r", outcome=outcome, worker_id="w", model="m", attempts=2)
    result.timings.submitted_unix_ns = START
    for name, at in at_ms.items():
        setattr(result.timings, f"{name}_unix_ns", START + at * MS)
    result.credits.CopyFrom(
        pb.Credits(
            granted_unix_ns=START + granted_ms * MS, booked_blocks=9, settled_blocks=4, released_blocks=6,
            tokenizer_acks=3,
        )
    )  # fmt: skip
    return result


def timeline(result: pb.Result | None, **fields: object) -> Timeline:
    state = queue_pb2.REQUEST_STATE_DONE
    whole: dict[str, object] = {"request_id": "r", "state": state, "channel": "batch", **fields}
    return timeline_of(queue_pb2.GetResponse(result=result, **whole))  # type: ignore[arg-type]


def test_a_completed_request_has_every_part() -> None:
    shown = timeline(found(dict(zip(TIMES, (8, 10, 30, 100, 104), strict=True))))
    assert [(p.name, p.from_ms, p.to_ms) for p in shown.parts] == [
        ("wait", 0, 5), ("grant", 5, 8), ("tokenize", 8, 10), ("prefill", 10, 30), ("decode", 30, 100),
        ("record", 100, 104),
    ]  # fmt: skip
    assert shown.acks == (
        Ack("grant", 5, 9), Ack("tokenizer ACK", 10, 4), Ack("2 later ACKs", None, 6), Ack("completion ACK", 100, 0),
    )  # fmt: skip
    assert (shown.status, shown.total_ms, shown.worker, shown.model) == ("completed", 104, "w", "m")
    assert (shown.attempts, shown.submitted_unix_ms) == (2, START // MS)


def test_a_booking_that_was_never_settled() -> None:
    result = found({"delivered": 8, "completed": 12}, outcome=pb.OUTCOME_REJECTED)
    result.credits.tokenizer_acks = result.credits.settled_blocks = 0
    result.error.message = "too long"
    shown = timeline(result)
    assert shown.parts == (Part("wait", 0, 5), Part("grant", 5, 8), Part("record", 8, 12))
    assert shown.acks == (Ack("grant", 5, 9), Ack("completion ACK", 8, 0))
    assert (shown.status, shown.error) == ("rejected", "too long")


def test_a_request_no_worker_ended_only_waited() -> None:
    result = pb.Result(request_id="r", outcome=pb.OUTCOME_EXPIRED)
    result.timings.submitted_unix_ns, result.timings.completed_unix_ns = START, START + 7 * MS
    shown = timeline(result)
    assert (shown.status, shown.parts, shown.acks) == ("expired", (Part("wait", 0, 7),), ())


def test_of_a_request_that_has_not_ended_the_state_is_known() -> None:
    running = queue_pb2.REQUEST_STATE_LEASED
    shown = timeline(None, state=running, worker_id="w", attempts=2, last_error="the worker was lost")
    assert (shown.status, shown.worker, shown.error) == ("running", "w", "the worker was lost")
    assert (shown.parts, shown.acks, shown.total_ms) == ((), (), 0)


@given(st.integers(-50, 500), st.lists(st.integers(-50, 500), min_size=5, max_size=5))
def test_parts_join_without_gaps_whatever_the_clocks_say(granted_ms: int, moments: list[int]) -> None:
    """Queue and worker may disagree on the time; no part is negative, and none is lost."""
    shown = timeline(found(dict(zip(TIMES, moments, strict=True)), granted_ms))
    assert [part.name for part in shown.parts] == NAMES
    assert shown.parts[0].from_ms == 0
    assert [part.from_ms for part in shown.parts[1:]] == [part.to_ms for part in shown.parts[:-1]]
    assert all(part.to_ms >= part.from_ms for part in shown.parts)
    assert shown.total_ms == shown.parts[-1].to_ms
