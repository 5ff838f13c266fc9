"""The clients of the overload benchmark: one that offers a load whatever comes of it, one that a person would be.

A third is the worst kind of reader: it opens a Watch of everything and takes nothing.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from benchmarks.lifecycle.role import prompt, serve
from penstock import Client, Outcome, PenstockError
from penstock.queue.v1 import queue_pb2
from penstock.queue.v1.queue_pb2_grpc import QueueServiceStub
from penstock.request.v1 import request_pb2 as pb
from services.rpc.loop import run

BATCH = "overload"

TICK_S = 0.01
"""Between two bursts of an offered load."""

ANSWER_S = 120.0
"""An interactive request without an answer after so long counts as timed out."""


class Commands:
    """What a client can be told to do."""

    def __init__(self, address: str, client: Client) -> None:
        """Use `client`, which talks to the queue at `address`."""
        self._address = address
        self._client = client
        self._stalled: list[Any] = []

    async def offer(self, rate_per_s: float, seconds: float) -> dict[str, Any]:
        """Submit batch requests at a rate; return what became of them and the longest wait for an ack."""
        sent_s: dict[int, float] = {}
        refused: dict[str, int] = {}
        accepted, slowest_s, begin_s = 0, 0.0, time.perf_counter()
        try:
            async for submitted in self._client.submit_many(_offered(rate_per_s, seconds, sent_s)):
                slowest_s = max(slowest_s, time.perf_counter() - sent_s.pop(submitted.index))
                if submitted.error is None:
                    accepted += 1
                else:
                    refused[submitted.error.code] = refused.get(submitted.error.code, 0) + 1
        except PenstockError as error:
            refused[type(error).__name__] = len(sent_s)
        took_s = time.perf_counter() - begin_s
        return {"accepted": accepted, "refused": refused, "seconds": took_s, "slowest_ack_s": slowest_s}

    async def probe(self, rate_per_s: float, seconds: float) -> dict[str, Any]:
        """Ask for interactive answers at a rate; return how long each waited for its delivery to a worker."""
        waits: list[float] = []
        failed: dict[str, int] = {}

        async def one() -> None:
            try:
                async with asyncio.timeout(ANSWER_S):
                    result = await self._client.generate(prompt="hello?", channel="interactive", max_tokens=1)
                if result.outcome is Outcome.COMPLETED:
                    waits.append((result.timings.delivered_unix_ns - result.timings.submitted_unix_ns) / 1e9)
                else:
                    failed[result.outcome.name] = failed.get(result.outcome.name, 0) + 1
            except (PenstockError, TimeoutError) as error:
                failed[type(error).__name__] = failed.get(type(error).__name__, 0) + 1

        async with asyncio.TaskGroup() as group:
            for _ in range(round(rate_per_s * seconds)):
                group.create_task(one())
                await asyncio.sleep(1 / rate_per_s)
        return {"waits_s": waits, "failed": failed}

    async def stall(self, streams: int) -> dict[str, Any]:
        """Open Watches of the whole batch, tokens included, and never read from them."""
        channel = grpc.aio.insecure_channel(self._address, options=[("grpc.use_local_subchannel_pool", 1)])
        request = queue_pb2.WatchRequest(batch=BATCH, follow=True, tokens=True)
        for _ in range(streams):
            call = QueueServiceStub(channel).Watch(request)
            await call.initial_metadata()
            self._stalled.append(call)
        return {"streams": len(self._stalled)}


async def _offered(rate_per_s: float, seconds: float, sent_s: dict[int, float]) -> AsyncIterator[pb.Request]:
    """Yield requests at their times; what the submit's window holds back comes late, and is not left out."""
    begin_s = time.perf_counter()
    number = 0
    while number < rate_per_s * seconds:
        now_s = time.perf_counter()
        if number >= (now_s - begin_s) * rate_per_s:
            await asyncio.sleep(TICK_S)
            continue
        sent_s[number] = now_s
        yield pb.Request(text=prompt(number), batch=BATCH, channel="batch", sampling=pb.SamplingParams(max_tokens=1))
        number += 1


async def main(queue: str, scheduler: str) -> None:
    """Serve until standard input ends."""
    async with Client(queue, scheduler) as client:
        commands = Commands(queue, client)
        await serve({"offer": commands.offer, "probe": commands.probe, "stall": commands.stall})


if __name__ == "__main__":
    run(main(*sys.argv[1:]))
