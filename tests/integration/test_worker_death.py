"""kill -9 of a real vLLM worker: no orphan, and its requests are answered by its next life."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

import penstock as public
from tests.support.fleet import Fleet, alive, descendants
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(240)]

REQUESTS = 40


def none_alive(pids: set[int]) -> bool:
    """Whether all of these processes are gone."""
    return not any(alive(pid) for pid in pids)


async def test_a_killed_worker_leaves_no_orphan_and_loses_nothing(
    make_fleet: Callable[..., Fleet], engine_flags: list[str]
) -> None:
    fleet = make_fleet(queue_flags=["--worker-grace-s", "0.5"])
    worker = fleet.add_worker("w1", engine_flags)
    async with public.Client(fleet.queue.address, retry_for_s=60) as client:
        for i in range(REQUESTS):
            # Of different lengths, so that some still run when the first have ended.
            prompt, tokens = f"request number {i}", 20 + 8 * i
            await client.submit(prompt=prompt, max_tokens=tokens, ignore_eos=True, batch="b", client_reference=str(i))
        seen: dict[str, public.Result] = {}
        async for result in client.watch(batch="b"):
            assert result.client_reference not in seen
            seen[result.client_reference] = result
            if len(seen) == 5:
                family = descendants(worker.pid)
                assert family, "the engine core is a process of its own"
                worker.kill()
                wait_for(partial(none_alive, family), "the engine to die with its worker")
                worker.start()
            if len(seen) == REQUESTS:
                break
    assert {result.outcome for result in seen.values()} == {public.Outcome.COMPLETED}
    assert max(result.attempts for result in seen.values()) == 2, "some request was running when the worker died"
