"""Batches through the composed stack, every container of it killed meanwhile: `python -m tests.compose`.

Needs a Docker daemon with the images of `make images`. Every container is killed twice while batches run: by
`docker kill`, and by the kernel, after which the restart policy must bring it back. With --tls, all of it under
mutual TLS with keys; CA and certificates are replaced and a key is revoked before the kills. The last line printed is
JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import ssl
import tempfile
from pathlib import Path
from typing import Any

from tests.compose import secured
from tests.compose.asking import chat
from tests.compose.docker import COMPOSE, SERVICES, Composed, docker, wait_until
from tests.compose.load import Load
from tests.compose.secured import Secrets

USER = "10001"
STEP = 25
"""Lines that must be answered between two kills: each hits a batch that moves."""


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def check_containers(stack: Composed) -> None:
    """Every container: healthy, not root, nothing writable but what must be, ports on loopback only."""
    for service in SERVICES:
        found = stack.inspect(service)
        assert found["State"]["Health"]["Status"] == "healthy", service
        assert found["Config"]["User"] == f"{USER}:{USER}", service
        assert found["HostConfig"]["ReadonlyRootfs"], service
        name = stack.container(service)
        uids = docker("exec", name, "python3", "-c", "print(open('/proc/1/status').read())")
        assert f"Uid:\t{USER}\t{USER}\t{USER}\t{USER}" in uids, service
        for path in ("/x", "/opt/penstock/x", "/etc/x"):
            refused = docker("exec", name, "sh", "-c", f"touch {path} 2>&1 || echo refused", check=False)
            assert "refused" in refused, f"{service} can write {path}"
        bound = [b for many in found["NetworkSettings"]["Ports"].values() for b in many or []]
        assert all(b["HostIp"] == "127.0.0.1" for b in bound), service
        assert bool(bound) == (service in {"queue", "gateway"}), service


def kill_each(stack: Composed, load: Load) -> int:
    """Kill every container both ways, each at a batch that moves; return the number of kills."""
    kills = 0
    for how in (stack.kill, stack.crash):
        for service in SERVICES:
            wait_until(load.moved_on(STEP), f"{STEP} answers before {service} is killed")
            how(service)
            kills += 1
            say(f"{how.__name__} {service}: healthy again")
    wait_until(load.moved_on(STEP), f"{STEP} answers after the last kill")
    return kills


def check_store(stack: Composed) -> str:
    """Verify the stopped queue's store from a container; return the verdict."""
    verify = ("run", "--rm", "--no-deps", "--entrypoint", "penstock", "queue", "verify-store", "/data/queue")
    said = stack.compose(*verify).strip().splitlines()[-1]
    assert said == "no violations", said
    return said


def sizes_mb() -> dict[str, int]:
    """Return the size of each image there is, in MB (10^6 bytes, uncompressed)."""
    names = docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}").split()
    ours = [name for name in names if name.startswith("penstock/") and name.endswith(":latest")]
    sizes = {name: int(docker("image", "inspect", "-f", "{{.Size}}", name)) for name in ours}
    return {name.removeprefix("penstock/").removesuffix(":latest"): round(size / 1e6) for name, size in sizes.items()}


def play(stack: Composed, directory: Path, count: int, max_tokens: int, secrets: Secrets | None) -> dict[str, Any]:
    """Bring the stack up, run batches under kills, check everything; return the report."""
    stack.up()
    check_containers(stack)
    say("up: every container healthy, not root, read-only")
    chat(stack, *who(secrets))
    report: dict[str, Any] = {}
    if secrets is not None:
        report["refused_or_let_in"] = secured.check_refusals(stack, secrets)
        say("who has no certificate or key is refused")
    environment = secrets.client_environment if secrets else {}
    load = Load(f"127.0.0.1:{stack.queue_port}", directory, count, max_tokens, environment)
    try:
        if secrets is not None:
            secured.rotate(stack, secrets, load)
            secured.revoke(stack, secrets)
            say("CA and certificates replaced, a key revoked, nothing restarted")
        kills = kill_each(stack, load)
        answered = load.finish()
    finally:
        load.stop()
    chat(stack, *who(secrets))
    stack.compose("stop")
    exits = {service: stack.inspect(service)["State"]["ExitCode"] for service in SERVICES}
    assert not any(exits.values()), exits
    verdict = check_store(stack)
    report |= {"lines": load.lines, "answered_once": answered, "kills": kills, "exit_statuses": exits, "store": verdict}
    return report


def who(secrets: Secrets | None) -> tuple[ssl.SSLContext | None, str]:
    """Return TLS and key of a client."""
    return (secrets.context(), secrets.keys["acme"]) if secrets else (None, "")


def main() -> None:
    """Play it and print the report; exits with an AssertionError's traceback if something does not hold."""
    parser = argparse.ArgumentParser("tests.compose", description=__doc__)
    parser.add_argument("--lines", type=int, default=500, help="of each batch")
    parser.add_argument("--max-tokens", type=int, default=128, help="most tokens of an answer; the mean is half of it")
    parser.add_argument("--simulated", action="store_true", help="with the simulated worker instead of vLLM")
    parser.add_argument("--tls", action="store_true", help="with mutual TLS and keys")
    given = parser.parse_args()
    files = [COMPOSE, *([COMPOSE.with_name("compose.simulated.yaml")] if given.simulated else [])]
    with tempfile.TemporaryDirectory() as directory:
        secrets = Secrets.made(Path(directory)) if given.tls else None
        environment = secrets.variables if secrets else {}
        files += [secured.OVERRIDE] if secrets else []
        stack = Composed(f"penstock-test-{os.getpid()}", files, environment)
        try:
            report = play(stack, Path(directory), given.lines, given.max_tokens, secrets)
        except BaseException:
            say(stack.compose("logs", "--tail", "40", check=False))
            raise
        finally:
            stack.down()
    left = stack.leftovers()
    assert not left, left
    engine = "simulated" if given.simulated else "vllm"
    print(json.dumps({**report, "engine": engine, "tls": given.tls, "image_mb": sizes_mb()}))


if __name__ == "__main__":
    main()
