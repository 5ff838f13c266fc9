"""The client of the Penstock side: `penstock.Client`, which submits and watches at the same time."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.lifecycle.instant_engine import WINDOW_TOKENS, InstantEngine
from benchmarks.lifecycle.role import prompt, serve
from penstock import Client
from penstock.request.v1 import request_pb2 as pb
from services.rpc.loop import run
from services.worker.engine import EngineRequest, PromptSpec
from services.worker.simulated.engine import ByteRenderer


class Commands:
    """What the client can be told to do."""

    def __init__(self, client: Client) -> None:
        """Use `client`."""
        self._client = client
        self._rounds = 0
        self._seen = 0
        """Results of the present watch."""
        self._cursor = 0
        """How far the present batch has been watched."""
        self._news = asyncio.Event()

    async def flood(self, requests: int) -> dict[str, Any]:
        """Submit as fast as the queue takes them, watch all results; seconds from the first submit to the last one."""
        batch = self._next_batch()
        begin_s = time.perf_counter()
        watching = asyncio.create_task(self._watch(batch, requests))
        await self._submit(batch, requests)
        submitted_s = time.perf_counter()
        await watching
        return {"seconds": time.perf_counter() - begin_s, "submit_seconds": submitted_s - begin_s}

    async def preload(self, requests: int) -> dict[str, Any]:
        """Submit and do not wait for results."""
        batch = self._next_batch()
        begin_s = time.perf_counter()
        await self._submit(batch, requests)
        return {"seconds": time.perf_counter() - begin_s}

    async def turn_over(self, requests: int) -> dict[str, Any]:
        """Submit another request for each of the next `requests` results of the batch that was submitted last."""
        batch = f"round-{self._rounds}"
        begin_s = time.perf_counter()
        watching = asyncio.create_task(self._watch(batch, requests))
        submitted = 0
        while submitted < requests and not watching.done():
            news = asyncio.create_task(self._news.wait())
            await asyncio.wait([news, watching], return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
            self._news.clear()
            ended = self._seen - submitted
            submitted = self._seen
            await self._submit(batch, ended)
        await watching
        return {"seconds": time.perf_counter() - begin_s}

    async def lone(self, requests: int, channel: str = "") -> dict[str, Any]:
        """One request at a time, in `channel`: submit, wait for its result; and the same straight at the engine."""
        through: list[float] = []
        direct: list[float] = []
        renderer, engine = ByteRenderer(WINDOW_TOKENS), InstantEngine(1, 64, None)
        for number in range(requests):
            text = prompt(number)
            begin_s = time.perf_counter()
            await self._client.generate(prompt=text, max_tokens=1, channel=channel)
            middle_s = time.perf_counter()
            ids = renderer.render(PromptSpec(text=text)).token_ids
            async for _ in engine.generate(EngineRequest("r", ids, 1, pb.SamplingParams(max_tokens=1))):
                pass
            direct.append(time.perf_counter() - middle_s)
            through.append(middle_s - begin_s)
        return {"through_s": through, "direct_s": direct}

    def _next_batch(self) -> str:
        self._rounds += 1
        self._cursor = 0
        return f"round-{self._rounds}"

    async def _submit(self, batch: str, requests: int) -> None:
        async for submitted in self._client.submit_many(_requests(batch, requests)):
            if submitted.error is not None:
                raise SystemExit(f"refused: {submitted.error}")

    async def _watch(self, batch: str, requests: int) -> None:
        """Return once `requests` more results have been seen; raises SystemExit if there are fewer."""
        self._seen = 0
        async for event in self._client.wire_results(batch, self._cursor):
            if event.result.outcome != pb.OUTCOME_COMPLETED:
                raise SystemExit(f"not completed: {event.result}")
            self._seen += 1
            self._cursor = event.cursor
            self._news.set()
            if self._seen == requests:
                return
        raise SystemExit(f"the batch ended after {self._seen} of {requests} results")


def _requests(batch: str, requests: int) -> Iterator[pb.Request]:
    for number in range(requests):
        yield pb.Request(text=prompt(number), batch=batch, sampling=pb.SamplingParams(max_tokens=1))


async def main(queue: str, scheduler: str) -> None:
    """Serve until standard input ends."""
    async with Client(queue, scheduler) as client:
        commands = Commands(client)
        await serve(
            {
                "flood": commands.flood,
                "preload": commands.preload,
                "turn_over": commands.turn_over,
                "lone": commands.lone,
            }
        )


if __name__ == "__main__":
    run(main(sys.argv[1], sys.argv[2]))
