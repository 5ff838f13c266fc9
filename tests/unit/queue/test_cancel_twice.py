"""A cancel that is said twice, because the first answer was lost."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

from penstock.queue.v1 import queue_pb2
from services.queue.storage.reader import Reader
from services.queue.storage.store import StoreError
from services.telemetry import Telemetry
from tests.support.serving import ids, serving, text


async def test_what_the_first_cancel_ended_is_not_named_as_not_cancelled() -> None:
    async with serving(Telemetry(None)) as peer:
        waiting, running = await peer.submit(text(), text())
        work = await peer.work()
        await work.complete((await work.claim(running)).lease)
        request = queue_pb2.CancelRequest(request_ids=ids(waiting, running, "nobody"))
        for cancelled in (1, 0):
            done = await peer.stub.Cancel(request)
            assert (done.cancelled, list(done.not_cancelled)) == (cancelled, [running, "nobody"])

        async def fail(_: Reader, seqs: Sequence[int], sees: str | None) -> set[int]:
            raise StoreError("the disk is gone")

        with patch.object(Reader, "cancelled", fail):
            assert list((await peer.stub.Cancel(request)).not_cancelled) == [waiting, running, "nobody"]
