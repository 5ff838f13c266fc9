"""Submit requests, read results as they come, and stream the tokens of one: `python examples/async_client.py`.

Needs running services: `penstock up`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator

import penstock

BATCH = f"sums-{uuid.uuid4().hex[:8]}"
"""Another one each time: under the same name, a watch from the beginning has the results of earlier runs as well."""


def sums(count: int) -> Iterator[penstock.RequestFields]:
    """Yield `count` requests of one batch."""
    for n in range(count):
        yield {"prompt": f"{n} + {n} =", "max_tokens": 4, "batch": BATCH, "channel": "batch"}


async def main() -> None:
    """Run the three ways to use the client."""
    async with penstock.Client("127.0.0.1:7410") as client:
        # One request, one result.
        result = await client.generate(prompt="Once upon a time", max_tokens=16, temperature=0.0)
        print(result.outcome.name, repr(result.text), result.usage)

        # Many requests as one batch: durable once acked, results in completion order.
        async for ack in client.submit_many(sums(20)):
            if ack.error is not None:
                print(ack.index, ack.error.message)
        async for result in client.watch(BATCH):
            print(result.request_id, repr(result.text))

        # Tokens while they are generated.
        request_id = await client.submit(messages=[{"role": "user", "content": "Tell me a story."}], max_tokens=32)
        async for delta in client.tokens(request_id):
            print(delta.text, end="", flush=True)
        print()


asyncio.run(main())
