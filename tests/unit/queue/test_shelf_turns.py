"""Tenants take turns at what content is on its way to the disk, and there is no more of it than the shelf allows."""

from __future__ import annotations

import asyncio

from penstock.limits import PART_BYTES
from services.clock import SystemClock
from services.queue.files.shelf import UNDER_WAY_BYTES, Shelf, ShelfRefusedError
from tests.support.memory_store import MemoryStore

UNDER_WAY = UNDER_WAY_BYTES // PART_BYTES
"""Parts that are let in at once."""


async def test_a_tenants_one_part_is_written_before_anothers_many() -> None:
    shelf = Shelf(MemoryStore(), SystemClock(), lambda _: None)
    made: list[str] = []

    def bring(tenant: str) -> asyncio.Task[None]:
        return asyncio.create_task(shelf.change(lambda _: made.append(tenant), tenant, PART_BYTES))

    tasks = [bring("many") for _ in range(50)]
    await asyncio.sleep(0)
    tasks.append(bring("one"))
    await asyncio.sleep(0)
    running = asyncio.create_task(shelf.run())
    await asyncio.gather(*tasks)
    shelf.stop()
    await running
    assert made == ["many"] * (UNDER_WAY + 1) + ["one"] + ["many"] * (49 - UNDER_WAY)


async def test_content_counts_until_it_is_written_though_its_caller_has_gone() -> None:
    let_in: list[bool] = []
    shelf = Shelf(MemoryStore(), SystemClock(), let_in.append)
    tasks = [asyncio.create_task(shelf.change(lambda _: None, "t", PART_BYTES)) for _ in range(50)]
    await asyncio.sleep(0)
    for task in tasks[:UNDER_WAY]:
        task.cancel()
    await asyncio.gather(*tasks[:UNDER_WAY], return_exceptions=True)
    assert len(let_in) == UNDER_WAY
    running = asyncio.create_task(shelf.run())
    await asyncio.gather(*tasks[UNDER_WAY:])
    shelf.stop()
    await running
    assert len(let_in) == 50


async def test_content_that_is_refused_or_comes_to_a_shelf_that_stops_takes_no_room() -> None:
    refusals = [ShelfRefusedError("full")] * 3
    shelf = Shelf(MemoryStore(), SystemClock(), lambda _: refusals.pop() if refusals else None)
    tasks = [asyncio.create_task(shelf.change(lambda _: None, "t", UNDER_WAY_BYTES)) for _ in range(6)]
    for _ in tasks:
        await asyncio.sleep(0)
    shelf.stop()
    await shelf.run()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(end) for end in ends] == ["full"] * 3 + ["None"] + ["the queue service is stopping"] * 2
