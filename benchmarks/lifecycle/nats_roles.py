"""The same lifecycle on NATS JetStream: publish, pull, publish the result, ack, and pull the results."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import nats
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy

from benchmarks.lifecycle.role import BATCH, prompt, serve
from services.rpc.loop import run

REQUESTS, RESULTS = "requests", "results"

MOST_PENDING = 4096
"""Publishes without an ack at once: as many as Penstock's client has."""

MOST_UNACKED = 16_384
"""Messages a worker may hold without having acked them."""

FETCH_S = 1.0


class Client:
    """Submits and reads results."""

    def __init__(self, stream: JetStreamContext, results: JetStreamContext.PullSubscription) -> None:
        """Use the two streams."""
        self._stream = stream
        self._results = results

    async def flood(self, requests: int) -> dict[str, Any]:
        """Submit as fast as the server takes them and read every result; seconds from first submit to last result."""
        begin_s = time.perf_counter()
        reading = asyncio.create_task(self._read(requests))
        for number in range(requests):
            await self._stream.publish_async(REQUESTS, prompt(number).encode())
        await self._stream.publish_async_completed()
        submitted_s = time.perf_counter()
        await reading
        return {"seconds": time.perf_counter() - begin_s, "submit_seconds": submitted_s - begin_s}

    async def lone(self, requests: int) -> dict[str, Any]:
        """One request at a time."""
        through = []
        for number in range(requests):
            begin_s = time.perf_counter()
            await self._stream.publish(REQUESTS, prompt(number).encode())
            await self._read(1)
            through.append(time.perf_counter() - begin_s)
        return {"through_s": through}

    async def _read(self, requests: int) -> None:
        seen = 0
        while seen < requests:
            try:
                seen += len(await self._results.fetch(min(BATCH, requests - seen), FETCH_S))
            except TimeoutError:  # nats-py raises its own, which is one of these, or asyncio's
                continue


class Worker:
    """Claims requests, answers them, records the results."""

    def __init__(self, stream: JetStreamContext) -> None:
        """Use `stream`."""
        self._stream = stream
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> dict[str, Any]:
        """Begin to work."""
        config = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, max_ack_pending=MOST_UNACKED)
        requests = await self._stream.pull_subscribe(REQUESTS, durable="workers", config=config)
        self._task = asyncio.create_task(self._work(requests))
        return {}

    async def _work(self, requests: JetStreamContext.PullSubscription) -> None:
        recording: set[asyncio.Task[None]] = set()
        while True:
            try:
                messages = await requests.fetch(BATCH, FETCH_S)
            except TimeoutError:  # nats-py raises its own, which is one of these, or asyncio's
                continue
            task = asyncio.create_task(self._record(messages))
            recording.add(task)
            task.add_done_callback(recording.discard)

    async def _record(self, messages: list[Any]) -> None:
        """Publish the results; ack the requests only when the results are acked."""
        published = []
        for message in messages:
            number = message.metadata.sequence.stream
            body = json.dumps({"request": number, "outcome": "completed", "text": "ba"}).encode()
            published.append(await self._stream.publish_async(RESULTS, body))
        await asyncio.gather(*published)
        for message in messages:
            await message.ack()


async def main(role: str, port: int) -> None:
    """Serve as `role` until standard input ends."""
    connection = await nats.connect(f"nats://127.0.0.1:{port}")
    stream = connection.jetstream(publish_async_max_pending=MOST_PENDING)
    if role == "client":
        await stream.add_stream(name=REQUESTS, subjects=[REQUESTS], retention=RetentionPolicy.WORK_QUEUE)
        await stream.add_stream(name=RESULTS, subjects=[RESULTS])
        results = await stream.pull_subscribe(
            RESULTS, durable="client", config=ConsumerConfig(ack_policy=AckPolicy.NONE)
        )
        client = Client(stream, results)
        await serve({"flood": client.flood, "lone": client.lone})
    else:
        await serve({"start": Worker(stream).start})


if __name__ == "__main__":
    run(main(sys.argv[1], int(sys.argv[2])))
