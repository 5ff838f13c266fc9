"""The endpoint that Prometheus scrapes: where it can be."""

from __future__ import annotations

import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter, enable_created_metrics, generate_latest

from penstock.exits import EX_UNAVAILABLE
from services.telemetry import start_metrics
from tests.support.ports import free_port


@pytest.mark.parametrize(
    ("family", "bound", "listen"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET6, "::1", "[::1]"),
        (socket.AF_INET6, "::1", "[::]"),
    ],
)
def test_it_is_served_where_the_other_ports_can_be(family: socket.AddressFamily, bound: str, listen: str) -> None:
    try:
        socket.create_server((bound, 0), family=family).close()
    except OSError:
        pytest.skip(f"this machine has no {bound}")
    port = free_port()
    start_metrics(f"{listen}:{port}")
    there = f"[{bound}]" if family is socket.AF_INET6 else bound
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"http://{there}:{port}/metrics") as answer:
        assert answer.status == 200


def test_no_counter_has_its_creation_time_beside_it_wherever_it_is_served() -> None:
    enable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    Counter("calls", "Text.", registry=registry).inc()
    start_metrics("")
    assert generate_latest(registry).decode().splitlines()[-1] == "calls_total 1.0"


@pytest.mark.parametrize("host", ["127..0.0.1", "no-such-host.invalid", "a" * 64 + ".invalid"])
def test_a_host_that_there_is_not_ends_the_service_with_a_line(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        start_metrics(f"{host}:0")
    assert ending.value.code == EX_UNAVAILABLE
    assert capsys.readouterr().err.startswith(f"cannot serve metrics on {host}:0: ")
