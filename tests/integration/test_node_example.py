"""The Node example, written from the `.proto` files: its queue is killed under every one of its streams."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock import Client, Outcome
from tests.chaos.proxy import Proxy
from tests.integration.conftest import SIMULATED_FLAGS
from tests.support.fleet import ROOT, Fleet
from tests.support.waiting import wait_for_async

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(180),
    pytest.mark.skipif("NODE_TESTS" not in os.environ, reason="npm and a network: make node-check"),
    pytest.mark.skipif(not (shutil.which("node") and shutil.which("npm")), reason="there is no Node.js"),
]

EXAMPLE = ROOT / "examples" / "node"
PACKAGES = ROOT / "build" / "node"
SLOW = [*SIMULATED_FLAGS, "--profile", "a100-llama-8b", "--num-gpu-blocks-override", "129", "--max-num-seqs", "8"]
"""A worker that takes a GPU's time for its steps, 12 ms, and eight requests at once: seconds for what is asked here."""

REQUESTS = 1500

BEFORE_REQUESTS_BYTES = 2000
"""What a connection says at most before the first frame of requests, which has more."""


class AcksLost(Proxy):
    """A link that keeps back what is answered from the first frame of requests on, until it is `cut_off`."""

    said_bytes = 0
    over = False

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, gates: Sequence[asyncio.Event]
    ) -> None:
        asks = self._answering not in gates
        read = source.read

        async def counted(n: int = -1) -> bytes:
            data = await read(n)
            self.said_bytes += len(data) if asks else 0
            if self.said_bytes > BEFORE_REQUESTS_BYTES and not self.over:
                self._answering.clear()
            return data

        source.read = counted  # type: ignore[method-assign]
        await super()._pump(source, sink, gates)

    def cut_off(self) -> None:
        """Lose what was kept back, and carry everything from now on."""
        self.over = True
        self.cut()
        self._answering.set()


class Run:
    """The example as it runs, and what it has said so far."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._said, self._errors = bytearray(), bytearray()
        assert process.stdout is not None
        assert process.stderr is not None
        self._reading = asyncio.gather(self._read(process.stdout, self._said), self._read(process.stderr, self._errors))

    async def _read(self, stream: asyncio.StreamReader, into: bytearray) -> None:
        while part := await stream.read(65536):
            into += part

    @property
    def said(self) -> str:
        return self._said.decode()

    @property
    def errors(self) -> str:
        return self._errors.decode()

    @property
    def results(self) -> int:
        return self.said.count("OUTCOME_COMPLETED\t")

    async def until(self, there: Callable[[], Awaitable[bool]], what: str) -> None:
        async def there_or_over() -> bool:
            return self.process.returncode is not None or await there()

        await wait_for_async(there_or_over, what)
        assert self.process.returncode is None, self.said + self.errors

    async def end(self) -> int:
        await self._reading
        return await self.process.wait()


@pytest.fixture(scope="module")
def packages() -> Path:
    PACKAGES.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(EXAMPLE / name, PACKAGES)
    subprocess.run(["npm", "ci", "--silent", "--no-audit", "--no-fund"], cwd=PACKAGES, check=True)
    return PACKAGES / "node_modules"


@asynccontextmanager
async def running(packages: Path, *arguments: str) -> AsyncIterator[Run]:
    environment = {**os.environ, "NODE_PATH": str(packages)}
    command = ["node", str(EXAMPLE / "client.js"), *arguments]
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=PIPE, stderr=PIPE)
    try:
        yield Run(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def stored(fleet: Fleet) -> int:
    """Return how many requests the queue has, waiting, running or ended."""
    async with Client(fleet.queue.address) as client:
        stats = await client.stats()
    return int(stats.results + sum(channel.ready + channel.leased for channel in stats.channels))


async def test_all_is_answered_once_though_the_queue_is_killed_under_every_stream(
    packages: Path, make_fleet: Callable[..., Fleet]
) -> None:
    fleet = make_fleet(queue_flags=["--worker-grace-s", "0.5"])
    link = AcksLost("queue", fleet.queue.address)
    await link.start()

    async def some_stored() -> bool:
        return await stored(fleet) > 0

    async def some_of_the_story() -> bool:
        return run.said.startswith("submitted") and run.said.count(" ") > 10

    async def some_results() -> bool:
        return run.results > REQUESTS // 10

    async def away() -> bool:
        return run.errors.startswith("submit: ")

    async def start_again() -> None:
        fleet.queue.kill()
        await asyncio.to_thread(fleet.queue.start)

    fleet.queue.kill()
    async with running(packages, link.address, str(REQUESTS)) as run:
        await run.until(away, "the client to see that nobody is there")
        await asyncio.to_thread(fleet.queue.start)

        await run.until(some_stored, "requests that are stored and not acked")
        fleet.queue.kill()
        link.cut_off()
        await asyncio.to_thread(fleet.queue.start)

        await asyncio.to_thread(fleet.add_worker, "w1", SLOW)
        await run.until(some_of_the_story, "some of the story")
        assert not run.results
        await start_again()

        await run.until(some_results, "some results")
        assert run.results < REQUESTS
        await start_again()
        assert await run.end() == 0, run.errors
    await link.close()

    assert {line.partition(":")[0] for line in run.errors.splitlines()} == {"submit", "follow", "watch"}
    assert await stored(fleet) == REQUESTS + 1, "submitted once, however often it was sent"
    first, *lines = run.said.splitlines()
    rows = [line.split("\t") for line in lines if "\t" in line]
    assert sorted(int(row[0]) for row in rows) == list(range(REQUESTS))
    assert {row[1] for row in rows} == {"OUTCOME_COMPLETED"}
    story = lines[lines.index("OUTCOME_COMPLETED") - 1]
    async with Client(fleet.queue.address) as client:
        result = await client.result(first.rpartition(" ")[2])
    assert result.outcome is Outcome.COMPLETED
    assert story.removeprefix("(again) ") == result.text
