"""What the images' health check says of services in every state."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.health import EX_UNWELL, EX_USAGE, main

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def service() -> Iterator[tuple[str, health.HealthServicer]]:
    """A gRPC server with a health service, and its address."""
    server = grpc.server(ThreadPoolExecutor(1))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", servicer
    server.stop(None).wait()


@pytest.fixture
def web() -> Iterator[tuple[str, list[int]]]:
    """An HTTP server that answers /health with the status in the list."""
    answers = [200]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answers[0] if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/health", answers
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_serving_service_is_well(service: tuple[str, health.HealthServicer]) -> None:
    address, servicer = service
    servicer.set("", SERVING)
    assert main([address]) == 0


def test_a_stopping_service_is_unwell(
    service: tuple[str, health.HealthServicer], capsys: pytest.CaptureFixture[str]
) -> None:
    address, servicer = service
    servicer.set("", NOT_SERVING)
    assert main([address]) == EX_UNWELL
    assert "NOT_SERVING" in capsys.readouterr().err


def test_nobody_there_is_unwell(service: tuple[str, health.HealthServicer], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["127.0.0.1:1"]) == EX_UNWELL
    assert "UNAVAILABLE" in capsys.readouterr().err


def test_a_proxy_for_other_traffic_is_not_asked(
    service: tuple[str, health.HealthServicer], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, servicer = service
    servicer.set("", SERVING)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:1")
    assert main([address]) == 0


def test_http_is_well_by_its_status(web: tuple[str, list[int]], capsys: pytest.CaptureFixture[str]) -> None:
    url, answers = web
    assert main([url]) == 0
    answers[0] = 503
    assert main([url]) == EX_UNWELL
    assert "503" in capsys.readouterr().err
    assert main(["http://127.0.0.1:1/health"]) == EX_UNWELL


@pytest.mark.parametrize("arguments", [[], ["a:1", "b:2"]])
def test_one_address_is_wanted(arguments: list[str]) -> None:
    assert main(arguments) == EX_USAGE
