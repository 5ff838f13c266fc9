"""Two schedulers at one queue: both whole but for their workers' streams, and the queue with a store in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
from prometheus_client import CollectorRegistry

from penstock.scheduler.v1 import scheduler_pb2
from penstock.tls import Access
from services.scheduler.links import BacklogLink
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.runner import Runner
from services.scheduler.service import make_runner
from services.scheduler.settings import SchedulerSettings
from services.telemetry import Telemetry
from tests.support.fake_peers import until
from tests.support.serving import Peer, serving, text

STANDS_BY = "this one stands by"


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    async with serving(Telemetry(None)) as peer:
        yield peer


@asynccontextmanager
async def scheduler(peer: Peer) -> AsyncIterator[Runner]:
    """Run one that asks this queue."""
    runner = make_runner(SchedulerSettings(epoch_grace_s=0), Telemetry(None), SchedulerMetrics(CollectorRegistry()))
    link = BacklogLink(f"127.0.0.1:{peer.port}", "s", runner, Access())
    tasks = [asyncio.create_task(runner.run()), asyncio.create_task(link.run())]
    try:
        yield runner
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def worker(name: str) -> scheduler_pb2.WorkerToScheduler:
    opening = scheduler_pb2.CreditsOpen(
        worker_id=name,
        instance_id="1",
        model="m",
        capacity_blocks=100,
        block_size=16,
        max_model_len=512,
        max_num_seqs=8,
        role=scheduler_pb2.WORKER_ROLE_UNIFIED,
    )
    return scheduler_pb2.WorkerToScheduler(open=opening)


def has_the_queue(runner: Runner) -> bool:
    return runner.snapshot().queue_connected


def waiting(runner: Runner) -> int:
    return sum(channel.waiting for channel in runner.snapshot().channels)


async def test_one_that_serves_nobody_leaves_the_queue_to_one_that_has_a_worker(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    async with scheduler(peer) as idle:
        await until(partial(has_the_queue, idle), "the first to be let in")
        await peer.submit(text())
        await until(lambda: waiting(idle) == 1, "it to hear what waits")
        async with scheduler(peer) as fleet:
            await until(lambda: STANDS_BY in caplog.text, "the second to stand by")
            assert not has_the_queue(fleet)
            caplog.clear()
            fleet.open_worker(worker("w"))
            await until(lambda: fleet.snapshot().grants.get("interactive"), "its worker to be granted what waits")
            await until(lambda: STANDS_BY in caplog.text, "the first to stand by")
            assert not has_the_queue(idle)
            idle.open_worker(worker("late"))
            await peer.submit(text())
            await until(lambda: fleet.snapshot().grants["interactive"] == 2, "the second to be granted")
        await until(lambda: idle.snapshot().grants.get("interactive") == 2, "the first to have both again")


async def test_one_whose_last_worker_has_gone_leaves_it_too(peer: Peer) -> None:
    async with scheduler(peer) as first, scheduler(peer) as second:
        left = first.open_worker(worker("left"))
        await until(partial(has_the_queue, first), "the one with a worker to be let in")
        second.open_worker(worker("other"))
        first.close_worker(left)
        await until(partial(has_the_queue, second), "the other one to be let in")
        assert not has_the_queue(first)
