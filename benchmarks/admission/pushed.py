"""Plain vLLM with clients of its own: everything at once, a fixed window, AIMD, or back-off when vLLM refuses.

Usage: python -m benchmarks.admission.pushed [engine flags]; then one JSON object a line on standard input, as
`Order`. One JSON line each on standard output when it is done, after a first one that says the engine is up.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.admission.aimd import AdaptiveWindow
from benchmarks.plain_vllm import make_engine

FIRST_PAUSE_S, MOST_PAUSE_S = 0.05, 1.0
"""A refused client comes again after pauses that double between these, each with chance in it."""


class Order(NamedTuple):
    """What to run: a batch file, when its lines arrive, and how many may be inside (0: all; -1: AIMD)."""

    path: str
    arrivals_s: list[float]
    window: int


class Window:
    """How many requests a client lets in; AIMD changes it by the engine's preemptions."""

    def __init__(self, size: int, preemptions: Callable[[], int]) -> None:
        """Begin with `size` places; 0 has one for everybody, -1 adapts."""
        self._adaptive = AdaptiveWindow() if size < 0 else None
        self._size = size or sys.maxsize
        self._preemptions, self._seen = preemptions, preemptions()
        self._inside = 0
        self._changed = asyncio.Condition()

    async def enter(self) -> None:
        """Wait for a place."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._inside < self._places())
            self._inside += 1

    async def leave(self) -> None:
        """Give the place back and adapt."""
        async with self._changed:
            self._inside -= 1
            if self._adaptive is not None:
                preempted, self._seen = self._preemptions() > self._seen, self._preemptions()
                self._adaptive.adapt(1, self._inside, preempted)
            self._changed.notify_all()

    def _places(self) -> int:
        return self._size if self._adaptive is None else int(self._adaptive.size)


class Client:
    """Runs orders on an engine."""

    def __init__(self, engine: Any, usage: Any) -> None:
        """Push into `engine`; `usage` counts its preemptions."""
        self._engine, self._usage = engine, usage
        self._refusals = 0
        self._orders = 0

    async def run(self, order: Order) -> dict[str, Any]:
        """Run one order; return its moments on the monotonic clock, and how often vLLM refused."""
        lines = [json.loads(line) for line in Path(order.path).read_text().splitlines()]
        await self._engine.reset_prefix_cache()
        self._usage.latest.reset()
        self._refusals = 0
        self._orders += 1
        window = Window(order.window, lambda: int(self._usage.latest.preemptions))
        started_ns = time.monotonic_ns()
        pairs = zip(lines, order.arrivals_s, strict=True)
        tokens = await asyncio.gather(*(self._one(line, at_s, i, window) for i, (line, at_s) in enumerate(pairs)))
        return {
            "started_ns": started_ns,
            "ended_ns": time.monotonic_ns(),
            "tokens": tokens,
            "refusals": self._refusals,
        }

    async def _one(self, line: dict[str, Any], at_s: float, index: int, window: Window) -> tuple[int, int]:
        """Run one line when its time has come; return its prompt and output tokens."""
        if at_s:
            await asyncio.sleep(at_s)
        await window.enter()
        try:
            return await self._generate(line, f"{self._orders}-{index}")
        finally:
            await window.leave()

    async def _generate(self, line: dict[str, Any], name: str) -> tuple[int, int]:
        from vllm import SamplingParams
        from vllm.exceptions import QueueOverflowError
        from vllm.sampling_params import RequestOutputKind

        body, pause_s = line["body"], FIRST_PAUSE_S
        while True:
            params = SamplingParams(
                max_tokens=body["max_tokens"],
                temperature=body["temperature"],
                extra_args=body["vllm_xargs"],
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            try:
                async for output in self._engine.generate({"prompt": body["prompt"]}, params, name):
                    last = output
                return len(last.prompt_token_ids), len(last.outputs[0].token_ids)
            except QueueOverflowError:
                self._refusals += 1
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, MOST_PAUSE_S)


async def serve() -> None:
    """Answer orders from standard input until it ends."""
    engine, usage = make_engine()
    client = Client(engine, usage)
    print(json.dumps({"ready": True}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await client.run(Order(**json.loads(line)))), flush=True)
    engine.shutdown()
    del client, engine  # its finalizer needs modules that the interpreter's own end has taken down already


if __name__ == "__main__":
    asyncio.run(serve())
