"""The composed stack with mutual TLS and keys: its certificates and keys, who is refused, and both replaced under way.

Made with the commands that docs/deploy.md names. Files are given to the group of the images' user where the test may
do so (root), else everybody may read them.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import penstock as public
from penstock.tls import TlsFiles
from tests.compose.asking import CHAT, ask, chat
from tests.compose.docker import COMPOSE, SERVICES, Composed, docker, wait_until
from tests.compose.load import Load

OVERRIDE = COMPOSE.with_name("compose.tls.yaml")
GROUP = 10001
MOUNTED = ("service-key.pem", "service.pem", "ca.pem")
"""The order in which they are replaced: a key that does not fit its certificate yet is left alone until it does."""

KEYS = {"acme": ("--tenant", "acme"), "beta": ("--tenant", "beta"), "leaver": ("--tenant", "acme")}
STEP = 25
INSIDE = {
    "queue": "queue:7410",
    "scheduler": "scheduler:7420",
    "worker": "worker:7430",
    "gateway": "http://gateway:7415/health",
}
"""Each service's port as another container reaches it."""


def command(*arguments: str) -> str:
    """Run `penstock …`; return what it prints. Raises AssertionError."""
    done = subprocess.run([sys.executable, "-m", "penstock", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def give(path: Path) -> None:
    """Let the images' user read a file or a directory."""
    shared = os.geteuid() == 0
    if shared:
        os.chown(path, -1, GROUP)
    path.chmod((0o750 if shared else 0o755) if path.is_dir() else (0o640 if shared else 0o644))


@dataclass
class Secrets:
    """Certificates of the present CA, and keys, below `directory`."""

    directory: Path
    keys: dict[str, str] = field(default_factory=dict)
    authorities: int = 0

    @classmethod
    def made(cls, directory: Path) -> Secrets:
        """Make a CA, its certificates and the keys of two tenants."""
        secrets = cls(directory)
        for mounted in (secrets.tls, secrets.keyfile.parent):
            mounted.mkdir()
            give(mounted)
        secrets.issue()
        secrets.keyfile.write_text('service_certificates = ["service"]\n')
        give(secrets.keyfile)
        for name, arguments in KEYS.items():
            secrets.keys[name] = command("keys", "create", name, "--file", str(secrets.keyfile), *arguments)
        return secrets

    @property
    def tls(self) -> Path:
        """What is mounted as certificates."""
        return self.directory / "tls"

    @property
    def keyfile(self) -> Path:
        """The keys file, in the other directory that is mounted."""
        return self.directory / "keys" / "keys.toml"

    @property
    def variables(self) -> dict[str, str]:
        """What the override file asks for."""
        return {"PENSTOCK_TLS_DIR": str(self.tls), "PENSTOCK_KEYS_DIR": str(self.keyfile.parent)}

    @property
    def files(self) -> TlsFiles:
        """A client's, of the present CA; the same paths after a rotation."""
        return TlsFiles(*(str(self.directory / name) for name in ("ca.pem", "client.pem", "client-key.pem")))

    @property
    def client_environment(self) -> dict[str, str]:
        """What a client of the tenant acme exports."""
        files = self.files
        told = {"PENSTOCK_TLS_CA": files.ca, "PENSTOCK_TLS_CERT": files.cert, "PENSTOCK_TLS_KEY": files.key}
        return {**told, "PENSTOCK_KEY": self.keys["acme"]}

    def issue(self) -> None:
        """Make a new CA with a service's and a client's certificate, and put them in the place of the old ones."""
        made = self.directory / f"certs-{self.authorities}"
        self.authorities += 1
        hosts = [part for service in SERVICES for part in ("--host", service)]
        command("certs", str(made), *hosts)
        for name in MOUNTED:
            shutil.copy(made / name, self.tls / f".{name}")
            give(self.tls / f".{name}")
            (self.tls / f".{name}").replace(self.tls / name)
        for name in ("client-key.pem", "client.pem", "ca.pem"):
            shutil.copy(made / name, self.directory / f".{name}")
            (self.directory / f".{name}").replace(self.directory / name)

    def context(self, files: TlsFiles | None = None) -> ssl.SSLContext:
        """Return the TLS of a client with `files`, by default with the good ones."""
        files = files or self.files
        context = ssl.create_default_context(cafile=files.ca)
        if files.cert:
            context.load_cert_chain(files.cert, files.key)
        return context

    def older(self) -> TlsFiles:
        """Return a client's certificate of the first CA, and trust in the present one."""
        first = self.directory / "certs-0"
        return TlsFiles(self.files.ca, str(first / "client.pem"), str(first / "client-key.pem"))


def check_refusals(stack: Composed, secrets: Secrets) -> int:
    """Who has no certificate, no key or another tenant's is refused as documented; return the number of cases."""
    checks = [*_http_refusals(stack, secrets), *_grpc_refusals(stack, secrets)]
    for name, check in checks:
        assert check(), name
    plain = ["-e", "PENSTOCK_TLS_CA=", "-e", "PENSTOCK_TLS_CERT=", "-e", "PENSTOCK_TLS_KEY="]
    for service, address in INSIDE.items():
        asked = f"python3 -m services.health {address} 2>&1 && echo let in"
        said = docker("exec", *plain, stack.container("scheduler"), "sh", "-c", asked, check=False)
        assert address in said, said
        assert "let in" not in said, f"{service} speaks plain text inside the network"
    return len(checks) + len(INSIDE)


def _http_refusals(stack: Composed, secrets: Secrets) -> list[tuple[str, Callable[[], bool]]]:
    good, acme, beta = secrets.context(), secrets.keys["acme"], secrets.keys["beta"]
    mine = f"/v1/requests/{chat(stack, good, acme)}"

    def answered(status: int, code: str, path: str, key: str, body: Any = None) -> Callable[[], bool]:
        def check() -> bool:
            found, answer, _ = ask(stack, path, body, good, key)
            return found == status and (found == 200 or answer["error"]["code"] == code)

        return check

    def no_handshake(tls: ssl.SSLContext | None) -> Callable[[], bool]:
        def check() -> bool:
            try:
                ask(stack, "/health", None, tls, acme)
            except (OSError, http.client.HTTPException):
                return True
            return False

        return check

    return [
        ("HTTP: with certificate and key", answered(200, "", mine, acme)),
        ("HTTP: without a key", answered(401, "invalid_api_key", "/v1/chat/completions", "", CHAT)),
        ("HTTP: with a wrong key", answered(401, "invalid_api_key", "/v1/models", "penstock.acme.wrong")),
        ("HTTP: another tenant's request", answered(404, "not_found", mine, beta)),
        ("HTTP: without a certificate", no_handshake(secrets.context(TlsFiles(secrets.files.ca)))),
        ("HTTP: in plain text", no_handshake(None)),
    ]


def _grpc_refusals(stack: Composed, secrets: Secrets) -> list[tuple[str, Callable[[], bool]]]:
    acme, good = secrets.keys["acme"], secrets.files

    def ends(wanted: type[Exception] | None, files: TlsFiles, key: str, operate: bool = False) -> Callable[[], bool]:
        async def call() -> bool:
            queue = f"127.0.0.1:{stack.queue_port}"
            async with public.Client(queue, retry_for_s=0.2, tls=files, api_key=key) as client:
                try:
                    asked: Coroutine[Any, Any, Any] = client.requeue("none") if operate else client.stats()
                    await asked
                except public.PenstockError as error:
                    return wanted is not None and isinstance(error, wanted)
                return wanted is None

        return lambda: asyncio.run(call())

    return [
        ("gRPC: with certificate and key", ends(None, good, acme)),
        ("gRPC: without a key", ends(public.Unauthenticated, good, "")),
        ("gRPC: without the role", ends(public.PermissionDenied, good, acme, operate=True)),
        ("gRPC: without a certificate", ends(public.Unavailable, TlsFiles(good.ca), acme)),
        ("gRPC: in plain text", ends(public.Unavailable, TlsFiles(), acme)),
    ]


def trusted(port: int, secrets: Secrets) -> bool:
    """Whether a port shows a certificate of the present CA, and takes a client's."""
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
            secrets.context().wrap_socket(plain, server_hostname="127.0.0.1"),
        ):
            return True
    except OSError:
        return False


def rotate(stack: Composed, secrets: Secrets, load: Load) -> None:
    """Replace CA and certificates while a batch runs: nothing is restarted, old ones are refused.

    The kills that follow in the test have everybody connect again.
    """
    wait_until(load.moved_on(STEP), "answers before the rotation")
    lives = {service: stack.inspect(service)["State"]["StartedAt"] for service in SERVICES}
    secrets.issue()
    for port in (stack.queue_port, stack.gateway_port):
        wait_until(partial(trusted, port, secrets), f"port {port} shows the new certificate")
    wait_until(load.moved_on(STEP), "answers after the rotation")
    assert lives == {service: stack.inspect(service)["State"]["StartedAt"] for service in SERVICES}
    chat(stack, secrets.context(), secrets.keys["acme"])
    try:
        ask(stack, "/health", None, secrets.context(secrets.older()))
    except OSError:
        return
    raise AssertionError("a certificate of the CA before is let in")


def revoke(stack: Composed, secrets: Secrets) -> None:
    """Revoke a key by its command: it is refused without a restart, others are not."""
    leaver = secrets.keys["leaver"]
    chat(stack, secrets.context(), leaver)
    command("keys", "revoke", "leaver", "--file", str(secrets.keyfile))
    wait_until(lambda: ask(stack, "/v1/models", None, secrets.context(), leaver)[0] == 401, "the key is refused")
    chat(stack, secrets.context(), secrets.keys["acme"])
