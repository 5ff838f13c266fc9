"""Batches through the composed stack, every container of it killed meanwhile: `python -m tests.compose`.

Needs a Docker daemon with the images of `make images`. Every container is killed twice while batches run: by
`docker kill`, and by the kernel, after which the restart policy must bring it back. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from tests.compose.docker import COMPOSE, SERVICES, Composed, docker, wait_until
from tests.compose.load import Load

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


def ask_gateway(stack: Composed) -> str:
    """Return the answer of a chat completion through the gateway."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    request = urllib.request.Request(
        f"http://127.0.0.1:{stack.gateway_port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return str(json.load(answer)["choices"][0]["finish_reason"])


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


def play(stack: Composed, directory: Path, count: int, max_tokens: int) -> dict[str, Any]:
    """Bring the stack up, run batches under kills, check everything; return the report."""
    stack.up()
    check_containers(stack)
    say("up: every container healthy, not root, read-only")
    assert ask_gateway(stack) in {"length", "stop"}
    load = Load(f"127.0.0.1:{stack.queue_port}", directory, count, max_tokens)
    try:
        kills = kill_each(stack, load)
        answered = load.finish()
    finally:
        load.stop()
    assert ask_gateway(stack) in {"length", "stop"}
    stack.compose("stop")
    exits = {service: stack.inspect(service)["State"]["ExitCode"] for service in SERVICES}
    assert not any(exits.values()), exits
    verdict = check_store(stack)
    return {"lines": load.lines, "answered_once": answered, "kills": kills, "exit_statuses": exits, "store": verdict}


def main() -> None:
    """Play it and print the report; exits with an AssertionError's traceback if something does not hold."""
    parser = argparse.ArgumentParser("tests.compose", description=__doc__)
    parser.add_argument("--lines", type=int, default=500, help="of each batch")
    parser.add_argument("--max-tokens", type=int, default=128, help="most tokens of an answer; the mean is half of it")
    parser.add_argument("--simulated", action="store_true", help="with the simulated worker instead of vLLM")
    given = parser.parse_args()
    files = [COMPOSE, *([COMPOSE.with_name("compose.simulated.yaml")] if given.simulated else [])]
    stack = Composed(f"penstock-test-{os.getpid()}", files)
    try:
        with tempfile.TemporaryDirectory() as directory:
            report = play(stack, Path(directory), given.lines, given.max_tokens)
    except BaseException:
        say(stack.compose("logs", "--tail", "40", check=False))
        raise
    finally:
        stack.down()
    left = stack.leftovers()
    assert not left, left
    print(json.dumps({**report, "engine": "simulated" if given.simulated else "vllm", "image_mb": sizes_mb()}))


if __name__ == "__main__":
    main()
