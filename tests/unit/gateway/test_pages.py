"""Downloads whose clients take nothing keep no page that others wait for, and go on from where they stood."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from penstock.limits import PART_BYTES
from penstock.request.v1.request_pb2 import Result
from services.gateway.batch import looks
from services.gateway.batch.looks import looked_up
from services.gateway.batch.output import Output
from services.gateway.core.batch import Counts, Status
from services.gateway.limits import TELLING
from services.gateway.pages import PIECE_BYTES, PLACE_BYTES, HalfToldError, Paged, Pages, Sheet, content_of
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


class Results:
    """Lines to be read, all in a page."""

    def __init__(self, *lines: bytes, size_bytes: int = PLACE_BYTES) -> None:
        self.lines = list(lines)
        self.size_bytes = size_bytes
        self.reads: list[int] = []

    async def read(self, first: int) -> Sheet[bytes]:
        self.reads.append(first)
        items = list(enumerate(self.lines, 1))[first:]
        return Sheet(items, len(self.lines), self.size_bytes, last=True)


async def told(
    read: Callable[[int], Awaitable[Sheet[bytes]]], pages: Pages, held: list[Paged[bytes]] | None = None
) -> AsyncGenerator[bytes, None]:
    with Paged(pages, "acme", read, PLACE_BYTES) as page:
        if held is not None:
            held.append(page)
        while await page.turn():
            async for piece in page.pieces(lambda line: (line,), 2 * len(page.one)):  # the large ones beside the loop
                yield piece


LARGE = bytes(range(256)) * (3 * PIECE_BYTES // 256) + b"rest"


async def _all(pieces: AsyncGenerator[bytes, None]) -> list[bytes]:
    return [piece async for piece in pieces]


async def test_a_page_that_others_wait_for_is_read_again_for_a_slow_client() -> None:
    content = bytes(range(256)) * (2 * PART_BYTES // 256) + b"rest"
    shelf: Any = Counted(content)
    pages = Pages(1, 0.0)
    slow = content_of(shelf, pages, "acme", "file-1")
    first = await anext(slow)
    assert (len(first), shelf.offsets) == (PIECE_BYTES, [0])
    async with asyncio.timeout(30):
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


async def test_a_line_that_was_let_go_in_its_midst_is_told_to_its_end() -> None:
    pages, results = Pages(1, 0.0), Results(b"first", LARGE, b"last")
    slow = told(results.read, pages)
    begun = [await anext(slow) for _ in range(3)]
    assert begun == [b"first", LARGE[:PIECE_BYTES], LARGE[PIECE_BYTES : 2 * PIECE_BYTES]]
    async with asyncio.timeout(30):
        whole = await _all(told(Results(b"other").read, pages))
        rest = await _all(slow)
    assert whole == [b"other"]
    assert b"".join(begun + rest) == b"first" + LARGE + b"last"
    assert results.reads == [0, 1]


@pytest.mark.parametrize("after", [[b"first", LARGE[:-1] + b"!"], [b"first"]], ids=["another", "none"])
async def test_a_line_that_was_let_go_and_is_another_is_not_told_to_its_end(after: list[bytes]) -> None:
    pages, results = Pages(1, 0.0), Results(b"first", LARGE)
    slow = told(results.read, pages)
    assert (await anext(slow), len(await anext(slow))) == (b"first", PIECE_BYTES)
    async with asyncio.timeout(30):
        await _all(told(Results(b"other").read, pages))
        results.lines = after
        with pytest.raises(HalfToldError):
            await anext(slow)


async def test_downloads_that_nobody_takes_hold_no_more_than_there_is_room_for() -> None:
    """Each page takes more than was expected, and all of them many times what there is room for."""
    pages = Pages(8, 0.0)
    results = [Results(LARGE, size_bytes=3 * PLACE_BYTES) for _ in range(20)]
    held: list[Paged[bytes]] = []
    downloads = [told(one.read, pages, held) for one in results]
    async with asyncio.timeout(30):
        begun = [await anext(slow) for slow in downloads]
        assert len(held) == 20
        assert sum(bool(page._line) for page in held) == 2, "as many as there is room for"
        rests = [b"".join(await _all(slow)) for slow in downloads]
    assert [one + rest for one, rest in zip(begun, rests, strict=True)] == [LARGE] * 20
    assert results[0].reads[:2] == [0, 0], "read again when there was room for it"
    assert pages._free == pages.most


async def test_who_waits_for_room_holds_nothing_of_the_page_before() -> None:
    """Each line is a page, and all are told at full speed: who has told one waits for room for the next."""

    def pages_of_one(one: Results) -> Callable[[int], Awaitable[Sheet[bytes]]]:
        async def read(first: int) -> Sheet[bytes]:
            await asyncio.sleep(0)
            return Sheet([(first + 1, LARGE)], first + 1, one.size_bytes, last=first == 3)

        return read

    async def watched(download: AsyncGenerator[bytes, None]) -> bytes:
        whole = b""
        async for piece in download:
            whole += piece
            assert not [page for page in held if not page._had and (page._one or page._line)]
        return whole

    pages, held = Pages(8, 60.0), list[Paged[bytes]]()
    reads = [pages_of_one(Results(size_bytes=4 * PLACE_BYTES)) for _ in range(6)]
    async with asyncio.timeout(30):
        wholes = await asyncio.gather(*(watched(told(read, pages, held)) for read in reads))
    assert wholes == [4 * LARGE] * 6


async def test_a_page_that_takes_all_there_is_room_for_is_not_passed_for_ever() -> None:
    pages = Pages(4, 60.0)
    large = Paged(pages, "acme", Results().read, 9 * PLACE_BYTES)
    small = [Paged(pages, tenant, Results().read, PLACE_BYTES) for tenant in "abc"]
    await small[0].take()
    waiting = asyncio.create_task(large.take(9))
    await asyncio.sleep(0)
    others = [asyncio.create_task(one.take()) for one in small[1:]]
    await asyncio.sleep(0)
    assert not any(other.done() for other in others)
    small[0].give()
    async with asyncio.timeout(30):
        await waiting
        assert pages._free == 0
        large.give()
        await asyncio.gather(*others)
    assert pages._free == 2


async def _asked(pages: Pages, tenant: str, places: int) -> tuple[Paged[bytes], asyncio.Task[None]]:
    page = Paged(pages, tenant, Results().read, PLACE_BYTES)
    taking = asyncio.create_task(page.take(places))
    await asyncio.sleep(0)
    return page, taking


async def test_those_who_have_less_pass_who_has_much_and_waits_for_more() -> None:
    pages = Pages(16, 60.0)
    large, has_much = await _asked(pages, "much", 12)
    _, more = await _asked(pages, "much", 8)
    _, passes = await _asked(pages, "little", 2)
    assert (has_much.done(), more.done(), passes.done()) == (True, False, True)
    large.give()
    async with asyncio.timeout(30):
        await more
        await _asked(pages, "little", 4)
    assert pages._free == 2


async def test_who_waits_for_much_is_not_passed_for_ever() -> None:
    """Others take a place again and again, as many as they may, while it waits."""
    pages = Pages(16, 60.0)
    had = [await _asked(pages, "abc"[number % 3], 1) for number in range(12)]
    _, waiting = await _asked(pages, "large", 10)
    turns = 0
    async with asyncio.timeout(30):
        while not waiting.done():
            turns += 1
            page, taking = had.pop(0)
            await taking
            page.give()
            had.append(await _asked(pages, page.tenant, 1))
    assert 6 <= turns <= 12
    assert [taking.done() for _, taking in had].count(True) == 6, "each other has its two places"


async def test_who_waits_for_much_and_leaves_lets_others_pass() -> None:
    pages = Pages(4, 60.0)
    first, large, small = (Paged(pages, tenant, Results().read, PLACE_BYTES) for tenant in "abc")
    await first.take()
    waiting = asyncio.create_task(large.take(4))
    await asyncio.sleep(0)
    other = asyncio.create_task(small.take())
    await asyncio.sleep(0)
    waiting.cancel()
    async with asyncio.timeout(30):
        await other


async def test_results_are_asked_for_by_their_lines_from_where_the_queue_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "PAGE_LINES", 10)
    asked: list[list[int]] = []

    async def look(lines: Sequence[int]) -> list[Result | None]:
        asked.append(list(lines))
        return [Result(worker_id="x" * 100) if line % 2 else None for line in lines[:7]]

    read = looked_up(range(20, 45), look)
    first, lines = 0, list[int]()
    while True:
        sheet = await read(first)
        lines += [19 + behind for behind, _ in sheet.items]
        assert sheet.size_bytes == TELLING * sum(result.ByteSize() for _, result in sheet.items)
        first = sheet.behind
        if sheet.last:
            break
    assert lines == list(range(21, 45, 2))
    assert [(some[0], len(some)) for some in asked] == [(20, 10), (27, 10), (34, 10), (41, 4)]


async def test_of_no_lines_nothing_is_asked() -> None:
    async def look(_lines: Sequence[int]) -> list[Result | None]:
        raise AssertionError("there is nothing to ask for")

    assert await looked_up((), look)(0) == Sheet([], 0, 0, last=True)
