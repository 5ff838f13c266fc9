"""A stream to a peer ends once, for a reason that is told, and leaves no call open."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from services.rpc.outbox import Outbox
from services.rpc.peer_stream import Ending, run_stream

log = logging.getLogger("test")


class Call:
    """A call whose peer says these things, and then ends it or waits."""

    def __init__(self, *said: object, ends: BaseException | None = None, waits: bool = False) -> None:
        self.said = said
        self.ends = ends
        self.waits = waits
        self.outbox = Outbox()
        self.heard: list[object] = []
        self.is_cancelled = False

    def __call__(self, _frames: AsyncIterator[bytes]) -> Any:
        return self

    async def __aiter__(self) -> AsyncIterator[object]:
        for frame in self.said:
            yield frame
        if self.ends:
            raise self.ends
        if self.waits:
            await asyncio.Event().wait()

    def cancel(self) -> None:
        self.is_cancelled = True

    async def run(self) -> Ending:
        return await run_stream(self, self.outbox, "the peer", log, self.heard.append)

    def assert_over(self) -> None:
        assert self.is_cancelled
        assert self.outbox.closed
        assert [task for task in asyncio.all_tasks() if task.get_name() == "unread" and not task.cancelling()] == []


def refusal(details: str | None) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


@pytest.mark.parametrize(
    ("ends", "ending"),
    [
        (None, Ending("ended", "it ended the stream")),
        (refusal("it is away"), Ending(grpc.StatusCode.UNAVAILABLE, "it is away")),
        (refusal(None), Ending(grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE")),
        (asyncio.CancelledError(), Ending("broken", "the stream broke off")),
    ],
)
async def test_what_the_peer_said_is_heard_and_why_it_ended_is_told(ends: BaseException | None, ending: Ending) -> None:
    call = Call(1, 2, ends=ends)
    assert await call.run() == ending
    assert call.heard == [1, 2]
    call.assert_over()


async def test_who_hears_what_it_does_not_understand_ends_the_call() -> None:
    call = Call(1, waits=True)
    with pytest.raises(ZeroDivisionError):
        await run_stream(call, call.outbox, "the peer", log, lambda frame: frame / 0)
    call.assert_over()


async def test_a_task_that_is_cancelled_is_and_leaves_no_call_open() -> None:
    call = Call(1, waits=True)
    running = asyncio.create_task(call.run())
    while not call.heard:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    call.assert_over()
