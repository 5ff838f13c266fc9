"""A run ends when the results it waits for are gone from the queue, and not while one may come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.queue.v1 import queue_pb2 as pb
from penstock.request.v1 import request_pb2
from tests.support.batch_lines import mixed
from tests.support.fake_queue import FakeQueue
from tests.unit.batch.test_runner import Bench

AT_ONCE_S = 0.01


async def submitted(bench: Bench, lines: int) -> None:
    async with asyncio.timeout(20), bench.queue.changed:
        await bench.queue.changed.wait_for(lambda: len(bench.queue.requests) == lines)


def looks(bench: Bench) -> int:
    return sum(watch.until_now for watch in bench.queue.watches)


async def test_results_that_are_gone_end_the_run_and_the_next_one_runs_their_lines_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, mixed(30))
    bench.queue.paused = True
    run = asyncio.create_task(bench.run(look_every_s=AT_ONCE_S))
    await submitted(bench, 30)
    for request in bench.queue.requests[:10]:
        await bench.queue.finish(request)
    async with asyncio.timeout(20):
        while bench.observer.answered < 10:
            await asyncio.sleep(0)
    bench.queue.requests.clear()
    bench.queue.by_key.clear()
    with pytest.raises(penstock.NotFound, match=r"no result any more of 20 of 30 lines.* without --fresh runs"):
        async with asyncio.timeout(20):
            await run
    assert not bench.output.exists()
    bench.queue.paused = False
    await bench.run()
    assert [a["custom_id"] for a in bench.answers()] == [f"line-{i}" for i in range(30)]
    assert len(bench.queue.requests) == 20, "only the lines without an answer"


async def test_what_still_waits_is_waited_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path, mixed(3))
    bench.queue.paused = True
    run = asyncio.create_task(bench.run(look_every_s=AT_ONCE_S))
    await submitted(bench, 3)
    async with asyncio.timeout(20):
        while looks(bench) < 5:
            await asyncio.sleep(0)
    await bench.queue.finish_all()
    await run
    assert len(bench.answers()) == 3


class Late(FakeQueue):
    """Has nothing of the batch any more when it is asked first, and the results on their way when it is asked again."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = True
        self.on_their_way: list[request_pb2.Request] = []

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchResponse]:
        if request.until_now:
            for one in self.on_their_way:
                await self.finish(one)
            self.on_their_way, self.requests = self.requests, []
        async for response in super().Watch(request, context):
            yield response


async def test_results_on_their_way_are_waited_for_though_the_queue_has_them_no_more(tmp_path: Path) -> None:
    bench = Bench(tmp_path, mixed(3))
    bench.queue = Late()
    await bench.run(look_every_s=AT_ONCE_S)
    assert len(bench.answers()) == 3
