"""What of others' trace context is taken: W3C Trace Context, sections 3.2 and 3.3."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

import penstock
from penstock.fields import RequestFields
from penstock.trace_context import parent_of, state_of
from tests.support.fake_queue import FakeQueue, serving

IDS = f"{0xA7:032x}-{9:016x}"


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        (f"00-{IDS}-01", f"00-{IDS}-01"),
        (f"00-{IDS}-03", f"00-{IDS}-03"),
        (f"cc-{IDS}-01", f"00-{IDS}-01"),
        (f"cc-{IDS}-fe-what-may-come", f"00-{IDS}-00"),
        (f"01-{IDS}-09-", f"00-{IDS}-01"),
        (f"cc-{IDS}-01.what-may-not-come", ""),
        (f"00-{IDS}-01-more", ""),
        (f"ff-{IDS}-01", ""),
        (f"00-{IDS}-01\n", ""),
        (f"00-{0:032x}-{1:016x}-01", ""),
        (f"00-{1:032x}-{0:016x}-01", ""),
        ("", ""),
    ],
)
def test_a_parent_is_taken_of_any_version_and_left_out_if_malformed(sent: str, taken: str) -> None:
    assert parent_of(sent) == taken


@pytest.mark.parametrize(
    "state",
    [
        "a=b",
        "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE",
        "fw529a3039@dt=FfAAAAB4cnA; x:y , \tb*/_-=~ !",
        ",a=b,,",
        ",".join(f"k{number}=v" for number in range(32)),
        f"a={'b' * 256},c={'d' * 251}",
    ],
)
def test_a_state_is_kept_as_it_is(state: str) -> None:
    assert len(state) <= 512
    assert state_of(state) == state


@pytest.mark.parametrize(
    "state",
    [
        "",
        " ,",
        "a",
        "a=",
        "A=b",
        "a=b=c",
        "a=b,a=c",
        "a=\u00e9",
        "a=b\n",
        f"a={'b' * 257}",
        ",".join(f"k{number}=v" for number in range(33)),
        f"a={'b' * 256},c={'d' * 252}",
    ],
)
def test_a_state_that_is_malformed_or_too_long_is_left_out(state: str) -> None:
    assert state_of(state) == ""


async def test_a_callers_span_with_a_long_state_does_not_break_its_submits() -> None:
    """Switching on tracing in an application must not."""
    state = TraceState([("a", "b" * 256), ("c", "d" * 256)])
    context = SpanContext(0xA7, 9, is_remote=False, trace_flags=TraceFlags(1), trace_state=state)
    async with serving(FakeQueue()) as address, penstock.Client(address, retry_for_s=20) as client:
        with trace.use_span(NonRecordingSpan(context)):
            request, _ = client._prepared(RequestFields(prompt="x"))
    assert (request.traceparent, request.tracestate) == (f"00-{IDS}-01", "")
