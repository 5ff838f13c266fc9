"""Headers beside the body: what they mean, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.batch.reader import InputFile
from penstock.batch.runner import batch_name, fresh_name
from penstock.request.v1 import request_pb2 as pb
from services.gateway.batch.lines import key_of
from services.gateway.batch.records import new_batch_id
from services.gateway.extras import Extras, read_extras
from services.gateway.group import Group
from services.gateway.problem import Problem

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_nothing_said_is_nothing_set() -> None:
    extras = read_extras([("content-type", "application/json"), ("user-agent", "x")])
    assert extras == Extras()
    request = pb.Request(priority=4)
    extras.put_into(request, 7)
    assert request == pb.Request(priority=4), "the body's priority stands"


def test_everything_said_reaches_the_request() -> None:
    extras = read_extras([
        ("x-penstock-channel", "batch"), ("x-penstock-priority", "-3"), ("x-penstock-deadline-ms", "1500"),
        ("idempotency-key", "k"), ("traceparent", TRACE), ("tracestate", "a=b"),
    ])  # fmt: skip
    request = pb.Request(priority=4)
    extras.put_into(request, 1_000)
    assert (request.channel, request.priority, request.idempotency_key) == ("batch", -3, "k")
    assert request.deadline_unix_ns == 1_000 + 1_500_000_000
    assert (extras.traceparent, extras.tracestate) == (TRACE, "a=b")


def test_who_names_a_request_keeps_it() -> None:
    assert read_extras([("idempotency-key", "k")]).keep
    assert read_extras([("x-penstock-keep", "True")]).keep
    assert not read_extras([("x-penstock-keep", "false")]).keep


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-penstock-priority", "high"),
        ("x-penstock-priority", "1.5"),
        ("x-penstock-priority", str(2**31)),
        ("x-penstock-priority", "9" * 5000),
        ("x-penstock-deadline-ms", "0"),
        ("x-penstock-deadline-ms", "-1"),
        ("x-penstock-deadline-ms", ""),
        ("x-penstock-deadline-ms", "٣"),
        ("x-penstock-keep", "maybe"),
        ("x-penstock-chanel", "batch"),
        ("idempotency-key", "é" * 300),
    ],
)
def test_a_wrong_header_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(Problem) as refused:
        read_extras([(name, value)])
    assert (refused.value.status, refused.value.error["param"]) == (400, name)


def test_a_key_of_ours_is_no_clients(tmp_path: Path) -> None:
    """Or its request would be taken for a line's, or a prompt's, and answer in its place."""
    (tmp_path / "in").write_text("")
    run = batch_name(tmp_path / "out", InputFile(tmp_path / "in"), "")
    for key in (key_of(new_batch_id(), 3), Group.of("", 2).key(1), f"{run}:3", f"{run}:3:abc", f"{fresh_name(run)}:3"):
        with pytest.raises(Problem) as refused:
            read_extras([("idempotency-key", key)])
        assert (refused.value.status, refused.value.error["param"]) == (400, "idempotency-key")
    for key in ("batch_1:3", "several-requests", "rb-1", f"my-{run}:3", new_batch_id()):
        assert read_extras([("idempotency-key", key)]).idempotency_key == key


NO_TRACES = [f"00-{0:032x}-{1:016x}-01", f"00-{1:032x}-{0:016x}-01", f"ff-{1:032x}-{1:016x}-01", TRACE + "\n"]


@pytest.mark.parametrize("trace", ["", "garbage", TRACE.upper(), TRACE + "-more", TRACE + "-", "00-0-0-01", *NO_TRACES])
def test_a_malformed_trace_is_no_trace(trace: str) -> None:
    extras = read_extras([("traceparent", trace), ("tracestate", "a=b")])
    assert (extras.traceparent, extras.tracestate) == ("", "")


def test_a_trace_of_a_later_version_and_a_state_too_long_are_no_errors() -> None:
    extras = read_extras([("traceparent", f"cc{TRACE[2:]}-more"), ("tracestate", f"a={'b' * 255}, c={'d' * 256}")])
    assert (extras.traceparent, extras.tracestate) == (TRACE, "")
