"""Power goes between the write of a group commit and its sync: what was acked is there, and nothing else is claimed."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock as public
from tests.support.fleet import Fleet, Service

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

SOURCE = Path(__file__).parents[1] / "support" / "power_loss.c"
REQUESTS = 200
AT_ONCE = 8
WRITTEN = ("*.log", "*.sst", "*.blob", "MANIFEST-*")
"""Files that RocksDB writes and syncs."""


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler: nothing can stand between the queue and its disk")
    library = tmp_path_factory.mktemp("power") / "power_loss.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    return library


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


def cut_to_synced(log: Path, directory: Path) -> int:
    """Cut RocksDB's logs, tables and MANIFESTs to what has been synced of each; return how many bytes that lost.

    What notes how much is synced stays as the kernel has it: as far ahead as it can be.
    """
    synced = {path: 0 for pattern in WRITTEN for path in directory.glob(pattern)}
    for line in log.read_text().splitlines():
        size, path = line.split(" ", maxsplit=1)
        if Path(path) in synced:
            synced[Path(path)] = max(synced[Path(path)], int(size))
    lost = 0
    for name, reached in synced.items():
        size_bytes = name.stat().st_size
        lost += max(size_bytes - reached, 0)
        os.truncate(name, min(reached, size_bytes))
    return lost


async def submit_all(queue: Service) -> set[int]:
    """Submit until the queue is gone; return the numbers that were acked."""
    acked: set[int] = set()
    waiting = iter(range(REQUESTS))

    async def one_after_the_other(client: public.Client) -> None:
        for number in waiting:
            await client.submit(prompt="x" * 500, idempotency_key=str(number), batch="power")
            acked.add(number)
            if len(acked) == AT_ONCE:  # a backup has the MANIFEST name new tables, and the log go
                await client.backup("meanwhile")

    async with public.Client(queue.address, retry_for_s=0) as client:
        await asyncio.gather(*(one_after_the_other(client) for _ in range(AT_ONCE)), return_exceptions=True)
    return acked


@pytest.mark.parametrize("at_sync", [4, 12, 20])
async def test_what_was_acked_survives_power_loss_right_before_a_sync(
    fleet: Fleet, preloaded: Path, tmp_path: Path, at_sync: int
) -> None:
    data, log = tmp_path / "queue", tmp_path / "synced"
    environment = {"LD_PRELOAD": str(preloaded), "POWER_LOSS_LOG": str(log), "POWER_LOSS_AT": str(at_sync)}
    flags = ["--data-dir", str(data)]
    queue = fleet.add("queue", flags, environment)
    queue.start()
    acked = await submit_all(queue)
    if queue.running:
        queue.kill()
    assert acked, "the first commits were synced"
    assert len(acked) < REQUESTS, "the power went meanwhile"
    assert cut_to_synced(log, data) > 0, "something had been written that was not synced"

    after = fleet.add("queue", flags)
    after.start()
    async with public.Client(after.address) as client:
        for number in sorted(acked):
            info = await client.get(idempotency_key=str(number))
            assert info.request_id, f"request {number} was acked and is lost"
        for number in range(REQUESTS):
            await client.submit(prompt="x" * 500, idempotency_key=str(number), batch="power")
        channels = (await client.stats()).channels
        assert sum(channel.ready for channel in channels) == REQUESTS, "each is there once"
