"""An iteration that was cut off or failed says so to whoever asks it for more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import pytest

import penstock
from penstock.fields import RequestFields
from penstock.iteration import Iteration
from tests.support.fake_queue import FakeQueue, serving
from tests.support.waiting import wait_for_async


@pytest.fixture
def queue() -> FakeQueue:
    return FakeQueue()


@pytest.fixture
async def client(queue: FakeQueue) -> AsyncIterator[penstock.Client]:
    async with serving(queue) as address, penstock.Client(address, retry_for_s=5) as client:
        yield client


async def one_and_no_more() -> AsyncIterator[RequestFields]:
    yield {"prompt": "a"}
    await asyncio.Event().wait()


STEPS: dict[str, Callable[[penstock.Client], AsyncGenerator[Any, None]]] = {
    "watch": lambda client: client.watch("b"),
    "events": lambda client: client.events("b"),
    "tokens": lambda client: client.tokens("r-0"),
    "submit_many": lambda client: client.submit_many(one_and_no_more()),
}


@pytest.mark.parametrize("kind", STEPS)
async def test_after_a_step_was_cancelled_it_does_not_look_as_if_all_had_come(
    client: penstock.Client, queue: FakeQueue, kind: str
) -> None:
    queue.paused = True
    await client.submit(prompt="a", batch="b")
    steps = STEPS[kind](client)
    if kind == "submit_many":
        await anext(steps)
    late = asyncio.ensure_future(anext(steps))
    await asyncio.sleep(0)  # what is cancelled before it begins ends nothing

    async def is_asked() -> bool:
        return bool(kind == "submit_many" or queue.watches or queue.followed)

    await wait_for_async(is_asked, "the step to wait for the queue")
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    for _ in range(2):
        with pytest.raises(penstock.PenstockError, match="not all has come"):
            await anext(steps)
    await steps.aclose()


async def test_a_step_that_is_kept_goes_on(client: penstock.Client, queue: FakeQueue) -> None:
    """As docs/client.md has it."""
    queue.paused = True
    await client.submit(prompt="a", batch="b")
    results = client.watch("b")
    step = asyncio.ensure_future(anext(results))
    done, _ = await asyncio.wait({step}, timeout=0.01)
    assert not done
    await queue.finish_all()
    assert (await step).text == "A"
    with pytest.raises(StopAsyncIteration):
        await anext(results)


async def test_after_a_failure_it_fails_again() -> None:
    async with penstock.Client("127.0.0.1:1", retry_for_s=0) as client:
        results = client.watch("b")
        for _ in range(2):
            with pytest.raises(penstock.Unavailable, match="nothing answers"):
                await anext(results)
        letters = client.dead_letters()
        for _ in range(2):
            with pytest.raises(penstock.Unavailable, match="nothing answers"):
                await anext(letters)


async def test_one_that_was_closed_is_over(client: penstock.Client) -> None:
    await client.generate(prompt="a", batch="b")
    async with aclosing(client.watch("b", follow=True)) as results:
        assert (await anext(results)).text == "A"
    with pytest.raises(StopAsyncIteration):
        await anext(results)


async def test_who_asks_beside_another_ends_nothing() -> None:
    go_on = asyncio.Event()

    async def items() -> AsyncGenerator[int, None]:
        await go_on.wait()
        yield 1
        yield 2

    iteration = Iteration(items())
    first = asyncio.ensure_future(anext(iteration))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="already running"):
        await anext(iteration)
    go_on.set()
    assert [await first, await anext(iteration)] == [1, 2]
