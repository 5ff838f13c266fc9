"""The rows of the failure table that a kill -9 can show, on real processes.

The engine is simulated: what is tested is the bookkeeping between the processes. Real vLLM workers are
killed in test_worker_death.py and test_resume.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

import penstock as public
from penstock.exits import EX_SOFTWARE
from tests.integration.conftest import SIMULATED_FLAGS
from tests.support.fleet import Fleet, penstock
from tests.support.waiting import wait_for, wait_for_async

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

REQUESTS = 150


def status(fleet: Fleet) -> dict[str, Any]:
    """Return the scheduler's and the queue's status, as the command prints it."""
    shown = penstock("status", "--json", "--queue", fleet.queue.address, "--scheduler", fleet.scheduler.address)
    assert shown.returncode == 0, shown.stderr
    return dict(json.loads(shown.stdout))


async def run_through(fleet: Fleet, blow: Callable[[], None], after: int) -> dict[str, public.Result]:
    """Submit requests, strike once `after` of them have ended, and return every result by client reference."""
    results: dict[str, public.Result] = {}
    async with public.Client(fleet.queue.address, retry_for_s=60) as client:
        for i in range(REQUESTS):
            await client.submit(
                prompt=f"request number {i}", max_tokens=40, batch="crash", channel="batch",
                idempotency_key=f"k{i}", client_reference=str(i),
            )  # fmt: skip
        struck = False
        async for result in client.watch(batch="crash"):
            assert result.client_reference not in results, "one result per request"
            results[result.client_reference] = result
            if len(results) >= after and not struck:
                struck = True
                await asyncio.to_thread(blow)
            if len(results) == REQUESTS:
                break
    return results


@pytest.mark.parametrize("victim", ["queue", "scheduler", "worker-w1"])
async def test_kill_9_loses_nothing_and_repeats_nothing(make_fleet: Callable[..., Fleet], victim: str) -> None:
    fleet = make_fleet(queue_flags=["--worker-grace-s", "0.5"])
    fleet.add_worker("w1", SIMULATED_FLAGS)
    fleet.add_worker("w2", SIMULATED_FLAGS)

    def blow() -> None:
        fleet.services[victim].kill()
        fleet.services[victim].start()

    results = await run_through(fleet, blow, after=REQUESTS // 5)
    assert len(results) == REQUESTS
    assert {result.outcome for result in results.values()} == {public.Outcome.COMPLETED}, fleet.logs()

    async def credits_home() -> bool:
        now = await asyncio.to_thread(status, fleet)
        workers = now["scheduler"]["workers"]
        return bool(workers) and all(w["free_blocks"] == w["capacity_blocks"] for w in workers)

    await wait_for_async(credits_home, "every credit to come home")
    assert int(status(fleet)["scheduler"].get("audit_violations", 0)) == 0


async def test_a_second_worker_of_one_name_takes_nothing_from_the_first_and_follows_it(
    make_fleet: Callable[..., Fleet],
) -> None:
    fleet = make_fleet(queue_flags=["--worker-grace-s", "0.5"])
    first = fleet.add_worker("w1", SIMULATED_FLAGS)
    addresses = ["--queue-address", fleet.queue.address, "--scheduler-address", fleet.scheduler.address]
    second = fleet.add("worker-twin", ["--worker-id", "w1", *addresses, *SIMULATED_FLAGS])
    second.start()

    def blow() -> None:
        wait_for(lambda: "another instance of 'w1' is connected" in second.log(), "the second one to be refused")
        first.kill()

    results = await run_through(fleet, blow, after=REQUESTS // 2)
    assert {result.outcome for result in results.values()} == {public.Outcome.COMPLETED}, fleet.logs()
    # In the order in which they ended: only what the first one ran when it was killed was tried again.
    attempts = [result.attempts for result in results.values()]
    assert set(attempts[: REQUESTS // 2]) == {1}
    assert set(attempts) <= {1, 2}


async def test_power_cuts_cost_no_attempt(make_fleet: Callable[..., Fleet]) -> None:
    """All processes die in one instant, more often than there are attempts, with the same requests running."""
    fleet = make_fleet(queue_flags=["--max-attempts", "2"])
    worker = fleet.add_worker("w1", [*SIMULATED_FLAGS, "--profile", "h100-llama-8b"])
    async with public.Client(fleet.queue.address, retry_for_s=60) as client:
        names = [await client.submit(prompt=f"long {i}", max_tokens=1500, ignore_eos=True) for i in range(3)]

        async def all_run() -> bool:
            return all([(await client.get(name)).state is public.RequestState.LEASED for name in names])

        for life in range(3):
            await wait_for_async(all_run, "all of them to run")
            for service in fleet.services.values():
                os.kill(service.pid, signal.SIGKILL)
            for service in fleet.services.values():
                service.kill()
            if life == 2:
                worker.command = [*worker.command, "--profile", "instant"]  # let them finish
            for service in fleet.services.values():
                service.start()
        results = [await client.result(name) for name in names]
    assert [(result.outcome, result.attempts) for result in results] == [(public.Outcome.COMPLETED, 1)] * 3


async def test_a_request_that_its_engine_dies_of_takes_nobody_along(make_fleet: Callable[..., Fleet]) -> None:
    """All run in one engine each time that it dies, until they are on their last attempt."""
    fleet = make_fleet(queue_flags=["--worker-grace-s", "0.5"])
    worker = fleet.add_worker("w1", [*SIMULATED_FLAGS, "--profile", "h100-llama-8b"])
    async with public.Client(fleet.queue.address, retry_for_s=60) as client:
        deadly = {"sim_engine_dies_at_tokens": 40}
        names = [await client.submit(prompt=f"p {i}", max_tokens=150, ignore_eos=True) for i in range(2)]
        poison = await client.submit(prompt="p", max_tokens=150, ignore_eos=True, extra_args=deadly)
        names += [await client.submit(prompt=f"q {i}", max_tokens=150, ignore_eos=True) for i in range(2)]
        for _ in range(3):
            assert await asyncio.to_thread(worker.wait_exit) == EX_SOFTWARE, worker.log()[-2000:]
            worker.start()
        others = [await client.result(name) for name in names]
        result = await client.result(poison)
    assert (result.outcome, result.attempts) == (public.Outcome.DEAD, 3)
    assert {other.outcome for other in others} == {public.Outcome.COMPLETED}, fleet.logs()
    assert {other.attempts for other in others} <= {2, 3}


async def test_sigterm_drains_and_exits_0(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet()
    worker = fleet.add_worker("w1", SIMULATED_FLAGS)
    async with public.Client(fleet.queue.address) as client:
        await client.generate(prompt="warm", max_tokens=4)
    assert worker.stop() == 0
    assert fleet.scheduler.stop() == 0
    assert fleet.queue.stop() == 0
