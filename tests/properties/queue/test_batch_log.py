"""A watcher of a batch gets every result once and in order, handed over or read, whenever it looks."""

from __future__ import annotations

import asyncio

from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.queue.core.entry import DEFAULT_TENANT
from services.queue.storage.reader import Page
from services.queue.watch.batch_log import BatchLog
from services.queue.watch.hub import RESULT_BYTES, WatchHub
from services.queue.wire import StoredResult
from tests.support.effort import examples

BATCH = (DEFAULT_TENANT, "b")

steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 6)),
        st.tuples(st.just("tell"), st.integers(1, 6)),
        st.tuples(st.just("tell without"), st.integers(1, 2)),
        st.tuples(st.just("rebuild"), st.just(0)),
        st.tuples(st.just("read"), st.integers(0, 6)),
    ),
    max_size=40,
)


class Queue:
    """Results that are durable, and those of them that watchers have been told of."""

    def __init__(self, page_results: int) -> None:
        self.hub = WatchHub()
        self.page_results = page_results
        self.durable: list[StoredResult] = []
        self.told = 0
        self.tells_while_reading = 0
        self.pages = 0

    def write(self, count: int) -> None:
        for _ in range(count):
            number = len(self.durable) + 1
            self.durable.append(StoredResult(number, b"x" * 10))

    def tell(self, count: int, at_hand: bool = True) -> None:
        if self.told == len(self.durable):
            self.write(count)
        for result in self.durable[self.told : self.told + count]:
            self.hub.ended(result.cursor, BATCH, str(result.cursor), result if at_hand else None)
            self.told += 1

    def rebuild(self) -> None:
        """Read everything anew from the store, and say no more of what ended than that."""
        self.told = len(self.durable)
        self.hub.reset({})

    async def page(self, _batch: object, cursor: int, _limit: int) -> Page:
        """Stand for the reader: the queue goes on before and after the store is looked at."""
        self.pages += 1
        self.tell(self.tells_while_reading)
        found = [result for result in self.durable if result.cursor > cursor]
        page = found[: self.page_results]
        self.tell(self.tells_while_reading)
        return Page(page, page[-1].cursor if page else cursor, len(found) < self.page_results)


@settings(max_examples=examples(400))
@example([("read", 0), ("write", 1), ("rebuild", 0)], 5, 4096, 0)
@example([("read", 1)], 5, 4096, 0)
@given(steps, st.integers(1, 5), st.sampled_from([600, 1200, 4096]), st.integers(0, 3))
def test_every_result_is_returned_once_and_in_order(
    steps: list[tuple[str, int]], page_results: int, kept_bytes: int, before: int
) -> None:
    queue = Queue(page_results)
    queue.write(before)
    queue.told = before

    async def work() -> None:
        with queue.hub.batch(BATCH, False, kept_bytes) as watcher:
            log = BatchLog(queue, watcher, BATCH, 0)  # type: ignore[arg-type]  # stands for the reader
            got: list[int] = []
            for what, count in steps:
                if what == "write":
                    queue.write(count)
                elif what == "rebuild":
                    queue.rebuild()
                elif what == "read":
                    queue.tells_while_reading = count
                    had_ended = queue.told
                    got += [result.cursor for result in await log.read()]
                    assert not log.at_end or len(got) >= had_ended, "at the end is what had ended before"
                else:
                    queue.tell(count, what == "tell")
            queue.tells_while_reading = 0
            queue.tell(len(queue.durable) - queue.told)
            got += [result.cursor for result in await log.read()]
            for _ in queue.durable:
                got += [result.cursor for result in await log.read()]
            assert log.at_end
            assert got == [result.cursor for result in queue.durable]

    asyncio.run(work())


@given(st.lists(st.integers(1, 4), max_size=10))
def test_who_keeps_up_reads_the_store_once(ends: list[int]) -> None:
    queue = Queue(100)

    async def work() -> None:
        with queue.hub.batch(BATCH, False, 4 * (RESULT_BYTES + 10)) as watcher:
            log = BatchLog(queue, watcher, BATCH, 0)  # type: ignore[arg-type]  # stands for the reader
            assert await log.read() == []
            for count in ends:
                queue.tell(count)
                assert len(await log.read()) == count
            assert await log.read() == []
            assert queue.pages == 1
            queue.tell(5)
            assert len(await log.read()) == 5
            assert queue.pages == 2, "five results are more than are kept"

    asyncio.run(work())


def test_for_who_is_behind_nothing_is_kept_that_it_will_read() -> None:
    queue = Queue(2)
    queue.write(5)
    queue.told = 5

    async def work() -> None:
        with queue.hub.batch(BATCH, False) as watcher:
            log = BatchLog(queue, watcher, BATCH, 0)  # type: ignore[arg-type]  # stands for the reader
            for at_end in (False, False, True):
                await log.read()
                assert log.at_end is at_end
                queue.hub.ended(9, BATCH, "9", queue.durable[-1])
                assert (watcher.take_results() is not None) is at_end
                if not at_end:
                    watcher.miss_results()

    asyncio.run(work())
