"""While the store cannot write the client says what the queue says: it is there, and no service has to be started.

Where a write hangs there is nothing to say: its age tells of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from unittest.mock import patch

import pytest

import penstock
from penstock.errors import NobodyAnswers
from penstock.request.v1 import request_pb2
from services.queue.core.effects import Write
from services.queue.storage.store import StoreError
from services.telemetry import Telemetry
from tests.support.committing import SlowStore
from tests.support.serving import serving, text
from tests.support.waiting import wait_for_async


def fail(_writes: Sequence[Write]) -> None:
    raise StoreError("no medium")


@pytest.mark.parametrize("ask", ["cancel", "delete", "requeue"])
async def test_the_client_says_what_the_queue_says(ask: str) -> None:
    async with serving(Telemetry(None)) as peer, penstock.Client(f"127.0.0.1:{peer.port}", retry_for_s=0) as client:
        waiting, ended, dead = await peer.submit(text(), text(), text())
        await client.cancel(ended)
        work = await peer.work()
        for _ in range(2):
            failure = request_pb2.RequestError(code="e", message="bad")
            await work.complete((await work.claim(dead)).lease, failure=failure)
        name = {"cancel": waiting, "delete": ended, "requeue": dead}[ask]
        with patch.object(peer.service._store, "write", fail), pytest.raises(penstock.Unavailable) as told:
            await getattr(client, ask)(name)
    assert "the queue's store cannot write: no medium" in str(told.value)
    assert not isinstance(told.value, NobodyAnswers)


async def test_a_scrape_sees_a_write_that_hangs() -> None:
    store = SlowStore()
    store.is_stalled = True  # so that no write is made on the loop's own thread, which is this test's
    async with serving(Telemetry(None), store) as peer:

        async def age_s() -> float:
            return peer.registry.get_sample_value("penstock_queue_commit_age_seconds") or 0.0

        async def is_over() -> bool:
            return await age_s() == 0

        store.may_write.clear()
        submitted = asyncio.create_task(peer.submit(text()))
        before_s = await wait_for_async(age_s, "the commit to be under way")

        async def has_aged() -> bool:
            return await age_s() > before_s

        await wait_for_async(has_aged, "the commit to age")
        assert not submitted.done()
        store.may_write.set()
        await submitted
        await wait_for_async(is_over, "no commit to be under way")
