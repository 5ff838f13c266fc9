"""Downloads whose clients take nothing keep no page that others wait for, and go on from where they stood."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from penstock.limits import PART_BYTES
from services.gateway.batch.output import Output
from services.gateway.core.batch import Counts, Status
from services.gateway.pages import PIECE_BYTES, Pages, content_of
from tests.support.waiting import wait_for_async
from tests.unit.gateway.test_drive import LINES, Rig, _true_of, rig

__all__ = ["rig"]


class Counted:
    """The part of a shelf that reads, a part at a time."""

    def __init__(self, content: bytes) -> None:
        self.content_bytes = content
        self.offsets: list[int] = []

    async def content(self, _file_id: str, offset: int) -> AsyncGenerator[bytes, None]:
        self.offsets.append(offset)
        yield self.content_bytes[offset : offset - offset % PART_BYTES + PART_BYTES]


async def _all(pieces: AsyncGenerator[bytes, None]) -> list[bytes]:
    return [piece async for piece in pieces]


async def test_a_page_that_others_wait_for_is_read_again_for_a_slow_client() -> None:
    content = bytes(range(256)) * (2 * PART_BYTES // 256) + b"rest"
    shelf: Any = Counted(content)
    pages = Pages(1, 0.0)
    slow = content_of(shelf, pages, "acme", "file-1")
    first = await anext(slow)
    assert (len(first), shelf.offsets) == (PIECE_BYTES, [0])
    async with asyncio.timeout(10):
        whole = b"".join(await _all(content_of(shelf, pages, "acme", "file-1")))
    rest = b"".join(await _all(slow))
    assert whole == first + rest == content
    assert shelf.offsets.count(PIECE_BYTES) == 1


async def test_a_page_that_nobody_waits_for_is_read_once_however_slow_the_client() -> None:
    shelf: Any = Counted(bytes(PART_BYTES - 1))
    pages = Pages(1, 0.0)
    async for _ in content_of(shelf, pages, "acme", "file-1"):
        await asyncio.sleep(0.001)
    assert shelf.offsets == [0, PART_BYTES - 1]


@pytest.mark.parametrize("input_order", [False, True])
async def test_slow_readers_of_results_keep_no_others_waiting(rig: Rig, input_order: bool) -> None:
    batch = await rig.batch(status=Status.IN_PROGRESS, counts=Counts(LINES))
    driving = asyncio.create_task(rig.drive(await rig.take(batch, "me")).run())
    await wait_for_async(lambda: _true_of(lambda: len(rig.keys()) == LINES), "the submission")
    await rig.client.cancel(batch=batch.batch_id)
    async with asyncio.timeout(30):
        await driving
    done, _ = await rig.records.get(batch.batch_id)
    output = Output(rig.client, rig.shelf, pages=Pages(1, 0.0))
    slow = [output.lines(done, True, input_order) for _ in range(3)]
    async with asyncio.timeout(30):
        first = [await anext(lines) for lines in slow]
        whole = await _all(output.lines(done, True, input_order))
        rests = [await _all(lines) for lines in slow]
    assert len({json.loads(line)["custom_id"] for line in whole}) == LINES
    assert [[one, *rest] for one, rest in zip(first, rests, strict=True)] == [whole] * 3
