"""What the images' health check says of services in every state."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from penstock.dev_ca import Authority
from penstock.exits import EX_PROBE_USAGE, EX_UNWELL
from services.health import main

QUEUE = "penstock.queue.v1.QueueService"
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


class Handler(BaseHTTPRequestHandler):
    """Answers /health with `status`."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(context: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve HTTP, over TLS with a context; yields the address to ask."""
    server = HTTPServer(("127.0.0.1", 0), Handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/health"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
    """CA, certificate and key of a service, which the environment names."""
    authority = Authority.open(tmp_path)
    files = (tmp_path / "ca.pem", *authority.issue(tmp_path, "service", 1, ["127.0.0.1"]))
    for name, path in zip(("CA", "CERT", "KEY"), files, strict=True):
        monkeypatch.setenv(f"PENSTOCK_TLS_{name}", str(path))
    return files


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


def test_a_queue_that_takes_no_changes_is_unwell_and_lives(service: tuple[str, health.HealthServicer]) -> None:
    address, servicer = service
    servicer.set(QUEUE, NOT_SERVING)
    assert main(["queue", address]) == EX_UNWELL
    assert main(["--live", "queue", address]) == 0
    servicer.set(QUEUE, SERVING)
    assert main(["queue", address]) == 0
    servicer.set("", NOT_SERVING)
    assert main(["--live", "queue", address]) == EX_UNWELL


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


def test_http_is_well_by_its_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as url:
        assert main([url]) == 0
        monkeypatch.setattr(Handler, "status", 503)
        assert main([url]) == EX_UNWELL
    assert "503" in capsys.readouterr().err
    assert main(["http://127.0.0.1:1/health"]) == EX_UNWELL


@contextmanager
def serving_tls(certificate: tuple[Path, Path, Path]) -> Iterator[str]:
    """Serve gRPC's health over mutual TLS; yields the address."""
    ca, cert, key = (path.read_bytes() for path in certificate)
    server = grpc.server(ThreadPoolExecutor(1))
    servicer = health.HealthServicer()
    servicer.set(QUEUE, SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, cert)], ca, True))
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def test_a_service_with_mutual_tls_is_asked_with_its_own_certificate(certificate: tuple[Path, Path, Path]) -> None:
    with serving_tls(certificate) as address:
        assert main([address]) == 0
        certificate[1].write_text("no certificate")
        assert main([address]) == EX_UNWELL


def test_a_gateway_with_mutual_tls_is_asked_with_its_own_certificate(certificate: tuple[Path, Path, Path]) -> None:
    ca, cert, key = certificate
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(ca))
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # as Python 3.13 checks whom it asks
    context.load_cert_chain(cert, key)
    with serving(context) as url:
        assert main([url]) == 0


@pytest.mark.parametrize(
    ("table", "asked"), [("common", []), ("common", ["queue"]), ("queue", ["queue"])], ids=["common", "both", "own"]
)
def test_tls_is_read_as_the_service_reads_it(
    certificate: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, table: str, asked: list[str]
) -> None:
    """What commands are told in [client] says nothing of the service; a variable for one setting leaves the others."""
    config = tmp_path / "penstock.toml"
    monkeypatch.setenv("PENSTOCK_CONFIG", str(config))
    for name in ("CERT", "KEY"):
        monkeypatch.delenv(f"PENSTOCK_TLS_{name}")
    ca, cert, key = certificate
    told = f'[{table}]\ntls_cert = "{cert}"\ntls_key = "{key}"\n[client]\ntls_ca = "{ca}"\n'
    config.write_text(told)
    with serving_tls(certificate) as address:
        assert main([*asked, address]) == 0
        monkeypatch.delenv("PENSTOCK_TLS_CA")
        monkeypatch.setenv("PENSTOCK_TLS_CA_FILE", str(tmp_path / "named"))
        assert main([*asked, address]) == EX_UNWELL, "no such file"
        (tmp_path / "named").write_text(f"{ca}\n")
        assert main([*asked, address]) == 0


@pytest.mark.parametrize("arguments", [[], ["a:1", "b:2"], ["queues", "a:1"], ["queue", "a:1", "b:2"], ["--live"]])
def test_one_address_is_wanted(arguments: list[str]) -> None:
    assert main(arguments) == EX_PROBE_USAGE == 64
