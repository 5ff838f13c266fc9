"""What readers find is told only once it is durable: a store may show rows that its sync has not reached."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from unittest.mock import patch

import pytest

from penstock.files.v1 import files_pb2 as pb
from services.clock import SystemClock
from services.queue.core import records
from services.queue.core.effects import Write
from services.queue.core.messages import Inspect, Tick
from services.queue.file_rows import file_key
from services.queue.memory_store import MemoryStore
from services.queue.reader import Reader
from services.queue.shelf import Shelf
from services.queue.store import StoreError
from tests.support.committing import committing
from tests.support.queueing import STORE_ID

FILE = pb.File(file_id="file-1", bytes=3)
WAIT_S = 60


class UnsettledStore(MemoryStore):
    """A store with a result and a file that are not durable until a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.settling, self.may_settle = threading.Event(), threading.Event()
        self.failure = ""
        row = records.encode_result(records.ResultHead(1, 1, "t", "", "b"), b"")
        self.write([Write(records.RESULTS, records.seq_key(7), row)])
        self.write([Write(records.FILES, file_key("file-1"), FILE.SerializeToString())])

    def settle(self) -> None:
        """Wait for the test."""
        self.settling.set()
        assert self.may_settle.wait(WAIT_S)
        if self.failure:
            raise StoreError(self.failure)


async def result_of(store: UnsettledStore) -> bool:
    reader = Reader(store, STORE_ID)
    try:
        return await reader.result(7) is not None
    finally:
        await asyncio.to_thread(reader.close)


async def file_of(store: UnsettledStore) -> bool:
    file = await Shelf(store, SystemClock(), lambda: None).file("file-1")
    return file is not None and file.file_id == FILE.file_id


@pytest.mark.parametrize("read", [result_of, file_of])
async def test_a_row_is_told_once_it_is_durable(read: Callable[[UnsettledStore], Awaitable[bool]]) -> None:
    store = UnsettledStore()
    reading = asyncio.ensure_future(read(store))
    assert await asyncio.to_thread(store.settling.wait, WAIT_S)
    done, _ = await asyncio.wait([reading], timeout=0.05)
    assert not done
    store.may_settle.set()
    assert await reading


@pytest.mark.parametrize("read", [result_of, file_of])
async def test_a_row_whose_sync_failed_is_not_told(read: Callable[[UnsettledStore], Awaitable[bool]]) -> None:
    store = UnsettledStore()
    store.may_settle.set()
    store.failure = "Input/output error"
    with pytest.raises(StoreError, match="Input/output error"):
        await read(store)


async def test_a_machine_is_not_built_of_what_a_failed_sync_was_about() -> None:
    async with committing() as rig:
        name = (await rig.submit()).acks[0][0]
        with patch.object(rig.store, "settle", side_effect=StoreError("Input/output error")):
            rig.store.failure = "Input/output error"
            with pytest.raises(Exception, match="Input/output error"):
                await rig.submit()
            with pytest.raises(Exception, match="Input/output error"):
                await rig.committer.ask(lambda ticket: Inspect(ticket, (name,)))
        rig.clock.time_ns += 2_000_000_000
        rig.committer.post(Tick())
        found = await rig.committer.ask(lambda ticket: Inspect(ticket, (name,)))
        assert found.views[0] is not None
        assert rig.store.reopened == 1
