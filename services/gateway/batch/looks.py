"""The results of batches, looked at a page at a time: no stream is held for a batch that waits or a slow client.

A stream is one of the few that a gateway's client may have open. What is to be read of a batch is read at once, the
stream ends with it, and the next page begins after the last result's cursor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import NamedTuple

from penstock.client import Client
from penstock.limits import TARGET_FRAME_BYTES
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2 as pb
from services.gateway.limits import TELLING
from services.gateway.pages import Sheet
from services.gateway.reply import Writing

PAGE_RESULTS = 1000
"""Results of one page: to open a stream takes as long as to write some ten of their lines."""

PAGE_BYTES = TARGET_FRAME_BYTES
"""The same in bytes, and one result more: what a slow client keeps in memory is a frame of the queue's."""

EXPECTED_BYTES = TELLING * (PAGE_BYTES + PAGE_BYTES // 4)
"""What telling a page takes, unless a result is larger than a quarter of one."""

PAGE_LINES = 1000
"""Results asked for at once when they are wanted by their lines, which is the most the queue takes: it ends its answer
once that has as many bytes as a page."""

AT_ONCE = 16
"""Batches whose results are counted at once: what is held of them are so many pages."""

FIRST_PAUSE_S, PAUSE_S = 0.05, 1.0
"""Between two looks at a batch, doubled from the first to the second: a short batch ends soon."""

GAP_S = 0.01
"""Longest pauses are so long for each open batch: a look takes gateway and queue up to two milliseconds each, and
however many batches are open all of them together take a fifth of a processor of either."""


class ResultPage(NamedTuple):
    """Some results of a batch."""

    results: list[queue_pb2.WatchResult]
    under_way: int
    """Requests of the batch that waited or ran before the last of the results were read."""
    last: bool
    """Whether there were no more results."""
    size_bytes: int
    """Of the results, encoded."""


async def page_of(client: Client, batch_id: str, cursor: int) -> ResultPage:
    """Return results of a batch after `cursor`. Raises the client's errors."""
    results: list[queue_pb2.WatchResult] = []
    under_way = size_bytes = 0
    async with aclosing(client.wire_ended(batch_id, cursor)) as events:
        async for event in events:
            if event.HasField("progress"):
                under_way = event.progress.waiting + event.progress.running
                continue
            results.append(event.result)
            size_bytes += event.result.ByteSize()
            if len(results) >= PAGE_RESULTS or size_bytes >= PAGE_BYTES:
                return ResultPage(results, under_way, False, size_bytes)
    return ResultPage(results, under_way, True, size_bytes)


def log_of(client: Client, batch_id: str) -> Callable[[int], Awaitable[Sheet[pb.Result]]]:
    """Return how the results that a batch has now are read from a cursor, in order of completion."""

    async def read(cursor: int) -> Sheet[pb.Result]:
        page = await page_of(client, batch_id, cursor)
        items = [(one.cursor, one.result) for one in page.results]
        behind = items[-1][0] if items else cursor
        return Sheet(items, behind, TELLING * page.size_bytes, page.last)

    return read


def looked_up(
    numbers: Sequence[int], look: Callable[[Sequence[int]], Awaitable[Sequence[pb.Result | None]]]
) -> Callable[[int], Awaitable[Sheet[pb.Result]]]:
    """Return how the results of lines are read from one of their `numbers` on, in that order.

    `look` has those of the first of some lines: as many as a page takes, but one at least.
    """

    async def read(first: int) -> Sheet[pb.Result]:
        wanted = numbers[first : first + PAGE_LINES]
        results = await look(wanted) if wanted else ()
        items = [(told, result) for told, result in enumerate(results, first + 1) if result is not None]
        size_bytes = sum(result.ByteSize() for _, result in items)
        behind = first + len(results)
        return Sheet(items, behind, TELLING * size_bytes, last=behind == len(numbers))

    return read


class Looks:
    """When the batches that one gateway drives are looked at, however many they are."""

    def __init__(self) -> None:
        """No batch is open."""
        self.place = asyncio.Semaphore(AT_ONCE)
        """To have while a page is read and counted."""
        self.writing = Writing()
        """Of lines, for their sizes."""
        self._open = 0

    @contextmanager
    def pauses(self) -> Iterator[Iterator[float]]:
        """Take part inside; have seconds to wait after each look that found no more."""
        self._open += 1
        try:
            yield self._growing()
        finally:
            self._open -= 1

    def _growing(self) -> Iterator[float]:
        pause_s = FIRST_PAUSE_S
        while True:
            yield pause_s
            pause_s = min(pause_s * 2, max(PAUSE_S, self._open * GAP_S))
