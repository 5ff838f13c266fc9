"""What is said and counted of submits that are refused where they come in."""

from __future__ import annotations

from unittest.mock import Mock

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
from services.queue.core.machine import Machine
from services.queue.core.messages import Submit
from services.queue.metrics import QueueMetrics
from services.queue.storage.recovery import recover
from services.queue.submits.intake import Intake, Taking
from services.telemetry import Telemetry, parent_context
from tests.support.memory_store import MemoryStore
from tests.support.queueing import RULES, STORE_ID

REFUSED = "penstock_queue_auth_refused_total"


def resting() -> Committer:
    """Return a committer that does not run: what is posted to it gathers."""
    store, clock = MemoryStore(), SystemClock()
    return Committer(store, lambda: Machine(STORE_ID, RULES, recover(store), clock.now_ns()), clock, Mock(), 0)


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
    [("", False), (TRACE, True), (TRACE.upper(), False), (f"00-{0:032x}-{0:016x}-00", False), ("x", False)],
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
