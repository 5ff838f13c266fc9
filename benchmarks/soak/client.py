"""The clients of the soak: everything clients do in a long life, again and again, in one process.

Large batches with keys, half of which are deleted and half left to their TTL; single answers as tokens, some cancelled,
some given up half-way, some with too little time; clients that come, ask once and go; chats through the gateway, some
hung up on; files and batches through the gateway, deleted afterwards. Every name in it is new.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

import openai

from benchmarks.lifecycle.role import serve
from penstock import Client, NotFound, Outcome, PenstockError
from penstock.request.v1 import request_pb2 as pb
from services.rpc.loop import run

BATCH_REQUESTS = 250
PROMPT_WORDS = 60
MODEL = "tiny"
FILE_LINES = 100
POLL_S = 0.3
SHORT_S = 0.02
"""A deadline that some requests meet and some do not."""

MOST_TOLD = 20
"""Failures that are told in full."""

TALKERS, VISITORS, CHATTERS = 4, 1, 2


class Soak:
    """What is done at once until the time is over, and how often."""

    def __init__(self, queue: str, scheduler: str, gateway: str) -> None:
        """Use the services at these addresses."""
        self._addresses = (queue, scheduler)
        self._client = Client(queue, scheduler)
        self._http = openai.AsyncOpenAI(base_url=f"http://{gateway}/v1", api_key="none", timeout=60, max_retries=3)
        self._chance = random.Random(0)
        self._number = 0
        self.done: Counter[str] = Counter()
        self.failures: list[str] = []

    async def run(self, seconds: float) -> dict[str, Any]:
        """Do all of it for so long; return what was done how often."""
        until_s = time.monotonic() + seconds
        kinds: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self._batch, 1),
            (self._talk, TALKERS),
            (self._visit, VISITORS),
            (self._chat, CHATTERS),
            (self._upload, 1),
        ]

        async def again(kind: Callable[[], Awaitable[None]]) -> None:
            while time.monotonic() < until_s:
                try:
                    await kind()
                except (PenstockError, openai.OpenAIError) as error:
                    self.done[f"{kind.__name__[1:]}: {type(error).__name__}"] += 1
                    self.failures[:] = [*self.failures, f"{kind.__name__[1:]}: {error!r}"][:MOST_TOLD]
                    await asyncio.sleep(POLL_S)
                else:
                    self.done[kind.__name__[1:]] += 1

        async with asyncio.TaskGroup() as group:
            for kind, times in kinds:
                for _ in range(times):
                    group.create_task(again(kind))
        return {"done": dict(self.done), "failures": self.failures}

    def _new(self, what: str) -> str:
        self._number += 1
        return f"{what}-{self._number}"

    def _prompt(self) -> str:
        return f"{self._number} " + " ".join("water" for _ in range(self._chance.randrange(PROMPT_WORDS)))

    async def _batch(self) -> None:
        """Submit many requests with keys, read every result, and delete them or not."""
        batch = self._new("batch")
        requests = [
            pb.Request(
                text=f"{number} {self._prompt()}",
                batch=batch,
                channel="batch",
                idempotency_key=f"{batch}/{number}",
                sampling=pb.SamplingParams(max_tokens=self._chance.randrange(1, 16)),
            )
            for number in range(BATCH_REQUESTS)
        ]
        async for submitted in self._client.submit_many(requests):
            if submitted.error is not None:
                self.done[f"batch: {submitted.error.code}"] += 1
        read = 0
        with suppress(NotFound):  # none of it was taken
            async with aclosing(self._client.watch(batch)) as results:
                async for _ in results:
                    read += 1
        self.done["results"] += read
        if self._chance.random() < 0.5:
            self.done["deleted"] += await self._client.delete(batch=batch)

    async def _talk(self) -> None:
        """Ask for one answer as tokens; do with it what impatient people do."""
        mood = self._chance.random()
        if mood < 0.1:
            hurried = await self._client.generate(prompt=self._prompt(), max_tokens=64, deadline_s=SHORT_S)
            self.done["late"] += hurried.outcome is Outcome.EXPIRED
            return
        name = await self._client.submit(prompt=self._prompt(), channel="interactive", max_tokens=32)
        seen = 0
        async with aclosing(self._client.tokens(name)) as deltas:
            async for _ in deltas:
                seen += 1
                if mood < 0.3 and seen == 2:
                    break
        if mood < 0.2:
            await self._client.cancel(name)

    async def _visit(self) -> None:
        """Come as a new client, look around, ask once, go."""
        async with Client(*self._addresses) as client:
            await client.stats()
            await client.fleet()
            await client.generate(prompt=self._prompt(), max_tokens=2)

    async def _chat(self) -> None:
        """Chat through the gateway; hang up on some."""
        messages: Any = [{"role": "user", "content": self._prompt()}]
        mood = self._chance.random()
        if mood < 0.5:
            await self._http.chat.completions.create(model=MODEL, messages=messages, max_tokens=16)
            return
        stream: Any = await self._http.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=32, stream=True
        )
        async for _ in stream:
            if mood < 0.6:
                break
        await stream.close()

    async def _upload(self) -> None:
        """Run a file as a batch of the gateway, read its output, delete both."""
        name = self._new("file")
        lines = [
            {
                "custom_id": f"{name}/{number}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": MODEL, "prompt": self._prompt(), "max_tokens": 4},
            }
            for number in range(FILE_LINES)
        ]
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = await self._http.files.create(file=(f"{name}.jsonl", content), purpose="batch")
        batch = await self._http.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        while (batch := await self._http.batches.retrieve(batch.id)).status not in {"completed", "failed", "expired"}:
            await asyncio.sleep(POLL_S)
        assert batch.output_file_id is not None, batch
        output = await self._http.files.content(batch.output_file_id)
        assert len(output.text.splitlines()) == FILE_LINES
        for one in (batch.output_file_id, file.id):
            await self._http.files.delete(one)


async def main(queue: str, scheduler: str, gateway: str) -> None:
    """Serve until standard input ends."""
    await serve({"run": Soak(queue, scheduler, gateway).run})


if __name__ == "__main__":
    run(main(*sys.argv[1:]))
