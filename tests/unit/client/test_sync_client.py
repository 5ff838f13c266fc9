"""The blocking client: what its callers' own code does stays on the callers' side of its loop."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import penstock
from penstock.queue.v1 import queue_pb2 as pb
from tests.support.fake_queue import FakeQueue, serving

SOON_S = 20.0
"""Time that a fact is given which is there at once."""


@contextmanager
def served(queue: FakeQueue) -> Iterator[str]:
    """Serve `queue` from another thread; yield its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    service = serving(queue)
    try:
        yield asyncio.run_coroutine_threadsafe(service.__aenter__(), loop).result(SOON_S)
    finally:
        asyncio.run_coroutine_threadsafe(service.__aexit__(None, None, None), loop).result(SOON_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class Interrupting(FakeQueue):
    """Acks nothing, and has Ctrl-C pressed once there is something to ack."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        super().__init__()
        self.interrupt = interrupt

    async def Submit(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for frame in request_iterator:
            if frame.HasField("open"):
                yield pb.SubmitResponse(open=pb.SubmitOpen(store_id="fake"))
            else:
                self.interrupt()


def test_ctrl_c_is_ctrl_c_while_acks_are_awaited() -> None:
    def press() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with served(Interrupting(press)) as address, penstock.SyncClient(address, retry_for_s=5) as client:
        with pytest.raises(KeyboardInterrupt):
            list(client.submit_many([{"prompt": "p"}]))
        assert client.stats().dead == 1, "the client goes on"
