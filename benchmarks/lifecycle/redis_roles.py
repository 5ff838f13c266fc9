"""The same lifecycle on Redis Streams: XADD, XREADGROUP, result and XACK in one transaction, XREAD of the results."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import redis.asyncio as redis

from benchmarks.lifecycle.role import BATCH, prompt, serve
from services.rpc.loop import run

REQUESTS, RESULTS, GROUP = "requests", "results", "workers"

PIPELINES = 8
"""Pipelines a client has under way at once: as many requests without an answer as Penstock's client has."""

LOOPS = 2
"""Fetches a worker has under way at once, so that one is worked on while the other is synced."""

BLOCK_MS = 1000


class Client:
    """Submits and reads results."""

    def __init__(self, server: redis.Redis) -> None:
        """Use `server`."""
        self._server = server
        self._last = "0-0"

    async def flood(self, requests: int) -> dict[str, Any]:
        """Submit as fast as the server takes them and read every result; seconds from first submit to last result."""
        begin_s = time.perf_counter()
        reading = asyncio.create_task(self._read(requests))
        turns = asyncio.Semaphore(PIPELINES)
        await asyncio.gather(*(self._submit(first, requests, turns) for first in range(0, requests, BATCH)))
        submitted_s = time.perf_counter()
        await reading
        return {"seconds": time.perf_counter() - begin_s, "submit_seconds": submitted_s - begin_s}

    async def lone(self, requests: int) -> dict[str, Any]:
        """One request at a time."""
        through = []
        for number in range(requests):
            begin_s = time.perf_counter()
            await self._server.xadd(REQUESTS, {"prompt": prompt(number)})
            await self._read(1)
            through.append(time.perf_counter() - begin_s)
        return {"through_s": through}

    async def _submit(self, first: int, requests: int, turns: asyncio.Semaphore) -> None:
        async with turns, self._server.pipeline(transaction=False) as pipe:
            for number in range(first, min(first + BATCH, requests)):
                pipe.xadd(REQUESTS, {"prompt": prompt(number)})
            await pipe.execute()

    async def _read(self, requests: int) -> None:
        seen = 0
        while seen < requests:
            read: Any = await self._server.xread({RESULTS: self._last}, BATCH, BLOCK_MS)
            for _, entries in read or []:
                seen += len(entries)
                self._last = entries[-1][0]


class Worker:
    """Claims requests, answers them, records the results."""

    def __init__(self, server: redis.Redis) -> None:
        """Use `server`."""
        self._server = server
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> dict[str, Any]:
        """Begin to work."""
        self._tasks = [asyncio.create_task(self._work(f"worker-{number}")) for number in range(LOOPS)]
        return {}

    async def _work(self, name: str) -> None:
        while True:
            read: Any = await self._server.xreadgroup(GROUP, name, {REQUESTS: ">"}, BATCH, BLOCK_MS)
            for _, entries in read or []:
                async with self._server.pipeline(transaction=True) as pipe:
                    for entry, _fields in entries:
                        pipe.xadd(RESULTS, {"request": entry, "outcome": "completed", "text": "ba"})
                    pipe.xack(REQUESTS, GROUP, *(entry for entry, _ in entries))
                    await pipe.execute()


async def main(role: str, port: int) -> None:
    """Serve as `role` until standard input ends."""
    server = redis.Redis(port=port)
    if role == "client":
        await server.xgroup_create(REQUESTS, GROUP, "0", mkstream=True)
        client = Client(server)
        await serve({"flood": client.flood, "lone": client.lone})
    else:
        await serve({"start": Worker(server).start})


if __name__ == "__main__":
    run(main(sys.argv[1], int(sys.argv[2])))
