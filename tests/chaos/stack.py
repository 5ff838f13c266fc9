"""The stack under test: services and clients as processes, a proxy on every link between two of them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.process import Process
from tests.chaos.proxy import Proxy
from tests.support.modules import python_path
from tests.support.ports import free_port

LEASE_S = 8
"""Of the queue under test. Short, so that a long pause outlasts it; the default is a minute."""

GRACE_S = 2
"""A lost worker's leases and credits wait this long for its return. The defaults are ten and five seconds."""

DISK_FREE_MIN_BYTES = 16 * 2**20
"""Below this the queue under test refuses submits; a default of 256 MiB would be a large part of a small disk."""

CLIENT_WAITS_S = 60
"""How long a client that is started waits for the queue to be there."""

STOP_S = 30.0
"""Longest that a service may take to end: its own grace period is 8 s."""

CLIENT_INTERRUPTED = 130
"""Exit status of `penstock run-batch` after a signal."""


@dataclass(frozen=True)
class Plan:
    """What to start, and where."""

    directory: Path
    """Of logs, inputs and outputs."""
    queue_data: Path
    worker_flags: Sequence[str]
    lanes: Sequence[Sequence[Path]]
    """Input files of each client, answered one after the other."""
    workers: int
    say: Callable[[str], None]


def output_of(source: Path) -> Path:
    """Return where the answers to an input file go."""
    return source.with_name(source.name.replace("in-", "out-", 1))


class Service(Process):
    """A service, restarted for as long as the stack runs."""

    def __init__(self, name: str, flags: Sequence[str], environment: dict[str, str], plan: Plan) -> None:
        """Give the service free ports that it keeps over all its lives."""
        super().__init__(name, environment, plan.directory / "logs", plan.say)
        self.module = name.split("-", maxsplit=1)[0]
        self.address = f"127.0.0.1:{free_port()}"
        self.metrics_address = f"127.0.0.1:{free_port()}"
        self._flags = flags

    def command(self) -> Sequence[str]:
        """Return the service's command line."""
        listen = ["--listen", self.address, "--metrics-listen", self.metrics_address]
        return [sys.executable, "-m", f"services.{self.module}", *listen, *self._flags]

    def serving(self) -> bool:
        """Whether this life has said that it is ready."""
        return self.alive and self.at_work()

    def at_work(self) -> bool:
        """Whether this life has said that it is ready."""
        return f"ready: {self.module} on ".encode() in self.log_of_this_life()


class Lane(Process):
    """A client: `penstock run-batch` for one file after the other; the same command again when it was killed."""

    def __init__(
        self, name: str, sources: Sequence[Path], addresses: Sequence[str], environment: dict[str, str], plan: Plan
    ) -> None:
        """Answer `sources` through the links whose addresses are given: the queue's, the scheduler's."""
        super().__init__(name, environment, plan.directory / "logs", plan.say)
        self.sources = sources
        self._flags = ["--queue", addresses[0], "--scheduler", addresses[1], "--wait-s", str(CLIENT_WAITS_S)]
        self._part = 0
        self._answered_before = 0
        self._lines = [_count(source) for source in sources]

    def command(self) -> Sequence[str]:
        """Return the command of the present part."""
        source = self.sources[self._part]
        files = ["-i", str(source), "-o", str(output_of(source))]
        return [sys.executable, "-m", "penstock", "run-batch", *files, *self._flags]

    def serving(self) -> bool:
        """Whether this life has found the queue and begun."""
        return self.alive and self._begun()

    def at_work(self) -> bool:
        """Whether this life had begun, and its output was not whole yet."""
        return self._begun() and not output_of(self.sources[self._part]).exists()

    def _begun(self) -> bool:
        return b" answered in the journal" in self.log_of_this_life()

    def ended(self, status: int, asked: bool) -> None:
        """Go on with the next part after a good end, with the same part after any other."""
        if status != 0:
            super().ended(status, asked)
            return
        self._answered_before += self._lines[self._part]
        self._part += 1
        self.done = self._part == len(self.sources)
        self._start_at_s = 0.0

    @property
    def answered(self) -> int:
        """Lines answered so far, by the journal of the present part."""
        if self._part == len(self.sources):
            return self._answered_before
        journal = Path(f"{output_of(self.sources[self._part])}.partial")
        try:
            lines = max(_count(journal) - 1, 0)
        except FileNotFoundError:
            lines = self._lines[self._part] if output_of(self.sources[self._part]).exists() else 0
        return self._answered_before + lines


def _count(path: Path) -> int:
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(2**20), b""))


class Stack:
    """Everything that runs. Links are called "FROM>TO"."""

    def __init__(self, plan: Plan) -> None:
        """Describe the processes and links; nothing runs yet."""
        self.plan = plan
        self.proxies: dict[str, Proxy] = {}
        self.services: dict[str, Service] = {}
        self.lanes: dict[str, Lane] = {}
        self._keepers: list[asyncio.Task[None]] = []
        (plan.directory / "logs").mkdir(parents=True, exist_ok=True)
        self._environment = {
            **os.environ,
            "PYTHONPATH": python_path(),
            "PYTHONUNBUFFERED": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        # Without byte code every start of a worker compiles vLLM anew.
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)

    async def start(self) -> None:
        """Start the services and wait until all of them serve. The clients wait for `begin`."""
        plan = self.plan
        grace = ["--worker-grace-s", str(GRACE_S), "--lease-s", str(LEASE_S)]
        disk = ["--data-dir", str(plan.queue_data), "--disk-free-min-bytes", str(DISK_FREE_MIN_BYTES)]
        await self._add("queue", [*grace, *disk])
        to_queue = await self._link("scheduler", "queue")
        await self._add("scheduler", ["--queue-address", to_queue, "--epoch-grace-s", str(GRACE_S)])
        for name in (f"worker-{number}" for number in range(1, plan.workers + 1)):
            queue, scheduler = await self._link(name, "queue"), await self._link(name, "scheduler")
            links = ["--queue-address", queue, "--scheduler-address", scheduler]
            await self._add(name, ["--worker-id", name, *links, *plan.worker_flags])
        await self.until_serving(list(self.services))

    async def _add(self, name: str, flags: Sequence[str]) -> None:
        service = self.services[name] = Service(name, flags, self._environment, self.plan)
        service.start()
        self._keepers.append(asyncio.create_task(service.keep(), name=name))
        if not name.startswith("worker"):
            await self.until_serving([name])

    async def _link(self, source: str, target: str) -> str:
        proxy = self.proxies[f"{source}>{target}"] = Proxy(f"{source}>{target}", self.services[target].address)
        await proxy.start()
        return proxy.address

    async def until_serving(self, names: Sequence[str], timeout_s: float = 120.0) -> None:
        """Wait until these processes serve; raises TimeoutError. Clients that are done have served."""
        async with asyncio.timeout(timeout_s):
            for name in names:
                process = self.process(name)
                while not (process.serving() or process.done):
                    await asyncio.sleep(0.05)

    async def begin(self) -> None:
        """Start the clients."""
        for number, sources in enumerate(self.plan.lanes, 1):
            name = f"client-{number}"
            addresses = [await self._link(name, "queue"), await self._link(name, "scheduler")]
            lane = self.lanes[name] = Lane(name, sources, addresses, self._environment, self.plan)
            self._keepers.append(asyncio.create_task(lane.keep(), name=name))

    def process(self, name: str) -> Process:
        """Return a service or a client by name."""
        return self.services.get(name) or self.lanes[name]

    @property
    def processes(self) -> list[Process]:
        """Every service and every client."""
        return [*self.services.values(), *self.lanes.values()]

    @property
    def answered(self) -> int:
        """Lines answered so far."""
        return sum(lane.answered for lane in self.lanes.values())

    @property
    def finished(self) -> bool:
        """Whether every client has answered all its files."""
        return all(lane.done for lane in self.lanes.values())

    @property
    def outputs(self) -> list[Path]:
        """The output files, whether or not they are there yet."""
        return [output_of(source) for sources in self.plan.lanes for source in sources]

    async def stop(self) -> list[str]:
        """Stop everything, clients first, workers before scheduler and queue; return what did not exit with 0."""
        wrong = []
        for stage in ("client", "worker", "scheduler", "queue"):
            chosen = [process for process in self.processes if process.name.startswith(stage)]
            statuses = await asyncio.gather(*(process.stop(STOP_S) for process in chosen))
            for process, status in zip(chosen, statuses, strict=True):
                if isinstance(process, Service) and status != 0:
                    wrong.append(f"{process.name}: status {status} at the end, not 0")
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for proxy in self.proxies.values():
            await proxy.close()
        return wrong

    def kill(self) -> None:
        """End everything at once, for a harness that cannot go on."""
        for process in self.processes:
            process.done = True
            process.kill(0)
