"""Read the results of a batch while it is still being submitted: `python examples/streaming_results.py`.

Needs running services: `penstock up`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator

import penstock

BATCH = f"squares-{uuid.uuid4().hex[:8]}"


def squares(count: int) -> Iterator[penstock.RequestFields]:
    """Yield `count` requests of one batch."""
    for n in range(count):
        yield {"prompt": f"{n} * {n} =", "max_tokens": 4, "batch": BATCH, "channel": "batch"}


async def submit(client: penstock.Client) -> int:
    """Submit them all; return how many were taken: each of those will have one result."""
    return sum([ack.error is None async for ack in client.submit_many(squares(200))])


async def read(client: penstock.Client, answered: asyncio.Semaphore) -> None:
    """Print results as they come; `answered` counts them. Without `follow` this would end before the submits do."""
    async for result in client.watch(BATCH, follow=True):
        print(result.request_id, repr(result.text))
        answered.release()


async def main() -> None:
    """Submit and read at once, until there are as many results as requests that were taken."""
    answered = asyncio.Semaphore(0)
    async with penstock.Client("127.0.0.1:7410") as client, asyncio.TaskGroup() as group:
        reading = group.create_task(read(client, answered))
        for _ in range(await submit(client)):
            await answered.acquire()
        reading.cancel()


asyncio.run(main())
