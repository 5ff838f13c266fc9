"""Mutual TLS between real processes: who gets in, who does not, and certificates that are replaced under way."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cryptography import x509

import penstock as public
from penstock.dev_ca import Authority
from penstock.tls import TlsError, TlsFiles
from tests.integration.conftest import SIMULATED_FLAGS
from tests.support.fleet import Fleet, Service
from tests.support.fleet import penstock as command
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

LOCAL = ["localhost", "127.0.0.1"]


def variables(files: TlsFiles) -> dict[str, str]:
    return {"PENSTOCK_TLS_CA": files.ca, "PENSTOCK_TLS_CERT": files.cert, "PENSTOCK_TLS_KEY": files.key}


def issued(directory: Path, name: str, days: float = 1, hosts: list[str] | None = None) -> TlsFiles:
    """Return a new certificate of the CA in `directory`, which is made if it is not there."""
    authority = Authority.open(directory)
    cert, key = authority.issue(directory, name, days, hosts)
    return TlsFiles(str(directory / "ca.pem"), str(cert), str(key))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certs")


@pytest.fixture(scope="module")
def fleet(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Queue, scheduler, worker and gateway that let in only who has a certificate."""
    fleet = Fleet(tmp_path_factory.mktemp("tls"), variables(issued(directory, "service", hosts=LOCAL)))
    issued(directory, "client")
    try:
        fleet.start_core()
        fleet.add_worker("w1", SIMULATED_FLAGS)
        addresses = ["--queue-address", fleet.queue.address, "--scheduler-address", fleet.scheduler.address]
        fleet.add("gateway", addresses).start()
        yield fleet
    finally:
        fleet.close()


def client_of(fleet: Fleet, files: TlsFiles, patience_s: float = 20) -> public.Client:
    return public.Client(fleet.queue.address, fleet.scheduler.address, retry_for_s=patience_s, tls=files)


def the_client(directory: Path) -> TlsFiles:
    return TlsFiles(*(str(directory / name) for name in ("ca.pem", "client.pem", "client-key.pem")))


async def test_one_with_a_certificate_of_the_ca_is_served(fleet: Fleet, directory: Path) -> None:
    async with client_of(fleet, the_client(directory)) as client:
        result = await client.generate(prompt="hello", max_tokens=4)
        assert result.outcome is public.Outcome.COMPLETED
    shown = await asyncio.to_thread(
        command, "status", "--queue", fleet.queue.address, "--scheduler", fleet.scheduler.address,
        environment=variables(the_client(directory)),
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr


STRANGERS = ["plain text", "no certificate", "another CA's", "expired", "does not trust the service"]


@pytest.mark.parametrize("who", STRANGERS)
@pytest.mark.parametrize("where", ["queue", "scheduler"])
async def test_a_stranger_is_not_let_in(fleet: Fleet, directory: Path, tmp_path: Path, who: str, where: str) -> None:
    good = the_client(directory)
    other = issued(tmp_path, "client")
    files = {
        "plain text": TlsFiles(),
        "no certificate": TlsFiles(good.ca),
        "another CA's": TlsFiles(good.ca, other.cert, other.key),
        "expired": issued(directory, "expired", days=0),
        "does not trust the service": TlsFiles(other.ca, good.cert, good.key),
    }[who]
    async with client_of(fleet, files, patience_s=0.2) as client:
        with pytest.raises(public.Unavailable):
            await (client.stats() if where == "queue" else client.fleet())


def https(service: Service, files: TlsFiles, path: str, metrics: bool = False) -> tuple[int, x509.Certificate]:
    """Ask over HTTPS; return the status and the certificate that was shown."""
    context = ssl.create_default_context(cafile=files.ca)
    if files.cert:
        context.load_cert_chain(files.cert, files.key)
    connection = http.client.HTTPSConnection(
        service.metrics_address if metrics else service.address, context=context, timeout=30
    )
    try:
        connection.connect()
        assert isinstance(connection.sock, ssl.SSLSocket)
        shown = connection.sock.getpeercert(binary_form=True)
        assert shown is not None
        connection.request("GET", path)
        return connection.getresponse().status, x509.load_der_x509_certificate(shown)
    finally:
        connection.close()


def test_http_ports_let_in_nobody_else_either(fleet: Fleet, directory: Path) -> None:
    good = the_client(directory)
    gateway = fleet.services["gateway"]
    assert https(gateway, good, "/v1/models")[0] == 200
    assert https(fleet.queue, good, "/metrics", metrics=True)[0] == 200
    for service, metrics in ((gateway, False), (fleet.queue, True)):
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            https(service, TlsFiles(good.ca), "/metrics", metrics)
    plain = http.client.HTTPConnection(fleet.queue.metrics_address, timeout=30)
    with closing(plain):
        plain.request("GET", "/metrics")
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            plain.getresponse()
    wait_for(lambda: fleet.queue.log().count("no metrics for 127.0.0.1: ") == 2, "a line for each of the two")
    assert "Traceback" not in fleet.queue.log()


def test_files_that_do_not_fit_are_refused_at_once(tmp_path: Path) -> None:
    good, other = issued(tmp_path, "client"), issued(tmp_path, "other")
    for files, name in (
        (TlsFiles(good.ca, good.cert, other.key), "client.pem"),
        (TlsFiles(good.ca, good.cert), "together"),
        (TlsFiles(str(tmp_path / "none.pem")), "none.pem"),
    ):
        with pytest.raises(TlsError, match=name):
            public.Client(tls=files)


def replace_all(directory: Path) -> None:
    """Write another CA, and certificates that it has signed."""
    for name in ("ca.pem", "ca-key.pem"):
        (directory / name).unlink()
    issued(directory, "service", hosts=LOCAL)
    issued(directory, "client")


def turn_away(address: str, count: int) -> None:
    """Listen in the place of a service that is down until so many connections have been made, and failed."""
    host, _, port = address.rpartition(":")
    with socket.create_server((host, int(port))) as listener:
        listener.settimeout(60)
        for _ in range(count):
            listener.accept()[0].close()


async def test_new_certificates_of_a_new_ca_are_taken_without_a_restart(fleet: Fleet, directory: Path) -> None:
    """It replaces every certificate, and then the queue, so that everyone must connect again."""
    gateway = fleet.services["gateway"]
    _, before = await asyncio.to_thread(https, gateway, the_client(directory), "/v1/models")
    over = asyncio.Event()
    async with client_of(fleet, the_client(directory), patience_s=60) as client:

        async def ask_on() -> int:
            answered = 0
            while not over.is_set():
                result = await client.generate(prompt="hello", max_tokens=4)
                assert result.outcome is public.Outcome.COMPLETED
                answered += 1
            return answered

        asking = asyncio.create_task(ask_on())
        replace_all(directory)
        await asyncio.to_thread(fleet.queue.kill)
        await asyncio.to_thread(fleet.queue.start)
        await asyncio.to_thread(fleet.scheduler.kill)
        await asyncio.to_thread(fleet.scheduler.start)
        result = await client.generate(prompt="after", max_tokens=4)
        assert result.outcome is public.Outcome.COMPLETED
        over.set()
        assert await asking > 0
    status, after = await asyncio.to_thread(https, gateway, the_client(directory), "/v1/models")
    assert status == 200
    assert after.issuer == before.issuer, "the names are the same"
    assert after.serial_number != before.serial_number, "the certificates are not"
    assert not fleet.services["worker-w1"].log().count("Traceback")


@pytest.mark.parametrize("which", ["scheduler", "queue"])
async def test_those_who_wait_for_a_service_that_was_down_meanwhile_take_them_too(
    fleet: Fleet, directory: Path, which: str
) -> None:
    """The last in the file, as the one before it: nobody who comes after has a certificate that is trusted."""
    down, worker, gateway = fleet.services[which], fleet.services["worker-w1"], fleet.services["gateway"]
    waits, connected = f"{which}: waiting for {down.address}", f"{which}: connected to {down.address}"
    waited, times = worker.log().count(waits), worker.log().count(connected)
    down.kill()
    await asyncio.to_thread(wait_for, lambda: worker.log().count(waits) > waited, "the worker to wait for it")
    await asyncio.to_thread(turn_away, down.address, 8)
    replace_all(directory)
    await asyncio.to_thread(down.start)
    await asyncio.to_thread(wait_for, lambda: worker.log().count(connected) > times, "the worker to be connected")
    async with client_of(fleet, the_client(directory)) as client:
        result = await client.generate(prompt="after", max_tokens=4)
        assert result.outcome is public.Outcome.COMPLETED
    assert (await asyncio.to_thread(https, gateway, the_client(directory), "/v1/models"))[0] == 200
