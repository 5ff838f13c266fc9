"""What is said and counted of submits that are refused where they come in."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry

from penstock.errors import CHANNEL_DENIED
from penstock.keys import Role
from penstock.request.v1 import request_pb2
from services.auth.caller import CALLER, Caller
from services.auth.keyring import NotAllowedError
from services.clock import SystemClock
from services.queue import wire
from services.queue.committer import Committer
from services.queue.core.entry import request_id_of
from services.queue.core.machine import Machine
from services.queue.core.messages import SetQuotas, Submit
from services.queue.core.quotas import OVER_QUOTA, Quota
from services.queue.metrics import QueueMetrics
from services.queue.storage.recovery import recover
from services.queue.storage.store import StoreError
from services.queue.submits.intake import Intake, Taking
from services.telemetry import Telemetry, parent_context
from tests.support.committing import Ear
from tests.support.memory_store import MemoryStore
from tests.support.queueing import RULES, STORE_ID
from tests.support.spans import Kept, is_error, told

REFUSED = "penstock_queue_auth_refused_total"


def resting() -> Committer:
    """Return a committer that does not run: what is posted to it gathers."""
    store, clock = MemoryStore(), SystemClock()
    return Committer(store, lambda: Machine(STORE_ID, RULES, recover(store), clock.now_ns()), clock, Ear(), 0)


@pytest.mark.parametrize("all_or_none", [False, True])
async def test_a_channel_that_is_not_for_the_caller_counts_once_however_it_is_submitted(all_or_none: bool) -> None:
    registry = CollectorRegistry()
    intake = Intake(resting(), ("a", "b"), "a", SystemClock(), Telemetry(None), QueueMetrics(registry))
    CALLER.set(Caller(Role.CLIENT, "t", "t", frozenset({"a"}), "key"))
    asked = [(7, request_pb2.Request(text="x", channel="b"))]
    if all_or_none:
        with pytest.raises(NotAllowedError):  # which the guard counts
            intake.check(Taking(all_or_none), asked)
        assert not registry.get_sample_value(REFUSED, {"reason": "channel"})
        return
    (ack,) = await intake.take(1, asked).acks()
    assert (ack.tag, ack.error.code) == (7, CHANNEL_DENIED)
    assert registry.get_sample_value(REFUSED, {"reason": "channel"}) == 1


TRACE = f"00-{0xA7:032x}-{9:016x}-01"


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("", False),
        (TRACE, True),
        (TRACE.upper(), False),
        (f"00-{0:032x}-{0:016x}-00", False),
        ("x", False),
        ("x" * 600, False),
    ],
)
async def test_what_is_known_of_a_traced_request_is_what_is_stored_of_it(sent: str, kept: bool) -> None:
    """What names no trace is replaced, or every service would begin one of its own."""
    metrics = QueueMetrics(CollectorRegistry())
    committer = resting()
    intake = Intake(committer, ("a", "b"), "a", SystemClock(), Telemetry(TracerProvider()), metrics)
    CALLER.set(Caller(Role.CLIENT, "t", "t", None, "key"))
    intake.take(1, [(7, request_pb2.Request(text="x", traceparent=sent, tracestate="a=b"))])
    (submit,) = committer._gathered()
    assert isinstance(submit, Submit)
    (new,) = submit.requests
    stored = request_pb2.Request.FromString(new.payload)
    assert (stored.channel, stored.tenant) == ("a", "t")
    assert (stored.traceparent == sent, bool(stored.tracestate)) == (kept, kept)
    assert trace.get_current_span(parent_context(stored.traceparent)).get_span_context().is_valid
    assert new.meta == wire.meta_of(stored, len(new.payload))


@pytest.mark.parametrize("telemetry", [Telemetry(None), Telemetry(TracerProvider())])
@pytest.mark.parametrize("state", ["a=" + "b" * 511, "no state", "a=b,a=c"])
async def test_a_state_that_cannot_be_carried_is_left_out_and_refuses_nothing(state: str, telemetry: Telemetry) -> None:
    committer = resting()
    intake = Intake(committer, ("a",), "a", SystemClock(), telemetry, QueueMetrics(CollectorRegistry()))
    CALLER.set(Caller(Role.CLIENT, "t", "t", None, "key"))
    later = f"cc{TRACE[2:]}-{'more' * 200}"
    intake.take(1, [(7, request_pb2.Request(text="x", traceparent=later, tracestate=state))])
    (submit,) = committer._gathered()
    assert isinstance(submit, Submit)
    (new,) = submit.requests
    stored = request_pb2.Request.FromString(new.payload)
    assert (stored.traceparent, stored.tracestate) == (TRACE, "")
    assert new.meta == wire.meta_of(stored, len(new.payload))


async def test_the_trace_of_a_repeat_says_that_it_is_one() -> None:
    """Or it would end after its first span as that of a request which was lost."""
    kept, committer = Kept(), resting()
    intake = Intake(committer, ("a",), "a", SystemClock(), kept.telemetry, QueueMetrics(CollectorRegistry()))
    CALLER.set(Caller(Role.CLIENT, "t", "t", None, "key"))
    intake.take(1, [(tag, request_pb2.Request(text="x", idempotency_key="k")) for tag in range(2)])
    await run_once(committer)
    names = ("penstock.request.id", "penstock.duplicate")
    name = {"penstock.request.id": request_id_of(STORE_ID, 1)}
    assert [told(span, *names) for span in kept.named("queue.persist")] == [name, {**name, "penstock.duplicate": True}]


async def run_once(committer: Committer) -> None:
    """Commit what was posted, and let the callbacks of its answers be called."""
    committer.stop()
    await committer.run()
    await asyncio.sleep(0)


async def test_the_root_of_a_trace_is_told_also_if_nobody_hears_the_ack() -> None:
    """Of a client that has died the queue runs what it had read, and every span of it names this one."""
    kept, committer = Kept(), resting()
    intake = Intake(committer, ("a",), "a", SystemClock(), kept.telemetry, QueueMetrics(CollectorRegistry()))
    CALLER.set(Caller(Role.CLIENT, "t", "t", None, "key"))
    intake.take(1, [(tag, request_pb2.Request(text="x", channel="a" if tag else "b")) for tag in range(3)])
    await run_once(committer)
    spans = kept.named("queue.persist")
    assert {told(span, "penstock.tenant")["penstock.tenant"] for span in spans} == {"t"}
    assert [told(span, "penstock.request.id") for span in spans] == [
        {"penstock.request.id": request_id_of(STORE_ID, number)} for number in (1, 2)
    ]
    assert not any(is_error(span) for span in spans)


async def test_what_was_not_stored_has_the_reason_in_its_span() -> None:
    kept, committer = Kept(), resting()
    committer.health.failed(StoreError("the disk is gone"))
    intake = Intake(committer, ("a",), "a", SystemClock(), kept.telemetry, QueueMetrics(CollectorRegistry()))
    CALLER.set(Caller(Role.CLIENT, "t", "t", None, "key"))
    frame = intake.take(1, [(7, request_pb2.Request(text="x"))])
    await run_once(committer)
    (ack,) = await frame.acks()
    assert ack.error.code == "store_unavailable"
    span = kept.one("queue.persist")
    assert told(span, "error.type", "penstock.request.id") == {"error.type": "store_unavailable"}
    assert is_error(span)


async def test_what_a_quota_does_not_let_in_has_the_reason_in_its_span_and_is_no_error() -> None:
    kept, committer = Kept(), resting()
    committer.post(SetQuotas({"t": Quota(1)}))
    intake = Intake(committer, ("a",), "a", SystemClock(), kept.telemetry, QueueMetrics(CollectorRegistry()))
    CALLER.set(Caller(Role.CLIENT, "t", "t", None, "key"))
    frame = intake.take(1, [(tag, request_pb2.Request(text="x")) for tag in range(2)])
    await run_once(committer)
    stored, refused = await frame.acks()
    assert refused.error.code == OVER_QUOTA
    spans = kept.named("queue.persist")
    assert [told(span, "error.type", "penstock.request.id") for span in spans] == [
        {"penstock.request.id": stored.request_id},
        {"error.type": OVER_QUOTA},
    ]
    assert not any(is_error(span) for span in spans)
