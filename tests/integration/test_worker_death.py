"""A real vLLM worker that is killed, or whose engine hangs: no orphan, and its next life answers its requests."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

import penstock as public
from penstock.exits import EX_SOFTWARE
from services.worker.engine import ENGINE_END_S
from tests.integration.conftest import SIMULATED_FLAGS
from tests.support.fleet import Fleet, alive, descendants
from tests.support.waiting import wait_for, wait_for_async

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(240)]

REQUESTS = 20
"""All of them fit the KV cache together (some 82 of 128 blocks), so that none waits for another."""


def none_alive(pids: set[int]) -> bool:
    """Whether all of these processes are gone."""
    return not any(alive(pid) for pid in pids)


def core_of(family: set[int]) -> set[int]:
    """The engine core's process among these."""
    found = set()
    for pid in family:
        with suppress(OSError):
            if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found


def tell(pids: set[int], number: signal.Signals) -> None:
    """Send a signal to each of these processes that is still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


async def ask(client: public.Client, number: int) -> str:
    """Submit one of the requests, and return its id; they are of different lengths, so that some are first."""
    prompt, tokens, reference = f"request number {number}", 20 + 8 * number, str(number)
    return await client.submit(prompt=prompt, max_tokens=tokens, ignore_eos=True, batch="b", client_reference=reference)


async def leased(client: public.Client, request_id: str) -> bool:
    """Whether a worker has taken the request."""
    return (await client.get(request_id)).state is public.RequestState.LEASED


@pytest.mark.long
async def test_a_worker_whose_engine_hangs_ends_and_its_next_life_answers(
    make_fleet: Callable[..., Fleet], engine_flags: list[str]
) -> None:
    """A core that is stopped stands for one whose kernel never returns: its process lives, and answers nothing."""
    fleet = make_fleet()
    worker = fleet.add_worker("w1", [*engine_flags, "--engine-stall-s", "3"])
    async with public.Client(fleet.queue.address, retry_for_s=60) as client:
        await client.generate(prompt="before", max_tokens=4)
        family = descendants(worker.pid)
        core = core_of(family)
        tell(core, signal.SIGSTOP)
        hung = await client.submit(prompt="in the engine", max_tokens=4)
        status = await asyncio.to_thread(worker.wait_exit)
        assert (len(core), status) == (1, EX_SOFTWARE), worker.log()[-2000:]
        assert "the engine has made no step for 3 s" in worker.log()
        wait_for(partial(none_alive, family), "the engine to end with its worker")
        worker.start()
        result = await client.result(hung)
    assert (result.outcome, result.attempts) == (public.Outcome.COMPLETED, 2)


@pytest.mark.long
async def test_a_worker_whose_engine_hangs_ends_by_sigterm_as_any_other(
    make_fleet: Callable[..., Fleet], engine_flags: list[str]
) -> None:
    """Who cannot wait for the watchdog is told so, and to wait END_S beyond the grace: vLLM alone takes 5 s."""
    grace_s = 1.0
    fleet = make_fleet()
    worker = fleet.add_worker("w1", [*engine_flags, "--shutdown-grace-s", str(grace_s)])
    async with public.Client(fleet.queue.address, retry_for_s=60) as client:
        family = descendants(worker.pid)
        tell(core_of(family), signal.SIGSTOP)
        hung = await client.submit(prompt="in the engine", max_tokens=4)
        await wait_for_async(partial(leased, client, hung), "a request to be running")
        began_s = time.monotonic()
        assert await asyncio.to_thread(worker.stop, 60) == 0, worker.log()[-2000:]
        assert time.monotonic() - began_s < grace_s + ENGINE_END_S
        wait_for(partial(none_alive, family), "the engine to end with its worker")
        worker.command = [*worker.command[: -len(engine_flags) - 2], *SIMULATED_FLAGS]  # which starts sooner
        worker.start()
        result = await client.result(hung)
    assert (result.outcome, result.attempts) == (public.Outcome.COMPLETED, 1), "it was handed back"


@pytest.mark.long
def test_a_worker_whose_engine_is_killed_while_it_loads_says_so(
    make_fleet: Callable[..., Fleet], engine_flags: list[str]
) -> None:
    """As the kernel does where the weights do not fit the machine's memory: nothing else has a line for it."""
    worker = make_fleet().add_worker("w1", engine_flags, wait=False)
    wait_for(lambda: core_of(descendants(worker.pid)), "the engine core's process")
    tell(core_of(descendants(worker.pid)), signal.SIGKILL)
    assert worker.wait_exit() == EX_SOFTWARE
    assert "the engine did not start: the engine core ended (signal 9)" in worker.log()


async def test_a_killed_worker_leaves_no_orphan_and_loses_nothing(
    make_fleet: Callable[..., Fleet], engine_flags: list[str]
) -> None:
    fleet = make_fleet(queue_flags=["--worker-grace-s", "0.5"])
    worker = fleet.add_worker("w1", engine_flags)
    async with public.Client(fleet.queue.address, retry_for_s=60) as client:
        for i in range(REQUESTS - 1):
            await ask(client, i)
        seen: dict[str, public.Result] = {}
        async for result in client.watch(batch="b"):
            assert result.client_reference not in seen
            seen[result.client_reference] = result
            if len(seen) == 5:
                family = descendants(worker.pid)
                assert family, "the engine core is a process of its own"
                # What comes to an engine that stands still does not end before its worker is killed.
                tell(family, signal.SIGSTOP)
                last = await ask(client, REQUESTS - 1)
                await wait_for_async(partial(leased, client, last), "a request to be running")
                worker.kill()
                tell(family, signal.SIGCONT)
                wait_for(partial(none_alive, family), "the engine to die with its worker")
                worker.command = [*worker.command[: -len(engine_flags)], *SIMULATED_FLAGS]  # which starts sooner
                worker.start()
            if len(seen) == REQUESTS:
                break
    assert {result.outcome for result in seen.values()} == {public.Outcome.COMPLETED}
    assert max(result.attempts for result in seen.values()) == 2, "some request was running when the worker died"
