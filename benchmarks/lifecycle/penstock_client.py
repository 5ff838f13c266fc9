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
from services.worker.simulated_engine import ByteRenderer


class Commands:
    """What the client can be told to do."""

    def __init__(self, client: Client) -> None:
        """Use `client`."""
        self._client = client
        self._rounds = 0

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

    async def drain(self, requests: int) -> dict[str, Any]:
        """Watch the batch that was submitted last until `requests` results have been seen."""
        begin_s = time.perf_counter()
        await self._watch(f"round-{self._rounds}", requests)
        return {"seconds": time.perf_counter() - begin_s}

    async def lone(self, requests: int) -> dict[str, Any]:
        """One request at a time: submit, wait for its result; and the same straight at the engine."""
        through: list[float] = []
        direct: list[float] = []
        renderer, engine = ByteRenderer(WINDOW_TOKENS), InstantEngine(1, 64, None)
        for number in range(requests):
            text = prompt(number)
            begin_s = time.perf_counter()
            await self._client.generate(prompt=text, max_tokens=1)
            middle_s = time.perf_counter()
            ids = renderer.render(PromptSpec(text=text)).token_ids
            async for _ in engine.generate(EngineRequest("r", ids, 1, pb.SamplingParams(max_tokens=1))):
                pass
            direct.append(time.perf_counter() - middle_s)
            through.append(middle_s - begin_s)
        return {"through_s": through, "direct_s": direct}

    def _next_batch(self) -> str:
        self._rounds += 1
        return f"round-{self._rounds}"

    async def _submit(self, batch: str, requests: int) -> None:
        async for submitted in self._client.submit_many(_requests(batch, requests)):
            if submitted.error is not None:
                raise SystemExit(f"refused: {submitted.error}")

    async def _watch(self, batch: str, requests: int) -> None:
        seen = 0
        async for event in self._client.wire_results(batch):
            if event.result.outcome != pb.OUTCOME_COMPLETED:
                raise SystemExit(f"not completed: {event.result}")
            seen += 1
            if seen == requests:
                return


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
                "drain": commands.drain,
                "lone": commands.lone,
            }
        )


if __name__ == "__main__":
    run(main(sys.argv[1], sys.argv[2]))
