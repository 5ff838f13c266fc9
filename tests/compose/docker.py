"""The composed stack as a test drives it, by the `docker` command alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "deploy" / "compose.yaml"
SERVICES = ("queue", "scheduler", "worker", "gateway")
START_S = 420
"""For vLLM to load on a machine that does other things as well."""


POLL_S = 0.5
"""Between two looks at the daemon; each is a process."""


def wait_until(fact: Callable[[], bool], what: str) -> None:
    """Return once `fact` holds; raises TimeoutError naming `what` after START_S seconds."""
    deadline = time.monotonic() + START_S
    while not fact():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {START_S} s in vain for: {what}")
        time.sleep(POLL_S)


def docker(*arguments: str, check: bool = True) -> str:
    """Run `docker …` and return what it prints; raises CalledProcessError with its words if it fails."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise AssertionError(f"docker {' '.join(arguments)}: {done.stderr or done.stdout}")
    return done.stdout


@dataclass(frozen=True)
class Composed:
    """A composed stack under a project name of its own."""

    project: str
    files: Sequence[Path] = (COMPOSE,)
    environment: Mapping[str, str] = field(default_factory=dict)
    """What the files ask for beside the ports."""
    queue_port: int = field(default_factory=free_port)
    gateway_port: int = field(default_factory=free_port)

    def compose(self, *arguments: str, check: bool = True) -> str:
        """Run `docker compose …` on this stack."""
        ports = {"PENSTOCK_QUEUE_PORT": str(self.queue_port), "PENSTOCK_GATEWAY_PORT": str(self.gateway_port)}
        os.environ.update({**self.environment, **ports})
        files = [part for path in self.files for part in ("-f", str(path))]
        return docker("compose", "-p", self.project, *files, *arguments, check=check)

    def up(self) -> None:
        """Start it and wait until every container is healthy."""
        self.compose("up", "--detach", "--wait", "--wait-timeout", str(START_S))

    def container(self, service: str) -> str:
        """Return the name of the service's container."""
        return f"{self.project}-{service}-1"

    def inspect(self, service: str) -> dict[str, Any]:
        """Return what the daemon knows of the service's container."""
        found: dict[str, Any] = json.loads(docker("container", "inspect", self.container(service)))[0]
        return found

    def healthy_again(self, service: str, restarts: int) -> None:
        """Return once the service is healthy after the life that had `restarts` behind it."""

        def healthy() -> bool:
            found = self.inspect(service)
            return bool(
                found["RestartCount"] >= restarts and found["State"].get("Health", {}).get("Status") == "healthy"
            )

        wait_until(healthy, f"{service} is healthy again")

    def kill(self, service: str) -> None:
        """`docker kill` it (SIGKILL), which the daemon takes for a wish, and start it again."""
        docker("kill", self.container(service))
        wait_until(lambda: not self.inspect(service)["State"]["Running"], f"{service} is dead")
        docker("start", self.container(service))
        self.healthy_again(service, 0)

    def crash(self, service: str) -> None:
        """SIGKILL its first process, as the kernel would; the restart policy has to start it again."""
        found = self.inspect(service)
        os.kill(int(found["State"]["Pid"]), signal.SIGKILL)
        self.healthy_again(service, found["RestartCount"] + 1)

    def down(self) -> None:
        """Remove everything of it, volumes too."""
        self.compose("down", "--volumes", "--timeout", "30", check=False)

    def leftovers(self) -> list[str]:
        """Return containers, volumes and networks that bear the project's label."""
        label = f"label=com.docker.compose.project={self.project}"
        found = docker("ps", "--all", "--quiet", "--filter", label).split()
        for kind in ("volume", "network"):
            found += docker(kind, "ls", "--quiet", "--filter", label).split()
        return found
