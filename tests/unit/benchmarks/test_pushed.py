"""The clients that pull by themselves from a plain vLLM: whom they let in, and when."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from benchmarks.admission.pushed import Client, Order, Window
from benchmarks.admission.windows import ADAPTIVE, EVERYBODY, LIVE, WHOLE_WINDOWS

BLOCKS, BLOCK_SIZE, WINDOW_TOKENS = 64, 16, 256


def window(lets_in: str) -> tuple[Window, Any]:
    """Return the window of an order, and the usage that it looks at or hears of: four whole windows fit the cache."""
    cache = SimpleNamespace(num_gpu_blocks=BLOCKS + 1, block_size=BLOCK_SIZE)
    config = SimpleNamespace(cache_config=cache, model_config=SimpleNamespace(max_model_len=WINDOW_TOKENS))
    latest = SimpleNamespace(preemptions=0, listen=None)
    client = Client(SimpleNamespace(vllm_config=config), SimpleNamespace(latest=latest))
    return client.window(Order("", [], lets_in, BLOCKS * BLOCK_SIZE // WINDOW_TOKENS)), latest


class Requests:
    """Twenty requests before a window, in order."""

    def __init__(self, window: Window) -> None:
        self.inside: list[int] = []
        self._tasks = [asyncio.create_task(self._enter(window, number)) for number in range(20)]

    async def _enter(self, window: Window, number: int) -> None:
        await window.enter()
        self.inside.append(number)

    async def let_in(self) -> list[int]:
        """Return who is in once everybody has had his turn: twice, as who is let in wakes up after that."""
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return self.inside

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def test_everybody_or_as_many_as_whole_windows_fit_the_empty_cache() -> None:
    for lets_in, places in ((EVERYBODY, 20), (WHOLE_WINDOWS, 4)):
        made, latest = window(lets_in)
        requests = Requests(made)
        assert await requests.let_in() == list(range(places))
        assert latest.listen is None
        await requests.end()


async def test_a_place_that_is_left_goes_to_who_has_waited_longest() -> None:
    made, _ = window(WHOLE_WINDOWS)
    requests = Requests(made)
    await requests.let_in()
    made.leave()
    assert await requests.let_in() == [0, 1, 2, 3, 4]
    await requests.end()


async def test_an_adaptive_window_grows_by_answers_and_is_halved_by_a_preemption() -> None:
    made, latest = window(ADAPTIVE)
    requests = Requests(made)
    assert len(await requests.let_in()) == 4
    made.leave()
    assert len(await requests.let_in()) == 6
    latest.preemptions = 1
    made.leave()
    assert len(await requests.let_in()) == 6
    await requests.end()


async def test_a_live_window_sets_a_whole_window_aside_for_who_does_not_run_yet() -> None:
    made, latest = window(LIVE)
    requests = Requests(made)
    assert len(await requests.let_in()) == 4  # the cache is empty
    latest.listen(0.1, 2, 0)  # three whole windows are free beside two that run: one more than the two on their way
    assert len(await requests.let_in()) == 5
    latest.listen(0.2, 5, 0)  # three, and nobody is on the way
    assert len(await requests.let_in()) == 8
    latest.listen(0.76, 8, 0)  # not one is
    assert len(await requests.let_in()) == 8
    made.leave()  # the engine has not said yet what is free since
    assert len(await requests.let_in()) == 8
    latest.listen(0.76, 7, 1)
    assert len(await requests.let_in()) == 8
    latest.listen(0.75, 7, 0)
    assert len(await requests.let_in()) == 9
    await requests.end()


async def test_one_may_always_be_inside() -> None:
    made, latest = window(LIVE)
    latest.listen(0.9, 0, 0)
    requests = Requests(made)
    assert await requests.let_in() == [0]
    latest.listen(0.9, 0, 1)
    assert await requests.let_in() == [0, 1]
    await requests.end()
